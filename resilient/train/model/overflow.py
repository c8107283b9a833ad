"""Where a model's numbers first become NaN or infinite (``debug="underflow_overflow"``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ResilientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

FRAMES_MAX = 21


class UnderflowOverflow:
    """Looks at the weights, inputs and outputs of every module after its forward pass.

    It reads every number, so it is slow: for looking for a fault, not for training.

    Args:
        model: whose modules.
        frames_max: forward passes of modules that the report shows, the last at the end.
    """

    def __init__(self, model: nn.Module, frames_max: int = FRAMES_MAX) -> None:
        self._names = {one: name or "(model)" for name, one in model.named_modules()}
        self._frames: deque[str] = deque(maxlen=frames_max)
        self._model = model
        self._passes = 0

    def look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Remember what a module's pass was made of.

        Raises:
            ResilientError: some of it is no number; shows the passes that led there.
        """
        lines = [f"{'':17}{self._names[module]} {type(module).__name__}"]
        found = [
            name
            for name, one in _tensors(module, inputs, output)
            if _describe(name, one.detach(), lines)
        ]
        self._frames.append("\n".join(lines))
        if found:
            frames = "\n".join(self._frames)
            raise ResilientError(
                f"NaN or infinite numbers in {', '.join(found)} of `{self._names[module]}` in "
                f"forward pass {self._passes + 1} of this life; the last {len(self._frames)} "
                f"passes of modules:\nabs min  abs max  of\n{frames}",
                hint="lower `learning_rate`, clip by `max_grad_norm`, or use bf16 in place of fp16",
            )
        if module is self._model:
            self._passes += 1


def _tensors(module: nn.Module, inputs: Any, output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from _leaves("input", inputs)
    yield from _leaves("output", output)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}[{key}]", one)
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from _leaves(f"{name}[{place}]", one)


def _describe(name: str, value: torch.Tensor, lines: list[str]) -> bool:
    """Add a line about a tensor; return whether some of it is no number."""
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return False
    size = value.abs()
    lines.append(f"{float(size.min()):8.2e} {float(size.max()):8.2e} {name}")
    return not bool(torch.isfinite(size).all())


@contextmanager
def looking_at_numbers(model: nn.Module, debug: list[str] | str) -> Iterator[None]:
    """Look at the numbers of ``model`` if ``debug`` names it; nothing stays on the model."""
    if "underflow_overflow" not in debug:
        yield
        return
    detector = UnderflowOverflow(model)
    handles = [one.register_forward_hook(detector.look) for one in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
