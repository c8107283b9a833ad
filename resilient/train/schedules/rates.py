"""The learning rate of a group of parameters: a number, or a tensor that a compiled step reads."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate; a tensor stays where it is, for a step was compiled with it.

    Args:
        group: one of ``optimizer.param_groups``.
        rate: what it is from now on.
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@contextmanager
def as_they_were(optimizer: Optimizer) -> Iterator[None]:
    """Let somebody put numbers where tensors are; they are tensors again afterwards."""
    held = [group["lr"] for group in optimizer.param_groups]
    yield
    for group, had in zip(optimizer.param_groups, held, strict=True):
        rate, group["lr"] = float(group["lr"]), had
        set_rate(group, rate)
