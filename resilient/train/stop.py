"""Stopping on request: every rank ends after the same step.

Signals are seen by a thread, because the main thread may be inside a collective. Another thread
talks to the Board, because a Board may hang with the rank that serves it, and a deadline must be
kept even then. The agreement never goes over the collectives::

    any rank      posts    request              (its own signal)
    every rank    freezes: begins no new step   (as soon as it sees a request)
    every rank    posts    entered/<rank>       the last step it has begun
    every rank    agreed = max(entered)         steps up to there are finished, later ones not begun

Nobody can be stuck: a rank that is inside step s has posted s, so whoever is frozen before s is
let into it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.clock import Clock
    from resilient.world.board import Board
    from resilient.world.world import World

_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# One order often arrives twice: from the terminal or scheduler, and through a wrapper.
_SAME_ORDER_SECONDS = 0.5
_AGENT_MARGIN_SECONDS = 2.0
_Handlers = dict[int, Any]
# The handlers that a gate stands in for, while it listens.
_replaced: list[_Handlers] = []


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why we are asked to stop, and how long we may take."""

    reason: str
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Grace:
    """How long a stop may take, and who cuts it short.

    Attributes:
        seconds: time from hearing of a request to leaving at once.
        is_supervised: an agent kills us when it is asked twice, so a second signal to us only
            says that somebody told both the agent and us.
    """

    seconds: float
    is_supervised: bool = False

    @classmethod
    def under_agent(cls, agent_seconds: float) -> Grace:
        """Return a grace that ends a little before the agent's, which ends with SIGKILL."""
        return cls(
            max(agent_seconds - _AGENT_MARGIN_SECONDS, agent_seconds / 2), is_supervised=True
        )


def leave_at_once(why: str, status: int) -> None:
    """End this process now; stores are atomic, so nothing that is durable is harmed."""
    os.write(2, f"resilient: left at once: {why}\n".encode())
    os._exit(status)


class StopGate:
    """What the loop asks before each step, and the thread that finds out.

    Args:
        world: who this rank is.
        board: where ranks agree; None in a world of one.
        grace: time from hearing of a request to leaving at once, and what a second signal means.
        clock: tells the time of the deadline.
        scope: prefix of the keys; new for every life on the same board.
        leave: ends the process when the time is over or a second signal comes.
    """

    def __init__(
        self,
        world: World,
        board: Board | None,
        grace: Grace,
        clock: Clock,
        *,
        scope: str = "stop",
        leave: Callable[[str, int], None] = leave_at_once,
    ) -> None:
        self._world = world
        self._board = board.another() if board is not None else None
        self._grace = grace
        self._clock = clock
        self._scope = scope
        self._leave = leave
        self._changed = threading.Condition()
        self._entered = 0
        self._request: StopRequest | None = None
        self._agreed: int | None = None
        self._closed = False
        self._signal = 0
        self._signal_at_seconds = 0.0
        self._heard_at_seconds = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._threads = [threading.Thread(target=self._watch, name="stop-watch", daemon=True)]
        if self._board is not None:
            talk = threading.Thread(
                target=self._talk, args=(self._board,), name="stop-talk", daemon=True
            )
            self._threads.append(talk)

    @property
    def request(self) -> StopRequest | None:
        """The request that was heard, if any."""
        return self._request

    @property
    def wake_fd(self) -> int:
        """A file descriptor; one byte written to it is a signal's number."""
        return self._wake_write

    def start(self, step: int) -> None:
        """Begin to listen; ``step`` is the last step that is done."""
        self._entered = step
        for thread in self._threads:
            thread.start()

    def enter(self, step: int) -> bool:
        """Ask to begin ``step``; waits only while a stop is being agreed on.

        Returns:
            False when the ranks agreed to stop before it.
        """
        with self._changed:
            if self._request is not None:
                self._changed.wait_for(lambda: self._agreed is not None or self._closed)
                if self._agreed is not None and step > self._agreed:
                    return False
            self._entered = step
            return True

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop, as a signal would."""
        self._hear(StopRequest(reason, self._grace.seconds))

    def close(self) -> None:
        """Stop listening; whoever waits in ``enter`` goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        os.write(self._wake_write, b"\0")
        for thread in self._threads:
            if thread.is_alive():
                # A board whose host is frozen never answers; its thread ends with the process.
                thread.join(_FAREWELL_SECONDS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _watch(self) -> None:
        while not self._closed:
            self._read_signals()
            self._check_deadline()

    def _talk(self, board: Board) -> None:
        # A board that is gone means that its host died: the collectives will say so.
        with suppress(PeerFailed):
            while not self._wait_closed(lambda: self._request is not None):
                posted = board.peek(f"{self._scope}/request")
                if posted is not None:
                    self._hear(StopRequest(**json.loads(posted)))
            if self._request is None:
                return
            # Frozen, so `entered` only moves when the agreement lets it.
            board.post(f"{self._scope}/request", json.dumps(asdict(self._request)).encode())
            board.post(self._key(self._world.rank), str(self._entered).encode())
            keys = [self._key(rank) for rank in range(self._world.size)]
            shown = None
            while shown is None and not self._closed:
                shown = board.wait(keys, _POLL_SECONDS)
            self._agree(max(int(one) for one in shown or [b"0"]))

    def _wait_closed(self, wanted: Callable[[], bool]) -> bool:
        """Wait one poll; say whether we were closed or what was ``wanted`` came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or wanted(), _POLL_SECONDS)

    def _read_signals(self) -> None:
        ready, _, _ = select.select([self._wake_read], [], [], _POLL_SECONDS)
        if not ready:
            return
        for number in os.read(self._wake_read, 64):
            if number in _SIGNALS:
                self._take(number)

    def _take(self, number: int) -> None:
        now_seconds = self._clock.monotonic_seconds()
        if not self._signal:
            self._signal, self._signal_at_seconds = number, now_seconds
            self._hear(StopRequest(signal.Signals(number).name, self._grace.seconds))
        elif (
            not self._grace.is_supervised
            and now_seconds - self._signal_at_seconds > _SAME_ORDER_SECONDS
        ):
            self._leave("a second signal came", 128 + number)

    def _check_deadline(self) -> None:
        if self._request is None:
            return
        waited = self._clock.monotonic_seconds() - self._heard_at_seconds
        if waited > self._request.deadline_seconds:
            number = self._signal or signal.SIGTERM
            self._leave(f"{waited:.0f} s after {self._request.reason}", 128 + number)

    def _hear(self, request: StopRequest) -> None:
        """Freeze: the first request counts. A rank that is alone agrees with itself."""
        with self._changed:
            if self._request is not None:
                return
            self._heard_at_seconds = self._clock.monotonic_seconds()
            self._request = request
            if self._board is None:
                self._agreed = self._entered
            self._changed.notify_all()

    def _agree(self, step: int) -> None:
        with self._changed:
            self._agreed = step
            self._changed.notify_all()

    def _key(self, rank: int) -> str:
        return f"{self._scope}/entered/{rank}"


@contextmanager
def listening_to_signals(gate: StopGate) -> Iterator[None]:
    """Let SIGTERM and SIGINT reach ``gate``; only in the main thread, elsewhere nothing is done.

    The interpreter writes the signal's number to the gate's descriptor from the C handler, so
    the watcher hears it even while the main thread is inside a collective.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: _Handlers = {number: signal.signal(number, _ignore) for number in _SIGNALS}
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


def _put_back(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _give_signals_back() -> None:
    """In a forked child: its signals are its own, and none of them is a request to us."""
    if _replaced:
        signal.set_wakeup_fd(-1)
        for handlers in reversed(_replaced):
            _put_back(handlers)
        _replaced.clear()


# What is registered stays registered, so it is done once and does nothing between trainings.
os.register_at_fork(after_in_child=_give_signals_back)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the watcher acts. Without a handler the process would just die."""
