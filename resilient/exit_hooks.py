"""Exit hooks that close open checkpointers before the interpreter shuts down thread pools.

Functions that are registered with ``atexit`` run too late. At that time, our thread pools and the
pools of object store clients refuse work, so no request can be sent. The hooks by which the
standard library shuts down its own pools run early enough. Because these hooks have no public name,
only this module uses the hooks. In a Python without these hooks, ``atexit`` closes the
checkpointers, which may then fail.
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

# A process ends only once. Keys are the calls; values are the process and thread that asked.
_calls: dict[Callable[[], None], tuple[int, threading.Thread]] = {}


def register_exit_hook(call: Callable[[], None]) -> None:
    """Register a call for the end of the main program; calls run in reverse order.

    Only this process makes the call, never a fork of it. If the registering thread still runs at
    that time, ``atexit`` makes the call after the thread ended.
    """
    _register_once()
    _calls[call] = (os.getpid(), threading.current_thread())


def unregister_exit_hook(call: Callable[[], None]) -> None:
    """Remove a registered call."""
    _calls.pop(call, None)


def run_exit_hooks(*, is_last: bool = False) -> None:
    """Make all registered calls now, even if one of them fails.

    Args:
        is_last: Also make the calls of threads that still run.

    Raises:
        BaseException: A call failed. If several calls fail, the last error has the others as
            context.
    """
    with ExitStack() as stack:
        for call, (process, thread) in list(_calls.items()):
            has_thread_ended = thread is threading.main_thread() or not thread.is_alive()
            if process == os.getpid() and (has_thread_ended or is_last):
                unregister_exit_hook(call)
                stack.callback(call)


@cache
def _register_once() -> None:
    """Register with both hooks of the interpreter, once; a fork inherits them."""
    # A Python without the hook raises AttributeError. After the main program, the hook raises
    # RuntimeError.
    with suppress(AttributeError, RuntimeError):
        threading._register_atexit(_run_and_report)  # type: ignore[attr-defined]  # noqa: SLF001
    atexit.register(_run_and_report, is_last=True)


def _run_and_report(*, is_last: bool = False) -> None:
    try:
        run_exit_hooks(is_last=is_last)
    except Exception as error:  # noqa: BLE001 - after a hook that raises, Python skips the others
        if isinstance(error, ResilientError):
            error.drop_hint_note()
        with suppress(OSError, ValueError, AttributeError):
            traceback.print_exception(error)
        if isinstance(error, ResilientError):
            say_error(error)
        write_stderr(
            "that failed after the script had ended, so its exit code does not show it; close() "
            "raises it: leave the `with` block, or call close()"
        )
