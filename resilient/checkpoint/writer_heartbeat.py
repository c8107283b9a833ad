"""Heartbeat of the process that writes to a repository.

A start on another host detects a live writer by this heartbeat.

A host can check only its own processes. So a thread of the coordinator (rank 0) stores a small
object at a low rate. The object's name contains the generation number and the token of the attempt
(one start of all ranks). A start on another host reads the object, waits longer than the time
between two heartbeats, and reads the object again. A change shows that the writer is alive. The
check compares no clocks of different hosts.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.events import HeartbeatFailed
from resilient.checkpoint.generations import check_fence
from resilient.checkpoint.verified_read import fetch
from resilient.distributed.launch_env import HEARTBEAT_SECONDS_MAX
from resilient.errors import (
    Fenced,
    IntegrityError,
    KeyNotFound,
    ResilientError,
    StoreDenied,
    StoreError,
)
from resilient.format.document import RECORD_BYTES_MAX, check_heartbeat, seal, unseal
from resilient.format.keys import HEARTBEATS, heartbeat_key, parse_heartbeat
from resilient.processes import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.checkpoint.generations import Generation
    from resilient.clock import Clock
    from resilient.events import Emitter
    from resilient.storage.store import Store

_FORMAT = "resilient-heartbeat"
_VERSION = 1
_WAIT_PERIODS = 1.5
"""Wait for a heartbeat, in periods; the rest is time for a slow request of the writer."""
_POLL_SECONDS = 2.0
_REPORT_AFTER_SECONDS = 2.0
_END_SECONDS = 10.0
_FENCE_BEATS = 15
"""Heartbeats of a claim from one check of the fence to the next."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Content of one heartbeat.

    Attributes:
        number: Generation of the claim.
        token: Token of the claim.
        count: Number of the heartbeat in its process, from 1.
        stored_at: Time of the writer's own clock, UTC, ISO 8601; shown only, never compared.
        period_seconds: Time between two heartbeats.
        has_ended: Whether the process no longer writes.
        process: Agent, or training process without an agent; None if it is not known.
        job: Scheduler job or rendezvous; empty if there is none.
    """

    number: int
    token: str
    count: int
    stored_at: str
    period_seconds: float
    has_ended: bool = False
    process: ProcessIdentity | None = None
    job: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object's fields."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "number": self.number,
            "token": self.token,
            "count": self.count,
            "stored_at": self.stored_at,
            "period_seconds": self.period_seconds,
            "ended": self.has_ended,
            "job": self.job,
        }
        return fields | ({"process": self.process.to_json()} if self.process else {})

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Heartbeat:
        """Return the heartbeat that ``to_json`` described.

        Raises:
            ValueError: The fields describe no heartbeat.
        """
        check_heartbeat(fields)
        if (fields.get("format"), fields.get("version")) != (_FORMAT, _VERSION):
            raise ValueError("the format or its version is unknown")
        return Heartbeat(
            fields["number"],
            fields["token"],
            fields["count"],
            fields["stored_at"],
            float(fields["period_seconds"]),
            fields["ended"],
            ProcessIdentity.from_json(fields["process"]) if "process" in fields else None,
            fields["job"],
        )


def read_heartbeat(store: Store, number: int, token: str) -> Heartbeat | None:
    """Return the heartbeat of a claim; None if there is none or the writer has ended.

    Crash: reads only.

    Args:
        store: Repository.
        number: Generation of the claim.
        token: Token of the claim. A claim of the same number, after a restore from a backup, has
            another token and so another object.

    Raises:
        IntegrityError: The object is damaged.
        StoreError: The store failed.
    """
    key = heartbeat_key(number, token)
    if not key:
        return None
    try:
        fields = fetch(store, key, lambda data: unseal(data, key), RECORD_BYTES_MAX)
        heartbeat = Heartbeat.from_json(fields)
    except KeyNotFound:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"`{key}` is not a heartbeat ({error})", key=key) from error
    if (heartbeat.number, heartbeat.token) != (number, token):
        raise IntegrityError(f"`{key}` is the heartbeat of another claim", key=key)
    return None if heartbeat.has_ended else heartbeat


@dataclass(frozen=True, slots=True)
class HeartbeatWatch:
    """Wait for a change of one heartbeat.

    Attributes:
        store: Repository.
        clock: Clock of this host; only its own differences count.
        report_wait: Callback with the longest wait in seconds, called once the wait has lasted 2 s.
        keep_alive: Callback before each look, so that peers keep waiting for this process.
        is_over: Callback before each look; returns whether the wait is pointless.
    """

    store: Store
    clock: Clock
    report_wait: Callable[[float], None] = lambda _: None
    keep_alive: Callable[[], None] = lambda: None
    is_over: Callable[[], bool] = lambda: False

    def wait(self, number: int, token: str) -> bool | None:
        """Return whether the heartbeat of a claim changes; None if there is no heartbeat.

        Crash: reads only.

        Args:
            number: Generation of the claim.
            token: Token of the claim.

        Raises:
            StoreError: The store failed, so the result is unknown.
        """
        first = self._read_heartbeat(number, token)
        if first is None:
            return None
        began_seconds, is_reported = self.clock.monotonic_seconds(), False
        longest_seconds = wait_seconds(first)
        while (
            left_seconds := began_seconds + longest_seconds - self.clock.monotonic_seconds()
        ) > 0 and not self.is_over():
            if not is_reported and longest_seconds - left_seconds >= _REPORT_AFTER_SECONDS:
                self.report_wait(longest_seconds)
                is_reported = True
            self.keep_alive()
            self.clock.sleep(min(_POLL_SECONDS, left_seconds))
            current = self._read_heartbeat(number, token)
            if current != first:
                return current is not None
        return False

    def _read_heartbeat(self, number: int, token: str) -> Heartbeat | str | None:
        """Return the heartbeat; the problem of a damaged one, which only its writer replaces."""
        try:
            return read_heartbeat(self.store, number, token)
        except IntegrityError as error:
            return error.message


def wait_seconds(found: Heartbeat | str) -> float:
    """Return the time within which a live writer stores its next heartbeat."""
    period_seconds = found.period_seconds if isinstance(found, Heartbeat) else HEARTBEAT_SECONDS_MAX
    return _WAIT_PERIODS * min(period_seconds, HEARTBEAT_SECONDS_MAX)


class WriterHeartbeat:
    """Heartbeat of one run, stored by a thread of its own.

    Training never waits for the heartbeat. A store failure is reported once. The thread ends when
    another claim has replaced its own claim.

    Args:
        store: Repository.
        clock: Source of the time shown in a heartbeat.
        emit: Emitter of events.
        period_seconds: Time between two heartbeats.
        process: Process that claims; None if it is not known.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        emit: Emitter,
        period_seconds: float,
        process: ProcessIdentity | None,
    ) -> None:
        self._store, self._clock, self._emit = store, clock, emit
        self._period_seconds, self._process = period_seconds, process
        self._claim: Generation | None = None
        self._find: Callable[[], Generation | None] | None = None
        self._stored: dict[str, Generation] = {}
        self._count = 0
        self._own_count, self._is_failure_reported = 0, False
        self._changed, self._is_over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def adopt(self, find: Callable[[], Generation | None]) -> None:
        """Continue the heartbeat of this run's earlier attempt until this attempt claims.

        Args:
            find: Function that returns the newest record if this run wrote it. The thread calls
                this function, so a restart does not wait for the read.
        """
        self._find = find
        self._start()

    def begin(self, claim: Generation) -> None:
        """Store heartbeats of this claim from now on, the first one at once."""
        self._claim, self._find = claim, None
        self._start()

    def end(self) -> None:
        """Remove the heartbeat, so that the next start does not wait; waits at most 10 s."""
        self._is_over.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def beat(self) -> None:
        """Store one heartbeat; report the first failure.

        Crash: the old heartbeat exists, or the new one.
        """
        try:
            # Read both fields once, because `begin` may set them meanwhile.
            claim, find = self._claim, self._find
            claim = claim or (find() if find else None)
            if claim is None:
                return
            self._put(claim)
        except ResilientError as error:
            self._report_failure(error)
            return
        if claim is self._claim:
            self._own_count += 1
            # Leftovers do no harm: another claim never reads them.
            with suppress(StoreError):
                self._check_fence_and_leftovers(claim)

    def remove(self) -> None:
        """Delete the heartbeat, or mark it as ended if this process may not delete.

        Crash: the heartbeat may remain, so a start on another host waits once.
        """
        try:
            for key, claim in list(self._stored.items()):
                try:
                    self._store.delete(key)
                except StoreDenied:
                    self._put(claim, has_ended=True)
        except ResilientError as error:
            self._report_failure(error)

    def _put(self, claim: Generation, *, has_ended: bool = False) -> None:
        self._count += 1
        content = Heartbeat(
            claim.number,
            claim.token,
            self._count,
            self._clock.now_iso(),
            self._period_seconds,
            has_ended,
            self._process,
            claim.start.job if claim.start else "",
        )
        key = heartbeat_key(claim.number, claim.token)
        if not key:
            return
        # Record the key before the put, because a put without a response may have stored the
        # object.
        self._stored[key] = claim
        self._store.put(key, seal(content.to_json()))

    def _check_fence_and_leftovers(self, claim: Generation) -> None:
        """Stop if another claim replaced this one; remove heartbeats of older claims once."""
        if self._own_count % _FENCE_BEATS != 1:
            return
        try:
            check_fence(self._store, claim.number, claim.token)
        except Fenced:
            self._is_over.set()
            self._changed.set()
            return
        if self._own_count > 1:
            return
        for entry in list(self._store.list(HEARTBEATS)):
            number = parse_heartbeat(entry.key)
            # A claim of the same number may be alive, in a repository restored from a backup.
            if number is not None and number < claim.number:
                self._store.delete(entry.key)

    def _report_failure(self, error: ResilientError) -> None:
        if not self._is_failure_reported:
            self._is_failure_reported = True
            self._emit(HeartbeatFailed(error.message))

    def _start(self) -> None:
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="resilient-heartbeat", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.beat()
            self._changed.wait(self._period_seconds)
            # Clear the event after the wait, because `begin` and `end` set their fields before the
            # event.
            self._changed.clear()
        self.remove()
