"""Executor that saves a checkpoint in the background: protocol, thread executor, memory budget.

A save executor runs write, commit and garbage collection (deletion of old checkpoints) while
training continues. The executor is a thread of this process, or the saver daemon (a process per
host).
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
    """Limit on the bytes of a save in memory at once: staged, or in streamed files.

    Args:
        bytes_max: Limit in bytes; None for no limit.

    Raises:
        ConfigError: The limit is not a number of bytes.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        if bytes_max is not None and (type(bytes_max) is not int or bytes_max < 1):
            raise ConfigError(
                f"`host_bytes_max`={bytes_max!r} is not a number of bytes",
                hint="give a whole number, such as host_bytes_max=2**30, or None",
            )
        self._bytes_max = bytes_max
        self._lent_bytes = 0
        self._condition = threading.Condition()

    def is_exceeded_by(self, sizes: Mapping[str, int]) -> bool:
        """Return whether files of these lengths do not fit together.

        Raises:
            ConfigError: A single file exceeds the limit.
        """
        if self._bytes_max is None or sum(sizes.values()) <= self._bytes_max:
            return False
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] > self._bytes_max:
            raise ConfigError(
                f"`{largest}` takes {sizes[largest]} bytes and `host_bytes_max` allows "
                f"{self._bytes_max}; nothing was saved, older checkpoints are intact",
                hint=f"set host_bytes_max={sizes[largest]} or more",
            )
        return True

    def of(self, file: FileContent) -> BudgetedFile:
        """Return a file that yields its bytes when they fit into the budget."""
        return BudgetedFile(file, self)

    @contextmanager
    def reserved(self, size_bytes: int) -> Iterator[None]:
        """Wait until ``size_bytes`` are free, and reserve them inside the block.

        Crash: memory is gone with the process.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._has_free(size_bytes))
            self._lent_bytes += size_bytes
        try:
            yield
        finally:
            with self._condition:
                self._lent_bytes -= size_bytes
                self._condition.notify_all()

    def _has_free(self, size_bytes: int) -> bool:
        return self._bytes_max is None or self._lent_bytes + size_bytes <= self._bytes_max


@dataclass(frozen=True, slots=True)
class BudgetedFile:
    """File that is streamed as the memory budget allows."""

    file: FileContent
    budget: MemoryBudget

    @property
    def name(self) -> str:
        """File name inside the checkpoint's folder."""
        return self.file.name

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return self.file.size_bytes

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Tensors in the file."""
        return self.file.tensors

    @contextmanager
    def lend(self) -> Iterator[bytes | memoryview]:
        """Yield the content once it fits into the budget."""
        with self.budget.reserved(self.size_bytes), self.file.lend() as data:
            yield data


class SaveExecutor(Protocol):
    """Executor that takes at most one save job at a time and completes it."""

    took_seconds: float
    """Seconds from the beginning of the last job until it was durable, once ``wait`` returned."""
    rested_seconds: float
    """Pauses in the last job, of the rank that paused longest, while nothing waited for the job."""

    def open(self, context: CheckpointContext) -> Store:
        """Finish what an earlier attempt left; return the store to resume from. Collective."""

    def begin(self, topic: str) -> None:
        """Announce the job with this topic, before its bytes are copied.

        Until ``submit``, only one thread at a time may use this executor, and no thread may
        ``wait``.
        """

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return memory of at least ``size_bytes`` for a file of later jobs, reused if possible.

        No earlier job still reads from this memory.
        """

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Return whether files of these lengths must be streamed for lack of memory.

        Call this before requesting the buffers of a save. It may release the memory of files that
        are not named.

        Raises:
            ConfigError: Memory does not suffice to stream the files.
        """

    def submit(self, context: CheckpointContext, job: SaveJob) -> None:
        """Take over a job whose bytes are complete. Collective.

        If any rank has streamed files, this method returns when the job has ended. ``wait`` then
        reports the result.
        """

    def wait(self) -> None:
        """Wait until the job is durable.

        Raises:
            SaveFailed: The save could not be made durable; older checkpoints are intact.
            Fenced: A newer generation exists, so nothing was committed.
        """

    def close(self) -> None:
        """Release threads and connections; no save may be in flight."""


class ThreadSaveExecutor:
    """Save executor in a thread of this process; a job in flight is lost if the process dies.

    Args:
        budget: Memory budget of a save; unlimited by default.
    """

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self._budget = budget or MemoryBudget()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-persist")
        self._in_flight: Future[Receipt] | None = None
        # A daemon that ended may not have stored the mark. A second mark costs only one file.
        self._history = SaveHistory(owes_mark=True)
        self._throttles = ThrottleHistory()
        self._throttle: SaveThrottle | None = None
        self._memory = PrivateBuffers()
        self.took_seconds = self.rested_seconds = 0.0

    def open(self, context: CheckpointContext) -> Store:
        """Return the context's own store: an earlier attempt left nothing in this process."""
        return context.store

    def begin(self, topic: str) -> None:
        """Do nothing: no other process needs the announcement."""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return private memory."""
        return self._memory.get(name, size_bytes)

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Return whether files of these lengths exceed the memory budget.

        Raises:
            ConfigError: A single file exceeds the budget.
        """
        is_exceeded = self._budget.is_exceeded_by(sizes)
        if is_exceeded:
            self._memory = PrivateBuffers()
        return is_exceeded

    def submit(self, context: CheckpointContext, job: SaveJob) -> None:
        """Start to persist the job, throttled so that training keeps its cores.

        With streamed files training waits, so the job ends before this method returns.
        """
        seconds_max = context.limits.pause_seconds_max
        job = replace(job, streamed=tuple(map(self._budget.of, job.streamed)))
        throttle = self._throttle = self._throttles.begin(
            job.size_bytes, job.began_seconds, seconds_max
        )
        self._in_flight = self._thread.submit(self._persist, context, job, throttle)
        if job.streamed:
            throttle.hurry()
            self._in_flight.exception()

    def wait(self) -> None:
        """Wait for the thread, which makes no more pauses, and raise its error."""
        if self._throttle is not None:
            self._throttle.hurry()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _persist(self, context: CheckpointContext, job: SaveJob, throttle: SaveThrottle) -> Receipt:
        try:
            return persist(context, job, self._history, throttle)
        finally:
            self.took_seconds = context.clock.monotonic_seconds() - job.began_seconds
            self.rested_seconds = self._history.rested_seconds
            self._throttles.end()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
