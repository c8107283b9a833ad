"""Mixed precision with torch alone; fp16 on a CPU works too (accelerate ignores it there)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from resilient.train.model.lowering import capability_of, require_hardware

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from resilient.train.arguments import TrainingArguments

_CLIP_EPSILON = 1e-6


# It may be entered again and again.
_NOTHING = nullcontext()


class Precision:
    """How forward, backward and the optimizer step run in a lower precision.

    Args:
        args: ``fp16``, ``bf16``.
        device: where the model is.

    Raises:
        ConfigError: the device cannot compute so.
    """

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        require_hardware(args, capability_of(device))
        self._device = device.type
        self._dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
        self.scaler = torch.amp.GradScaler(self._device) if args.fp16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self._device, self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate, scaled so that small fp16 gradients do not vanish."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def clip(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
    ) -> torch.Tensor:
        """Clip gradients to ``max_norm`` and return their total norm before (a scalar tensor).

        ``max_norm`` 0 measures and does not clip.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        gradients = [one.grad for one in parameters if one.grad is not None]
        norm = total_norm(gradients)
        if hasattr(norm, "full_tensor"):  # of sharded gradients; one number for all ranks
            norm = norm.full_tensor()
        if max_norm > 0 and not _is_surely_within(norm, max_norm):
            clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
        return norm

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients."""
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none=True)
            return
        # What torch's own does, but for the record that it opens for a profiler.
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = None

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False when fp16 gradients overflowed and it was skipped."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of gradients together (a scalar), the bits of ``get_total_norm``.

    Those of one kind need not be sorted by device and type first, which takes as long as a small
    model's norm.
    """
    kinds = {(type(one), one.device, one.dtype, one.layout) for one in gradients}
    if len(kinds) != 1 or type(gradients[0]) is not torch.Tensor:
        return get_total_norm(gradients, foreach=True)
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - as get_total_norm does
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total.detach()


def _is_surely_within(norm: torch.Tensor, max_norm: float) -> bool:
    """Say whether clipping would multiply every gradient by one.

    Torch multiplies by ``max_norm / (norm + 1e-6)``, at most 1; where that is 1 no bit changes.
    An accelerator is not waited for to know it.
    """
    return norm.device.type == "cpu" and norm.item() + _CLIP_EPSILON <= max_norm
