"""A model that torch.compile makes faster, and that keeps its names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.train.arguments.words import did_you_mean
from resilient.world import compilers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.world.pulse import Pulse

INDUCTOR = "inductor"


def compile_in_place(args: TrainingArguments, model: nn.Module) -> None:
    """Let calls of ``model`` run compiled, if the arguments ask for it.

    The module stays itself, so its parameters keep their names and a checkpoint of a compiled
    model is one of the model. It is compiled when it is first called.

    Raises:
        ConfigError: there is no such backend or mode, or no compiler for it.
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

    known = torch._dynamo.list_backends(exclude_tags=())  # noqa: SLF001 - torch's documented way
    if backend not in known:
        raise ConfigError(
            f"`torch_compile_backend`={backend!r} is no backend of torch here: use one of "
            f"{', '.join(known)}{did_you_mean(backend, known)}"
        )


def _require_mode(backend: str, mode: str) -> None:
    if backend != INDUCTOR:
        raise ConfigError(
            f"`torch_compile_mode` is inductor's, and `torch_compile_backend` is {backend!r}: "
            "leave one of them out"
        )
    import torch._inductor

    known = list(torch._inductor.list_mode_options())  # noqa: SLF001 - torch's documented way
    if mode not in known:
        raise ConfigError(
            f"`torch_compile_mode`={mode!r} is not accepted: use one of {', '.join(known)}"
            f"{did_you_mean(mode, known)}"
        )


def showing_compilers(pulse: Pulse, args: TrainingArguments) -> AbstractContextManager[None]:
    """Show when torch's compiler is at work: a step may then take minutes, and is no hang."""
    return compilers.showing_compilers(pulse, is_wanted=args.torch_compile)


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "`torch_compile` on the CPU needs a C++ compiler, and there is none",
            hint="install g++, or set torch_compile_backend='aot_eager'",
        ) from error
