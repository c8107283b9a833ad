"""StopCoordinator, signal handlers.

Stopping on request: every rank ends after the same step.

Signals are seen by a thread, because the main thread may be inside a collective. Another thread
talks to the Board, because a Board may hang with the rank that serves it, and a deadline must be
kept even then. The agreement never goes over the collectives::

    any rank      posts    request              (its own signal)
    every rank    freezes: begins no new turn   (as soon as it sees a request)
    every rank    posts    entered/<rank>       the last turn it has begun
    every rank    agreed = max(entered)         turns up to there are finished, later ones not begun

A turn is a step, or a batch of the evaluation after a step: so a long evaluation ends at once.
Nobody can be stuck: a rank that is inside turn t has posted t, so whoever is frozen before t is
let into it.

Signals reach the gate of a training, and nobody's handler is lost over it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.distributed.stop_request import StopRequest, read_stop_request
from resilient.errors import PeerFailed, Preempted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.clock import Clock
    from resilient.distributed.kv_store import KVStore
    from resilient.distributed.launch_env import World

_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 1.0
ORDERS = (signal.SIGTERM, signal.SIGINT)
# What schedulers send before they take a machine away. They never ask for more than to stop.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# One order often arrives twice: from the terminal or scheduler, and through a wrapper.
_SAME_ORDER_SECONDS = 0.5
_AGENT_MARGIN_SECONDS = 2.0
_BATCHES_MAX = 1 << 32
Turn = tuple[int, int]
"""A step, and how far the evaluation after it is; 0 for the step itself."""


class EvaluationInterrupted(Exception):
    """The ranks agreed to stop in the middle of an evaluation; the next life makes it."""


@dataclass(frozen=True, slots=True)
class StopDeadline:
    """How long a stop may take, and who cuts it short.

    Attributes:
        seconds: time from hearing of a request to leaving at once.
        is_supervised: an agent kills us when it is asked twice, so a second signal to us only
            says that somebody told both the agent and us.
        notes: folder where the agent says why and until when, before it signals.
    """

    seconds: float
    is_supervised: bool = False
    notes: str = ""

    @classmethod
    def under_agent(cls, agent_seconds: float, notes: str = "") -> StopDeadline:
        """Return a grace that ends a little before the agent's, which ends with SIGKILL."""
        return cls(_before_agent(agent_seconds), is_supervised=True, notes=notes)

    def request(self, reason: str, now_seconds: float) -> StopRequest:
        """Return the agent's request if it left one, else one for ``reason`` with this grace."""
        told = read_stop_request(self.notes)
        if told is None:
            return StopRequest(reason, now_seconds + self.seconds)
        left_seconds = _before_agent(told.left_seconds(now_seconds))
        return StopRequest(told.reason, now_seconds + left_seconds)


def _before_agent(seconds: float) -> float:
    return max(seconds - _AGENT_MARGIN_SECONDS, seconds / 2)


def leave_at_once(why: str, status: int) -> None:
    """End this process now; stores are atomic, so nothing that is durable is harmed."""
    os.write(2, f"resilient: left at once: {why}\n".encode())
    os._exit(status)


class StopCoordinator:
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
        board: KVStore | None,
        grace: StopDeadline,
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
        self._entered: Turn = (0, 0)
        self._finished: Callable[[], int] = lambda: 0
        self._durable = -1
        self._request: StopRequest | None = None
        self._agreed: Turn | None = None
        self._closed = False
        self._signal = 0
        self._signal_at_seconds = 0.0
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

    @property
    def left_seconds(self) -> float:
        """How long a stop may still take; without end while nobody asked."""
        if self._request is None:
            return float("inf")
        return self._request.left_seconds(self._clock.monotonic_seconds())

    def start(self, step: int, finished: Callable[[], int] | None = None) -> None:
        """Begin to listen.

        Args:
            step: the last step that is done; it is durable, or there is nothing to save yet.
            finished: tells the last step that is done, from any thread.
        """
        self._entered = (step, 0)
        self._durable = step
        self._finished = finished or (lambda: self._entered[0])
        for thread in self._threads:
            thread.start()

    def landed(self, step: int) -> None:
        """Take note that a checkpoint of ``step`` is durable: leaving now would lose no step."""
        self._durable = max(self._durable, step)

    def enter(self, step: int) -> bool:
        """Ask to begin ``step``; waits only while a stop is being agreed on.

        Returns:
            False when the ranks agreed to stop before it.
        """
        return self._enter((step, 0))

    def enter_batch(self) -> bool:
        """Ask to begin the next batch of an evaluation; else as ``enter``."""
        step, batch = self._entered
        return self._enter((step, batch + 1))

    def enter_gathering(self) -> bool:
        """Ask to begin what ranks do together after their last batch of a dataset.

        They may have had one batch more or less, so the turns of the next dataset count from here.
        """
        step, batch = self._entered
        return self._enter((step, (batch // _BATCHES_MAX + 1) * _BATCHES_MAX))

    def _enter(self, turn: Turn) -> bool:
        with self._changed:
            if self._request is not None:
                self._changed.wait_for(lambda: self._agreed is not None or self._closed)
                if self._agreed is not None and turn > self._agreed:
                    return False
            self._entered = turn
            return True

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop, as a signal would."""
        now_seconds = self._clock.monotonic_seconds()
        self._hear(StopRequest(reason, now_seconds + self._grace.seconds))

    def meet(self, value: int) -> int:
        """Return the greatest ``value`` of any rank, once all have agreed to stop. Collective.

        A rank that does not come by the deadline is lost, and what follows fails without it.
        """
        if self._board is None:
            return value
        self._threads[-1].join()
        keys = [f"{self._scope}/met/{rank}" for rank in range(self._world.size)]
        self._board.post(keys[self._world.rank], str(value).encode())
        shown = self._board.wait(keys, max(0.0, self.left_seconds))
        return max(int(one) for one in shown) if shown else value

    def go(self, why: str) -> None:
        """End this process at once, as preempted: others do what is left to do."""
        self._leave(why, Preempted.exit_code)

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

    def _talk(self, board: KVStore) -> None:
        # A board that is gone means that its host died: the collectives will say so.
        with suppress(PeerFailed):
            while not self._wait_closed(lambda: self._request is not None):
                posted = board.peek(f"{self._scope}/request")
                if posted is not None:
                    now_seconds = self._clock.monotonic_seconds()
                    self._hear(StopRequest.from_json(json.loads(posted), now_seconds))
            if self._request is None:
                return
            # Frozen, so `entered` only moves when the agreement lets it.
            request = self._request.to_json(self._clock.monotonic_seconds())
            board.post(f"{self._scope}/request", json.dumps(request).encode())
            board.post(self._key(self._world.rank), json.dumps(self._entered).encode())
            keys = [self._key(rank) for rank in range(self._world.size)]
            shown = None
            while shown is None and not self._closed:
                shown = board.wait(keys, _POLL_SECONDS)
            turns = [json.loads(one) for one in shown or [b"[0, 0]"]]
            self._agree(max((step, batch) for step, batch in turns))

    def _wait_closed(self, wanted: Callable[[], bool]) -> bool:
        """Wait one poll; say whether we were closed or what was ``wanted`` came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or wanted(), _POLL_SECONDS)

    def _read_signals(self) -> None:
        ready, _, _ = select.select([self._wake_read], [], [], _POLL_SECONDS)
        if not ready:
            return
        for number in os.read(self._wake_read, 64):
            if number in (*ORDERS, *NOTICES):
                self._take(number)

    def _take(self, number: int) -> None:
        now_seconds = self._clock.monotonic_seconds()
        self._hear(self._grace.request(signal.Signals(number).name, now_seconds))
        if number in NOTICES:
            return
        if not self._signal:
            self._signal, self._signal_at_seconds = number, now_seconds
        elif (
            not self._grace.is_supervised
            and now_seconds - self._signal_at_seconds > _SAME_ORDER_SECONDS
        ):
            self._leave("a second signal came", 128 + number)

    def _check_deadline(self) -> None:
        request = self._request
        if request is None or self.left_seconds > 0:
            return
        if self._finished() <= self._durable:
            # In the middle of a step: nothing that was finished is lost by leaving.
            why = f"{request.reason}: the time is over, and all finished steps are durable"
            self._leave(why, Preempted.exit_code)
        number = self._signal or signal.SIGTERM
        self._leave(f"the time is over that {request.reason} left", 128 + number)

    def _hear(self, request: StopRequest) -> None:
        """Freeze; a later request can only shorten the time. Who is alone agrees with itself."""
        with self._changed:
            if self._request is not None:
                self._request = self._request.within(request)
                return
            self._request = request
            if self._board is None:
                self._agreed = self._entered
            self._changed.notify_all()

    def _agree(self, turn: Turn) -> None:
        with self._changed:
            self._agreed = turn
            self._changed.notify_all()

    def _key(self, rank: int) -> str:
        return f"{self._scope}/entered/{rank}"


_Handlers = dict[int, Any]
# The handlers that a gate stands in for, while it listens.
_replaced: list[_Handlers] = []


@contextmanager
def listening_to_signals(gate: StopCoordinator) -> Iterator[None]:
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
