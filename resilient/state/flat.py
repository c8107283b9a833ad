"""A tensor that is spread over ranks in runs of elements, cut anywhere, as ZeRO does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlatShard(torch.Tensor):
    """A global tensor of which this rank alone holds one run of elements, laid out row-major.

    It has the shape and dtype of the whole and can be saved, and filled when a checkpoint is
    loaded; it cannot be computed with.

    Attributes:
        start: the run's first element in the whole tensor.
        memory: the run, one-dimensional and dense; without elements this rank holds nothing.
    """

    start: int
    memory: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], shape: Sequence[int], start: int, memory: torch.Tensor) -> Self:
        """Describe ``memory``, which is shared, as a part of a tensor of ``shape``."""
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - torch documents it so
        made = make(cls, torch.Size(shape), dtype=memory.dtype, device=memory.device)
        made.start = start
        # By its address a tied parameter is known again, so nothing has an address of its own, too.
        made.memory = memory if memory.numel() else memory.new_empty(1)[:0]
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it so, and types another one
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        """Detach, or make another of the same layout; everything else is refused."""
        one, packet = args[0], func.overloadpacket
        if packet is torch.ops.aten.detach:
            made = cls(one.shape, one.start, one.memory)
            made.memory = one.memory
            return made
        if packet is torch.ops.aten.empty_like:
            dtype = (kwargs or {}).get("dtype") or one.dtype
            return cls(one.shape, one.start, torch.empty_like(one.memory, dtype=dtype))
        raise NotImplementedError(f"{func} needs the whole tensor, of which a rank holds a part")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what is held."""
        stop = self.start + self.memory.numel()
        return f"FlatShard(shape={tuple(self.shape)}, holds={self.start}:{stop})"
