"""SaveExecutor protocol, thread executor, memory budget.

How much memory of this process one save may take, where no keeper has its own bound.

Who runs write, commit and rotate while training goes on: a thread here, or the keeper.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from resilient.checkpoint.save.persist import SaveHistory, persist
from resilient.checkpoint.throttle import ThrottleHistory
from resilient.errors import ConfigError
from resilient.storage.shared_memory import PrivateBuffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.checkpoint.throttle import SaveThrottle
    from resilient.format.manifest import Receipt, TensorEntry
    from resilient.format.safetensors_file import FileContent
    from resilient.storage.store import Store


class MemoryBudget:
    """At most so many bytes at once: what is staged, or the files that are streamed.

    Args:
        bytes_max: None for no bound.

    Raises:
        ConfigError: it is no number of bytes.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        if bytes_max is not None and (type(bytes_max) is not int or bytes_max < 1):
            raise ConfigError(
                f"`host_bytes_max`={bytes_max!r} is no number of bytes",
                hint="none but to give a whole number, as host_bytes_max=2**30, or None",
            )
        self._bytes_max = bytes_max
        self._lent_bytes = 0
        self._changed = threading.Condition()

    def is_exceeded_by(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths do not fit together.

        Raises:
            ConfigError: one of them does not fit alone.
        """
        if self._bytes_max is None or sum(sizes.values()) <= self._bytes_max:
            return False
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] > self._bytes_max:
            raise ConfigError(
                f"`{largest}` takes {sizes[largest]} bytes and `host_bytes_max` allows "
                f"{self._bytes_max}; nothing was saved, older checkpoints are intact",
                hint=f"none but to give host_bytes_max={sizes[largest]} or more",
            )
        return True

    def of(self, file: FileContent) -> BudgetedFile:
        """Return a file whose bytes are lent when there is room for them."""
        return BudgetedFile(file, self)

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """Wait until so many bytes are left, and have them inside.

        Crash: memory is gone with the process.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_left(size_bytes))
            self._lent_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._lent_bytes -= size_bytes
                self._changed.notify_all()

    def _has_left(self, size_bytes: int) -> bool:
        return self._bytes_max is None or self._lent_bytes + size_bytes <= self._bytes_max


@dataclass(frozen=True, slots=True)
class BudgetedFile:
    """A file that is streamed as far as a bound allows."""

    file: FileContent
    bound: MemoryBudget

    @property
    def name(self) -> str:
        """File name inside the checkpoint's folder."""
        return self.file.name

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self.file.size_bytes

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """What it holds."""
        return self.file.tensors

    @contextmanager
    def lend(self) -> Iterator[bytes | memoryview]:
        """Yield the content once there is room for it."""
        with self.bound.taking(self.size_bytes), self.file.lend() as data:
            yield data


class SaveExecutor(Protocol):
    """Takes at most one job at a time and brings it to an end."""

    took_seconds: float
    """What the last job took from its beginning until it was durable, once ``wait`` returned."""
    rested_seconds: float
    """How much of it were rests, of the rank that rested longest: nobody had waited for it."""

    def open(self, desk: CheckpointContext) -> Store:
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

    def submit(self, desk: CheckpointContext, job: SaveJob) -> None:
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


class ThreadSaveExecutor:
    """A thread of this process: a job in flight dies with it, and training's cores are its own.

    Args:
        bound: how much memory of this process a save may take; as much as there is by default.
    """

    def __init__(self, bound: MemoryBudget | None = None) -> None:
        self._bound = bound or MemoryBudget()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-persist")
        self._in_flight: Future[Receipt] | None = None
        # What a keeper that is gone still owed, nobody here knows; to mark again costs one file.
        self._known = SaveHistory(owes_mark=True)
        self._pacing = ThrottleHistory()
        self._pace: SaveThrottle | None = None
        self._memory = PrivateBuffers()
        self.took_seconds = self.rested_seconds = 0.0

    def open(self, desk: CheckpointContext) -> Store:
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

    def submit(self, desk: CheckpointContext, job: SaveJob) -> None:
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

    def _persist(self, desk: CheckpointContext, job: SaveJob, pace: SaveThrottle) -> Receipt:
        try:
            return persist(desk, job, self._known, pace)
        finally:
            self.took_seconds = desk.clock.monotonic_seconds() - job.began_seconds
            self.rested_seconds = self._known.rested_seconds
            self._pacing.end()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
