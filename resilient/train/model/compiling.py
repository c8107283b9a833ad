"""A model that torch.compile makes faster, and that keeps its names."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.words import did_you_mean
from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def showing_compilers(pulse: Pulse, args: TrainingArguments) -> Iterator[None]:
    """Show when torch's compiler is at work: a step may then take minutes, and is no hang."""
    name = "torch._dynamo.callback"
    # Imported by whoever compiles; it costs a second, so not for nothing.
    module: Any = import_module(name) if args.torch_compile else sys.modules.get(name)
    if module is None:
        yield
        return
    before: list[Phase] = []

    def begin(_: object) -> None:
        before.append(pulse.phase)
        pulse.enter(Phase.COMPILING)

    def end(_: object) -> None:
        pulse.enter(before.pop())

    handler = module.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)


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
