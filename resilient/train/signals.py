"""Signals reach the gate of a training, and nobody's handler is lost over it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.train.stop import NOTICES, ORDERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.train.stop import StopGate

_Handlers = dict[int, Any]
# The handlers that a gate stands in for, while it listens.
_replaced: list[_Handlers] = []


@contextmanager
def listening_to_signals(gate: StopGate) -> Iterator[None]:
    """Let signals reach ``gate``; only in the main thread, elsewhere nothing is done.

    SIGTERM and SIGINT always; SIGUSR1 and SIGUSR2 unless the script does something with them.

    The interpreter writes the signal's number to the gate's descriptor from the C handler, so
    the watcher hears it even while the main thread is inside a collective.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [*ORDERS, *(number for number in NOTICES if _kills(number))]
    handlers: _Handlers = {number: signal.signal(number, _ignore) for number in numbers}
    wakeup = signal.set_wakeup_fd(gate.wake_fd, warn_on_full_buffer=False)
    _replaced.append(handlers)
    try:
        yield
    finally:
        # A forked child that leaves this way has given them back already.
        with suppress(ValueError):
            _replaced.remove(handlers)
        signal.set_wakeup_fd(wakeup)
        _put_back(handlers)


def _kills(number: int) -> bool:
    """Say whether a signal would kill this process; faulthandler's handlers only the kernel knows.

    Where the kernel does not say, what Python knows counts.
    """
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return False
    with suppress(OSError, ValueError, StopIteration):
        rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        caught = next(row for row in rows if row.startswith("SigCgt:")).split()[1]
        return not int(caught, 16) >> (number - 1) & 1
    return True


def _put_back(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class _Held(threading.local):
    """The signals that this thread had blocked before it forked; None while it does not fork."""

    before: set[int] | None = None


_held = _Held()


def _hold_signals() -> None:
    """Before a fork: what comes until the child has its own handlers waits, and is not lost.

    A child starts with the parent's C handler and descriptor, so a signal sent to it at once would
    be taken for a request to the training, and Python forgets it in the child.
    """
    if _replaced:
        _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, [*ORDERS, *NOTICES])


def _let_signals_go() -> None:
    """After a fork, in both processes: deliver what came meanwhile."""
    before, _held.before = _held.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _give_signals_back() -> None:
    """In a forked child: its signals are its own, and none of them is a request to us."""
    if _replaced:
        signal.set_wakeup_fd(-1)
        for handlers in reversed(_replaced):
            _put_back(handlers)
        _replaced.clear()
    _let_signals_go()


# What is registered stays registered, so it is done once and does nothing between trainings.
os.register_at_fork(
    before=_hold_signals, after_in_parent=_let_signals_go, after_in_child=_give_signals_back
)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the watcher acts. Without a handler the process would just die."""
