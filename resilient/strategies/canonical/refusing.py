"""Modules whose passes are not functions of one micro-batch, and what shows that they are not.

A module that changes a buffer in its forward pass (running statistics, the vectors of spectral
norm) or a parameter (a codebook, the weights of a teacher) carries something from one micro-batch
to the next; which was the one before depends on how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_INSTEAD = (
    "use a norm of single samples (GroupNorm, LayerNorm), or freeze it: call `.eval()` on it in "
    "`on_train_begin`, or make it with track_running_stats=False"
)
_BETWEEN = "change it between steps, on every rank alike: in `on_step_end` of a callback"


def refuse_mixing(model: nn.Module) -> None:
    """Refuse modules that are known to carry state from one micro-batch to the next.

    Call it when the model is in the mode in which it is trained.

    Raises:
        ConfigError: names the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise _mixes(name, module, "it computes with the samples of all ranks together")
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            raise _mixes(
                name, module, "its running statistics depend on the order of micro-batches"
            )


def refuse_layouts(model: nn.Module) -> None:
    """Refuse parameters whose elements do not fill their memory, and sparse gradients.

    Raises:
        ConfigError: names the parameter or the module.
    """
    for name, one in model.named_parameters():
        if one.requires_grad and torch.empty_like(one).stride() != one.stride():
            raise ConfigError(
                f"parameter `{name}` of shape {tuple(one.shape)} has strides {one.stride()}, and "
                "reduction='canonical' sums what lies dense: make it with .contiguous()"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module `{name}` ({type(module).__name__}) has sparse gradients, and "
                "reduction='canonical' adds dense ones: write sparse=False"
            )


def _mixes(name: str, module: nn.Module, why: str, hint: str = _INSTEAD) -> ConfigError:
    return ConfigError(
        f"module `{name}` ({type(module).__name__}) cannot be trained with "
        f"reduction='canonical': {why}",
        hint=hint,
    )


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The buffers and parameters of a model as they were; they must stay so in every pass.

    Attributes:
        seen: by name: the tensor's identity and the number of changes to it.
    """

    seen: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(model: nn.Module) -> Unchanged:
        """Return those of a model as they are."""
        return Unchanged({name: (id(one), _changes(one)) for name, one in tensors_of(model)})

    def require_same(self, model: nn.Module) -> None:
        """Refuse a model whose forward pass has changed one, or put another in its place.

        Raises:
            ConfigError: names the module.
        """
        now = Unchanged.of(model).seen
        changed = sorted(
            name for name in {*now, *self.seen} if now.get(name) != self.seen.get(name)
        )
        refuse_changed(model, changed)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that a forward pass may read and must not change."""
    return chain(model.named_buffers(), model.named_parameters())


def refuse_changed(model: nn.Module, changed: Sequence[str]) -> None:
    """Refuse a model that has changed buffers or parameters, by their names.

    Raises:
        ConfigError: there are any; names the module of the first.
    """
    if changed:
        owner, _, name = changed[0].rpartition(".")
        module = model.get_submodule(owner)
        if name in dict(module.named_parameters(recurse=False)):
            why = f"its forward pass changes its parameter `{name}`"
            raise _mixes(owner, module, why, _BETWEEN)
        raise _mixes(owner, module, f"its forward pass changes its buffer `{name}`")


def _changes(one: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; torch does not count in inference mode."""
    return -1 if one.is_inference() else one._version  # noqa: SLF001 - torch has no other
