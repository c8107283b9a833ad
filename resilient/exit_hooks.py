"""What a program left open is closed when its main thread has ended, and before pools are shut.

Exit functions of ``atexit`` come too late for that: thread pools refuse work by then, ours and
those of the clients of object stores, so nothing could be sent any more. The hooks that the pools
of the standard library are shut by come in time. They have no public name, so nothing but this
module uses them, and ``atexit`` does the same later where a Python has none.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - the newest hook is called first: theirs is older
import os
import threading
import traceback
from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING

from resilient.errors import ResilientError
from resilient.events import say_error, write_stderr

if TYPE_CHECKING:
    from collections.abc import Callable

# A process ends once. By call: which process asked for it, and which of its threads.
_calls: dict[Callable[[], None], tuple[int, threading.Thread]] = {}


def register_exit_hook(call: Callable[[], None]) -> None:
    """Have ``call`` made when the main program has ended; what came last is called first.

    It is made by this process and no fork of it. A thread that still runs then, and has asked for
    it, is waited for: its call is made by ``atexit``.
    """
    _hook()
    _calls[call] = (os.getpid(), threading.current_thread())


def unregister_exit_hook(call: Callable[[], None]) -> None:
    """Do not make this call any more."""
    _calls.pop(call, None)


def run_exit_hooks(*, is_last: bool = False) -> None:
    """Make the calls now, each of them although another one fails.

    Args:
        is_last: those of threads that still run too.

    Raises:
        BaseException: what a call raised; of several the last, with the others as its context.
    """
    with ExitStack() as stack:
        for call, (process, thread) in list(_calls.items()):
            is_over = thread is threading.main_thread() or not thread.is_alive()
            if process == os.getpid() and (is_over or is_last):
                unregister_exit_hook(call)
                stack.callback(call)


@cache
def _hook() -> None:
    """Ask the interpreter for both ends, once; a fork inherits that."""
    # A Python without it, or one whose main program has ended.
    with suppress(AttributeError, RuntimeError):
        threading._register_atexit(_end_or_tell)  # type: ignore[attr-defined]  # noqa: SLF001
    atexit.register(_end_or_tell, is_last=True)


def _end_or_tell(*, is_last: bool = False) -> None:
    try:
        run_exit_hooks(is_last=is_last)
    except Exception as error:  # noqa: BLE001 - after a hook that raises, Python skips the others
        with suppress(OSError, ValueError, AttributeError):
            traceback.print_exception(error)
        if isinstance(error, ResilientError):
            say_error(error)
        write_stderr(
            "that failed when the script had ended, so its exit code does not tell; "
            "close() raises it: leave the `with` block, or call close()"
        )
