"""Store wrapper that retries requests if the wrapped store does not answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, TypeVar

from resilient.errors import KeyExists, KeyNotFound, StoreUnavailable
from resilient.events import Event, Level
from resilient.redaction import shell_quote
from resilient.storage.posix import fsync_leftovers
from resilient.storage.store import Sweepable, free_bytes
from resilient.storage.transfer import as_byte_view, max_ranges, read_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resilient.clock import Clock
    from resilient.storage.store import Data, ObjectInfo, Store
    from resilient.storage.transfer import Arrived, ScatterBuffer

Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 5.0
# A shorter delay is harmless, so no event is emitted.
_REPORT_AFTER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StoreUnresponsive(Event):
    """A store does not answer, and requests are retried."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{url} has not answered for {waited_seconds:.0f} s ({error}); retrying for up to "
        "{within_seconds:g} s. Committed data is not touched"
    )
    url: str
    error: str
    waited_seconds: float
    within_seconds: float


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """A store that did not answer has recovered."""

    template: ClassVar[str] = "{url} answers again, after {waited_seconds:.0f} s"
    url: str
    waited_seconds: float


class RetryingStore:
    """Retry of ``StoreUnavailable``, with growing pauses, until a deadline.

    Every other error is final and passes through at once. The retry loop takes the clock as a
    parameter, unlike those of libraries, so tests control time and never sleep.

    Args:
        store: Inner store.
        clock: Clock for the deadline and the pauses.
        within_seconds: No retry begins after this time; 0 means one try. The inner store must end
            a call that hangs.
        jitter: Random spread of the pauses, so that a thousand ranks do not retry together.
        emit: Receiver of one event when the store stops answering, and one when it recovers.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        within_seconds: float = 60.0,
        jitter: Random | None = None,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._within_seconds = within_seconds
        self._jitter = jitter or Random()  # noqa: S311 - spreads load, keeps no secret
        self._emit = emit
        self._silent_since_seconds: float | None = None
        self._event_lock = threading.Lock()
        self.url = store.url
        self.exclusive = store.exclusive
        self.ranges = max_ranges(store)

    def with_events(self, emit: Callable[[Event], None]) -> RetryingStore:
        """Return a copy for the same store that emits its events to ``emit``."""
        return RetryingStore(self._store, self._clock, self._within_seconds, self._jitter, emit)

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key``; a retry is harmless, because an object is put whole."""
        self._retry(lambda: self._store.put(key, data))

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        A try without an answer may have succeeded, and the retry then finds the key taken by this
        process. Equal content therefore counts as this call's own. This rule requires that no two
        writers write the same content under one key. The records written in this way name their
        writer and so meet the requirement. Without an unanswered try, ``KeyExists`` is raised.

        Crash: the object exists or not; a later attempt does not mistake it for its own.
        """
        unanswered = False

        def attempt() -> None:
            nonlocal unanswered
            try:
                self._store.put_new(key, data)
            except StoreUnavailable:
                unanswered = True
                raise
            except KeyExists:
                if not (unanswered and self._has_content(key, data)):
                    raise

        self._retry(attempt)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._retry(lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end."""
        return self._retry(lambda: self._store.get_range(key, start, length))

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from offset ``start``; each retry starts again at the first byte."""
        return self._retry(lambda: read_into(self._store, key, start, buffer, on_arrival))

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        # Read to the end here: a page that fails later would fail outside the retries.
        return self._retry(lambda: tuple(self._store.list(prefix)))

    def delete(self, key: str) -> None:
        """Remove the object; a missing object is not an error."""
        self._retry(lambda: self._store.delete(key))

    def stat(self, key: str) -> ObjectInfo:
        """Return the object's entry."""
        return self._retry(lambda: self._store.stat(key))

    def sweep(
        self, is_deletable: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Delete the leftovers of unfinished writes, if the inner store is Sweepable."""
        store = self._store
        if not isinstance(store, Sweepable):
            return ()
        return self._retry(lambda: store.sweep(is_deletable, older_than_seconds, clock))

    def settle(self) -> None:
        """Make visible files durable, if the inner store needs it."""
        fsync_leftovers(self._store)

    def free_bytes(self) -> int | None:
        """Return the free space of the inner store."""
        return free_bytes(self._store)

    def _has_content(self, key: str, data: Data) -> bool:
        try:
            return self._store.get(key) == as_byte_view(data, key)
        except KeyNotFound:
            return False

    def _retry(self, attempt: Callable[[], Result]) -> Result:
        started_seconds = self._clock.monotonic_seconds()
        tries = 0
        while True:
            try:
                result = attempt()
            except StoreUnavailable as error:
                tries += 1
                pause_seconds = self._pause_seconds(tries)
                spent_seconds = self._clock.monotonic_seconds() - started_seconds
                self._report_outage(error, started_seconds, spent_seconds)
                if spent_seconds + pause_seconds > self._within_seconds:
                    raise StoreUnavailable(
                        f"{error.message}; gave up after {tries} tries in {spent_seconds:.1f} s",
                        key=error.key,
                        hint=error.hint or f"resilient ckpt ls {shell_quote(self.url)}",
                    ) from error
            else:
                self._report_recovery()
                return result
            self._clock.sleep(pause_seconds)

    def _report_outage(
        self, error: StoreUnavailable, started_seconds: float, spent_seconds: float
    ) -> None:
        if self._emit is None or spent_seconds < _REPORT_AFTER_SECONDS:
            return
        with self._event_lock:
            if self._silent_since_seconds is not None:
                return
            self._silent_since_seconds = started_seconds
        self._emit(StoreUnresponsive(self.url, error.message, spent_seconds, self._within_seconds))

    def _report_recovery(self) -> None:
        if self._emit is None or self._silent_since_seconds is None:
            return
        with self._event_lock:
            since_seconds, self._silent_since_seconds = self._silent_since_seconds, None
        if since_seconds is not None:
            silent_seconds = self._clock.monotonic_seconds() - since_seconds
            self._emit(StoreRecovered(self.url, silent_seconds))

    def _pause_seconds(self, tries: int) -> float:
        # The exponent is capped before it can overflow a float.
        growing = _FIRST_PAUSE_SECONDS * 2.0 ** min(tries - 1, 16)
        return min(growing, _PAUSE_SECONDS_MAX) * self._jitter.uniform(0.5, 1.0)


def with_retry_events(store: Store, emit: Callable[[Event], None]) -> Store:
    """Return a store that emits its retry events to ``emit``, if it is a RetryingStore."""
    return store.with_events(emit) if isinstance(store, RetryingStore) else store
