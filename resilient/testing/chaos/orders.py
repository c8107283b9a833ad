"""Orders to end: a rehearsal that gets one takes down all that it has begun."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from resilient.testing.chaos.processes import children, kill_all

if TYPE_CHECKING:
    from collections.abc import Iterator

_ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ordered(BaseException):
    """Somebody asked this process to end.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def obeying_orders() -> Iterator[None]:
    """Inside, an order is raised; what this process has started is gone when it leaves.

    The way out is not disturbed by another order. What was ignored before (nohup) stays ignored.
    Main thread only.

    Raises:
        Ordered: SIGTERM, SIGINT or SIGHUP came.
    """
    before = {one: signal.getsignal(one) for one in _ORDERS}
    heard = [one for one, handler in before.items() if handler != signal.SIG_IGN]

    def obey(number: int, _frame: object) -> NoReturn:
        for one in heard:
            signal.signal(one, lambda *_: None)
        raise Ordered(number)

    for one in heard:
        signal.signal(one, obey)
    try:
        yield
    except Ordered:
        # It may have come between a start and the moment in which somebody knew of it.
        for pid in children(os.getpid()):
            kill_all(pid)
        raise
    finally:
        for one in heard:
            signal.signal(one, before[one])
