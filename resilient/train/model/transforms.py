"""Changes to a model's forward pass: torch.compile, NEFTune noise, overflow debugging.

Overflow debugging (``debug="underflow_overflow"``) finds the first NaN or infinite number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.distributed import heartbeat
from resilient.errors import ConfigError, ResilientError
from resilient.train.arguments.choices import did_you_mean
from resilient.train.model.loss import base_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from resilient.distributed.heartbeat import ProgressReporter
    from resilient.train.arguments import TrainingArguments

FRAMES_MAX = 21


class UnderflowOverflow:
    """Check of every module's weights, inputs and outputs after its forward pass.

    For debugging only, because reading every number is slow.

    Args:
        model: Model whose modules are checked.
        frames_max: Number of module passes in the report, newest last.
    """

    def __init__(self, model: nn.Module, frames_max: int = FRAMES_MAX) -> None:
        self._names = {module: name or "(model)" for name, module in model.named_modules()}
        self._frames: deque[str] = deque(maxlen=frames_max)
        self._model = model
        self._passes = 0

    def check_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the numbers of a module's pass.

        Raises:
            ResilientError: A number is NaN or infinite. The message shows the passes before it.
        """
        lines = [f"{'':17}{self._names[module]} {type(module).__name__}"]
        names = [
            name
            for name, tensor in _tensors(module, inputs, output)
            if _describe(name, tensor.detach(), lines)
        ]
        self._frames.append("\n".join(lines))
        if names:
            frames = "\n".join(self._frames)
            raise ResilientError(
                f"NaN or infinite numbers in {', '.join(names)} of `{self._names[module]}` in "
                f"forward pass {self._passes + 1} of this attempt; the last {len(self._frames)} "
                f"passes of modules:\nabs min  abs max  of\n{frames}",
                hint="lower `learning_rate`, clip by `max_grad_norm`, or use bf16 instead of fp16",
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
        for key, item in value.items():
            yield from _leaves(f"{name}[{key}]", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item)


def _describe(name: str, value: torch.Tensor, lines: list[str]) -> bool:
    """Add a line about a tensor; return whether it has a NaN or infinite number."""
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return False
    size = value.abs()
    lines.append(f"{float(size.min()):8.2e} {float(size.max()):8.2e} {name}")
    return not bool(torch.isfinite(size).all())


@contextmanager
def checking_numbers(model: nn.Module, debug: list[str] | str) -> Iterator[None]:
    """Check the numbers of ``model`` inside the context, if ``debug`` requests the check."""
    if "underflow_overflow" not in debug:
        yield
        return
    detector = UnderflowOverflow(model)
    handles = [module.register_forward_hook(detector.check_module) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


INDUCTOR = "inductor"


def compile_in_place(args: TrainingArguments, model: nn.Module) -> None:
    """Make calls of ``model`` run compiled, if the arguments request it.

    The module object stays the same, so its parameters keep their names. A checkpoint of a compiled
    model therefore equals a checkpoint of the model. Compilation happens at the first call.

    Raises:
        ConfigError: The backend, the mode or a required compiler does not exist.
    """
    if not args.torch_compile:
        return
    backend = args.torch_compile_backend or INDUCTOR
    _require_backend(backend)
    if args.torch_compile_mode is not None:
        _require_mode(backend, args.torch_compile_mode)
    if backend == INDUCTOR and next(model.parameters()).device.type == "cpu":
        _require_compiler()
    model.compile(backend=backend, mode=args.torch_compile_mode)


def _require_backend(backend: str) -> None:
    import torch._dynamo

    backends = torch._dynamo.list_backends(exclude_tags=())  # noqa: SLF001 - torch's documented way
    if backend not in backends:
        raise ConfigError(
            f"`torch_compile_backend`={backend!r} is not a backend of torch here: use one of "
            f"{', '.join(backends)}{did_you_mean(backend, backends)}"
        )


def _require_mode(backend: str, mode: str) -> None:
    if backend != INDUCTOR:
        raise ConfigError(
            "`torch_compile_mode` belongs to inductor, but `torch_compile_backend` is "
            f"{backend!r}: omit one of them"
        )
    import torch._inductor

    modes = list(torch._inductor.list_mode_options())  # noqa: SLF001 - torch's documented way
    if mode not in modes:
        raise ConfigError(
            f"`torch_compile_mode`={mode!r} is not accepted: use one of {', '.join(modes)}"
            f"{did_you_mean(mode, modes)}"
        )


def showing_compilers(
    progress: ProgressReporter, args: TrainingArguments
) -> AbstractContextManager[None]:
    """Report torch's compilation as progress, because such a step takes minutes without a hang."""
    return heartbeat.report_compilation(progress, is_wanted=args.torch_compile)


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "`torch_compile` on the CPU needs a C++ compiler, but none is installed",
            hint="install g++, or set torch_compile_backend='aot_eager'",
        ) from error


# Dimensions of a batch of embeddings: samples, positions, values per position.
_DIMENSIONS = 3


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add uniform noise of ``alpha / sqrt(L * d)`` to the embeddings of a model in training.

    The noise comes from the device's random stream, whose state is in every checkpoint, so a
    resumed run adds the same noise. Evaluation has none. The values equal those of Transformers bit
    for bit.

    Args:
        model: Model with ``get_input_embeddings``, or with one ``nn.Embedding``.
        alpha: Strength; None or 0: no noise.

    Raises:
        ConfigError: The model's input embeddings cannot be determined.
    """
    if not alpha:
        yield
        return
    handle = input_embeddings(model).register_forward_hook(partial(_add_noise, alpha))
    try:
        yield
    finally:
        handle.remove()


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the module that embeds a model's inputs.

    Raises:
        ConfigError: The model has no ``get_input_embeddings``, and no ``nn.Embedding`` or several.
    """
    base = base_of(model)
    get = getattr(base, "get_input_embeddings", None)
    if callable(get):
        embeddings: nn.Module = get()
        return embeddings
    embedding_modules = [module for module in base.modules() if isinstance(module, nn.Embedding)]
    if len(embedding_modules) != 1:
        raise ConfigError(
            f"`neftune_noise_alpha` cannot find which of {len(embedding_modules)} nn.Embedding "
            f"modules of `{type(base).__name__}` embeds its inputs: give the model a method "
            "`get_input_embeddings` that returns it"
        )
    return embedding_modules[0]


def _add_noise(alpha: float, module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    if not module.training:
        return output
    if output.dim() != _DIMENSIONS:
        raise ConfigError(
            f"`neftune_noise_alpha` needs embeddings of shape (samples, length, size), and "
            f"`{type(module).__name__}` returned {tuple(output.shape)}"
        )
    noise_max = float(alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2))))
    return output + torch.zeros_like(output).uniform_(-noise_max, noise_max)
