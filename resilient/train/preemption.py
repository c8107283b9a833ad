"""Stop of training on a request or a signal: all ranks agree on the last step.

One thread reads signals and enforces the deadline of the stop, because the main thread may be
inside a collective. Another thread sends requests to the key-value store. If the rank that serves
the store hangs, this thread hangs too, but the deadline is still met.

A turn is a step, or a batch of the evaluation after a step. A long evaluation therefore also stops
soon. The ranks agree on the last turn through the key-value store, never through collectives::

    any rank      posts    request              (it received a signal)
    every rank    freezes: begins no new turn   (as soon as it sees a request)
    every rank    posts    entered/<rank>       the last turn that it has begun
    every rank    agreed = max(entered)         the last turn; no later turn begins

The agreement cannot deadlock. If a rank waits in a collective of turn t, this rank posts t. The
agreed turn is then t or a later turn, so a rank that is frozen before t may begin t.
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
_JOIN_SECONDS = 1.0
ORDERS = (signal.SIGTERM, signal.SIGINT)
# Preemption notices of schedulers. These signals only request a stop.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# One request often arrives twice: directly from the terminal or scheduler, and from a wrapper.
_SAME_ORDER_SECONDS = 0.5
_AGENT_MARGIN_SECONDS = 2.0
_BATCHES_MAX = 1 << 32
Turn = tuple[int, int]
"""A step, and a batch of the evaluation after this step; batch 0 is the step itself."""


class EvaluationInterrupted(Exception):
    """The ranks agreed to stop during an evaluation; the next attempt repeats it."""


@dataclass(frozen=True, slots=True)
class StopDeadline:
    """Time limit of a stop, and the way the limit is enforced.

    Attributes:
        seconds: Time from receiving a request to exiting at once.
        is_supervised: An agent kills this process on a second request. A second signal then
            only means that both the agent and this process received the signal.
        request_folder: Folder where the agent writes the reason and the deadline before it signals.
    """

    seconds: float
    is_supervised: bool = False
    request_folder: str = ""

    @classmethod
    def under_agent(cls, agent_seconds: float, request_folder: str = "") -> StopDeadline:
        """Return a deadline slightly before the deadline of the agent, which ends with SIGKILL."""
        return cls(_before_agent(agent_seconds), is_supervised=True, request_folder=request_folder)

    def request(self, reason: str, now_seconds: float) -> StopRequest:
        """Return the agent's request if the agent wrote one, else a request for ``reason``."""
        stop_request = read_stop_request(self.request_folder)
        if stop_request is None:
            return StopRequest(reason, now_seconds + self.seconds)
        left_seconds = _before_agent(stop_request.left_seconds(now_seconds))
        return StopRequest(stop_request.reason, now_seconds + left_seconds)


def _before_agent(seconds: float) -> float:
    return max(seconds - _AGENT_MARGIN_SECONDS, seconds / 2)


def leave_at_once(why: str, status: int) -> None:
    """Exit immediately. Writes to stores are atomic, so durable data stays intact."""
    os.write(2, f"resilient: exited at once: {why}\n".encode())
    os._exit(status)


class StopCoordinator:
    """Gate before each step, and the threads that receive stop requests.

    Args:
        world: World as seen by this rank.
        kv_store: Key-value store in which ranks agree; None for a single rank.
        grace: Time limit of a stop, and the effect of a second signal.
        clock: Clock of the deadline.
        scope: Prefix of the keys; new for every attempt on the same store.
        leave: Ends the process at the deadline or on a second signal.
    """

    def __init__(
        self,
        world: World,
        kv_store: KVStore | None,
        grace: StopDeadline,
        clock: Clock,
        *,
        scope: str = "stop",
        leave: Callable[[str, int], None] = leave_at_once,
    ) -> None:
        self._world = world
        self._kv_store = kv_store.another() if kv_store is not None else None
        self._grace = grace
        self._clock = clock
        self._scope = scope
        self._leave = leave
        self._condition = threading.Condition()
        self._position: Turn = (0, 0)
        self._finished_steps: Callable[[], int] = lambda: 0
        self._durable = -1
        self._request: StopRequest | None = None
        self._agreed_position: Turn | None = None
        self._is_closed = False
        self._signal = 0
        self._signal_at_seconds = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._threads = [threading.Thread(target=self._watch, name="stop-watch", daemon=True)]
        if self._kv_store is not None:
            store_thread = threading.Thread(
                target=self._exchange_messages,
                args=(self._kv_store,),
                name="stop-talk",
                daemon=True,
            )
            self._threads.append(store_thread)

    @property
    def request(self) -> StopRequest | None:
        """The received request, if any."""
        return self._request

    @property
    def wake_fd(self) -> int:
        """File descriptor; each byte written to it is a signal number."""
        return self._wake_write

    @property
    def left_seconds(self) -> float:
        """Remaining time of a stop in seconds; infinite without a request."""
        if self._request is None:
            return float("inf")
        return self._request.left_seconds(self._clock.monotonic_seconds())

    def start(self, step: int, finished: Callable[[], int] | None = None) -> None:
        """Start the threads.

        Args:
            step: Last finished step; this step is durable, or there is nothing to save yet.
            finished: Returns the last finished step, from any thread.
        """
        self._position = (step, 0)
        self._durable = step
        self._finished_steps = finished or (lambda: self._position[0])
        for thread in self._threads:
            thread.start()

    def record_durable(self, step: int) -> None:
        """Record that a checkpoint of ``step`` is durable, so that an exit loses no step."""
        self._durable = max(self._durable, step)

    def enter(self, step: int) -> bool:
        """Ask to begin ``step``. The call waits only while the ranks agree on a stop.

        Returns:
            False if the ranks agreed to stop before it.
        """
        return self._enter((step, 0))

    def enter_batch(self) -> bool:
        """Ask to begin the next batch of an evaluation, as ``enter`` does for a step."""
        step, batch = self._position
        return self._enter((step, batch + 1))

    def enter_gathering(self) -> bool:
        """Ask to begin the collective work after the last batch of a dataset.

        The numbers of batches of the ranks may differ by one. The turns of the next dataset are
        therefore counted from this call.
        """
        step, batch = self._position
        return self._enter((step, (batch // _BATCHES_MAX + 1) * _BATCHES_MAX))

    def _enter(self, turn: Turn) -> bool:
        with self._condition:
            if self._request is not None:
                self._condition.wait_for(
                    lambda: self._agreed_position is not None or self._is_closed
                )
                if self._agreed_position is not None and turn > self._agreed_position:
                    return False
            self._position = turn
            return True

    def request_stop(self, reason: str) -> None:
        """Request a stop of all ranks, as a signal would."""
        now_seconds = self._clock.monotonic_seconds()
        self._accept_request(StopRequest(reason, now_seconds + self._grace.seconds))

    def agree_on_maximum(self, value: int) -> int:
        """Return the greatest ``value`` of all ranks, after the ranks agreed to stop. Collective.

        A rank that misses the deadline is lost, and later collectives fail.
        """
        if self._kv_store is None:
            return value
        self._threads[-1].join()
        keys = [f"{self._scope}/met/{rank}" for rank in range(self._world.size)]
        self._kv_store.post(keys[self._world.rank], str(value).encode())
        answers = self._kv_store.wait(keys, max(0.0, self.left_seconds))
        return max(int(answer) for answer in answers) if answers else value

    def exit_preempted(self, why: str) -> None:
        """Exit at once with the exit code of a preemption; another process does the rest."""
        self._leave(why, Preempted.exit_code)

    def close(self) -> None:
        """Stop the threads; callers waiting in ``enter`` continue."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        os.write(self._wake_write, b"\0")
        for thread in self._threads:
            if thread.is_alive():
                # The store of a frozen host never answers. The thread that waits for it ends with
                # the process.
                thread.join(_JOIN_SECONDS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _watch(self) -> None:
        while not self._is_closed:
            self._read_signals()
            self._check_deadline()

    def _exchange_messages(self, kv_store: KVStore) -> None:
        # If the store is gone, its host died. The collectives report this failure.
        with suppress(PeerFailed):
            while not self._wait_closed(lambda: self._request is not None):
                posted = kv_store.peek(f"{self._scope}/request")
                if posted is not None:
                    now_seconds = self._clock.monotonic_seconds()
                    self._accept_request(StopRequest.from_json(json.loads(posted), now_seconds))
            if self._request is None:
                return
            # The rank is frozen: now only the agreement lets `entered` advance.
            request = self._request.to_json(self._clock.monotonic_seconds())
            kv_store.post(f"{self._scope}/request", json.dumps(request).encode())
            kv_store.post(self._key(self._world.rank), json.dumps(self._position).encode())
            keys = [self._key(rank) for rank in range(self._world.size)]
            answers = None
            while answers is None and not self._is_closed:
                answers = kv_store.wait(keys, _POLL_SECONDS)
            positions = [json.loads(answer) for answer in answers or [b"[0, 0]"]]
            self._agree(max((step, batch) for step, batch in positions))

    def _wait_closed(self, is_reached: Callable[[], bool]) -> bool:
        """Wait one poll interval; return whether the gate closed or ``is_reached`` is true."""
        with self._condition:
            return self._condition.wait_for(lambda: self._is_closed or is_reached(), _POLL_SECONDS)

    def _read_signals(self) -> None:
        readable, _, _ = select.select([self._wake_read], [], [], _POLL_SECONDS)
        if not readable:
            return
        for number in os.read(self._wake_read, 64):
            if number in (*ORDERS, *NOTICES):
                self._take(number)

    def _take(self, number: int) -> None:
        now_seconds = self._clock.monotonic_seconds()
        self._accept_request(self._grace.request(signal.Signals(number).name, now_seconds))
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
        if self._finished_steps() <= self._durable:
            # In the middle of a step: an exit loses no finished step.
            reason = f"{request.reason}: the time is over, and all finished steps are durable"
            self._leave(reason, Preempted.exit_code)
        number = self._signal or signal.SIGTERM
        self._leave(f"the time of {request.reason} is over", 128 + number)

    def _accept_request(self, request: StopRequest) -> None:
        """Freeze this rank. A later request can only shorten the time."""
        with self._condition:
            if self._request is not None:
                self._request = self._request.within(request)
                return
            self._request = request
            if self._kv_store is None:
                self._agreed_position = self._position
            self._condition.notify_all()

    def _agree(self, turn: Turn) -> None:
        with self._condition:
            self._agreed_position = turn
            self._condition.notify_all()

    def _key(self, rank: int) -> str:
        return f"{self._scope}/entered/{rank}"


_Handlers = dict[int, Any]
# Original handlers of the signals that a gate receives.
_replaced: list[_Handlers] = []


@contextmanager
def listening_to_signals(gate: StopCoordinator) -> Iterator[None]:
    """Route signals to ``gate``; do nothing outside of the main thread.

    SIGTERM and SIGINT are always routed. SIGUSR1 and SIGUSR2 are routed unless the script handles
    them.

    The interpreter writes the signal number to the gate's descriptor from the C handler.
    The watch thread therefore receives the signal even while the main thread is inside a
    collective.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [*ORDERS, *(number for number in NOTICES if _would_kill(number))]
    handlers: _Handlers = {number: signal.signal(number, _ignore) for number in numbers}
    wakeup = signal.set_wakeup_fd(gate.wake_fd, warn_on_full_buffer=False)
    _replaced.append(handlers)
    try:
        yield
    finally:
        # A forked child that exits here has already restored the handlers.
        with suppress(ValueError):
            _replaced.remove(handlers)
        signal.set_wakeup_fd(wakeup)
        _restore_handlers(handlers)


def _would_kill(number: int) -> bool:
    """Return whether a signal would kill this process.

    Only the kernel knows the handlers of faulthandler. Without its answer, Python's handlers
    decide.
    """
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return False
    with suppress(OSError, ValueError, StopIteration):
        rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        caught_mask = next(row for row in rows if row.startswith("SigCgt:")).split()[1]
        return not int(caught_mask, 16) >> (number - 1) & 1
    return True


def _restore_handlers(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class _BlockedSignals(threading.local):
    """Signals that this thread had blocked before a fork; None outside of a fork."""

    before: set[int] | None = None


_held = _BlockedSignals()


def _block_signals() -> None:
    """Block signals before a fork until the child has its own handlers, so that none is lost.

    A child starts with the parent's C handler and descriptor. Without the block, an early signal to
    the child would count as a request to the training, and would be lost in the child.
    """
    if _replaced:
        _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, [*ORDERS, *NOTICES])


def _unblock_signals() -> None:
    """Deliver the blocked signals after a fork, in both processes."""
    signal_mask, _held.before = _held.before, None
    if signal_mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)


def _restore_handlers_in_child() -> None:
    """Restore the handlers in a forked child, whose signals are not requests to the training."""
    if _replaced:
        signal.set_wakeup_fd(-1)
        for handlers in reversed(_replaced):
            _restore_handlers(handlers)
        _replaced.clear()
    _unblock_signals()


# A fork hook cannot be removed. It is registered once and does nothing between trainings.
os.register_at_fork(
    before=_block_signals,
    after_in_parent=_unblock_signals,
    after_in_child=_restore_handlers_in_child,
)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing, because the watch thread acts. Without a handler the process would die."""
