"""Who runs write, commit and rotate while training goes on: a thread here, or the keeper."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from resilient.storage.memory import PrivateBuffers
from resilient.vault.pace import Pacing
from resilient.vault.saving.bound import Bound
from resilient.vault.saving.persist import Memory, persist

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.manifest import Receipt
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.pace import SavePace
    from resilient.vault.saving.persist import Job


class Persister(Protocol):
    """Takes at most one job at a time and brings it to an end."""

    took_seconds: float
    """What the last job took from its beginning until it was durable, once ``wait`` returned."""
    rested_seconds: float
    """How much of it were rests, of the rank that rested longest: nobody had waited for it."""

    def open(self, desk: Desk) -> Store:
        """Settle what an earlier life left, and return the store to resume from. Collective."""

    def begin(self, topic: str) -> None:
        """Announce the job that will have this topic, before its bytes are copied.

        From here to ``submit`` one thread at a time may use this, and none may ``wait``.
        """

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return at least so much memory for a file of the jobs to come, mostly the same again.

        Nobody who persists an earlier job still reads there.
        """

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths must be streamed: there is no room for all.

        Asked before the buffers of a save are; memory of files that are not named may go.

        Raises:
            ConfigError: there is not even room to stream them.
        """

    def submit(self, desk: Desk, job: Job) -> None:
        """Take the job over, whose bytes are all there. Collective.

        With files to be streamed on any rank it returns when the job has come to its end, which
        ``wait`` tells.
        """

    def wait(self) -> None:
        """Return when the job is durable.

        Raises:
            SaveFailed: it could not be made so; older checkpoints are intact.
            Fenced: a newer life began, so nothing was committed.
        """

    def close(self) -> None:
        """Let go of threads and connections; nothing is in flight."""


class ThreadPersister:
    """A thread of this process: a job in flight dies with it, and training's cores are its own.

    Args:
        bound: how much memory of this process a save may take; as much as there is by default.
    """

    def __init__(self, bound: Bound | None = None) -> None:
        self._bound = bound or Bound()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-persist")
        self._in_flight: Future[Receipt] | None = None
        # What a keeper that is gone still owed, nobody here knows; to mark again costs one file.
        self._known = Memory(owes_mark=True)
        self._pacing = Pacing()
        self._pace: SavePace | None = None
        self._memory = PrivateBuffers()
        self.took_seconds = self.rested_seconds = 0.0

    def open(self, desk: Desk) -> Store:
        """Return the desk's own store: an earlier life left nothing here."""
        return desk.store

    def begin(self, topic: str) -> None:
        """Do nothing: nobody else needs to know."""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return private memory."""
        return self._memory.get(name, size_bytes)

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths are more than this process may hold.

        Raises:
            ConfigError: one of them alone is.
        """
        is_exceeded = self._bound.is_exceeded_by(sizes)
        if is_exceeded:
            self._memory = PrivateBuffers()
        return is_exceeded

    def submit(self, desk: Desk, job: Job) -> None:
        """Start to persist the job, at a pace that leaves training its cores.

        With files that are streamed training waits, so it comes to its end here.
        """
        seconds_max = desk.limits.rested_seconds_max
        job = replace(job, streamed=tuple(map(self._bound.of, job.streamed)))
        pace = self._pace = self._pacing.begin(job.size_bytes, job.began_seconds, seconds_max)
        self._in_flight = self._thread.submit(self._persist, desk, job, pace)
        if job.streamed:
            pace.hurry()
            self._in_flight.exception()

    def wait(self) -> None:
        """Wait for the thread, which rests no more, and raise what it raised."""
        if self._pace is not None:
            self._pace.hurry()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _persist(self, desk: Desk, job: Job, pace: SavePace) -> Receipt:
        try:
            return persist(desk, job, self._known, pace)
        finally:
            self.took_seconds = desk.clock.monotonic_seconds() - job.began_seconds
            self.rested_seconds = self._known.rested_seconds
            self._pacing.end()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
