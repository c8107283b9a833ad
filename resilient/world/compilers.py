"""Shows when torch's compiler is at work: a step may then take minutes, and is no hang."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.world.pulse import Pulse

_NAME = "torch._dynamo.callback"


@contextmanager
def showing_compilers(pulse: Pulse, *, is_wanted: bool = False) -> Iterator[None]:
    """Show compilations inside.

    Args:
        pulse: what shows them.
        is_wanted: whether there will be any. Without, they are shown if somebody has imported the
            compiler already; it costs a second, so not for nothing.
    """
    module: Any = import_module(_NAME) if is_wanted else sys.modules.get(_NAME)
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
