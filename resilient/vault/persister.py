"""Who runs write, commit and rotate while training goes on: a thread here, or the keeper."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from resilient.storage.memory import PrivateBuffers
from resilient.vault.glimpse import Glimpses
from resilient.vault.persist import persist

if TYPE_CHECKING:
    from resilient.format.manifest import Receipt
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.persist import Job


class Persister(Protocol):
    """Takes at most one job at a time and brings it to an end."""

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

    def submit(self, desk: Desk, job: Job) -> None:
        """Take the job over, whose bytes are all there. Collective."""

    def wait(self) -> None:
        """Return when the job is durable.

        Raises:
            SaveFailed: it could not be made so; older checkpoints are intact.
            Fenced: a newer life began, so nothing was committed.
        """

    def close(self) -> None:
        """Let go of threads and connections; nothing is in flight."""


class ThreadPersister:
    """A thread of this process: a job in flight dies with it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-persist")
        self._in_flight: Future[Receipt] | None = None
        self._glimpses = Glimpses()
        self._memory = PrivateBuffers()

    def open(self, desk: Desk) -> Store:
        """Return the desk's own store: an earlier life left nothing here."""
        return desk.store

    def begin(self, topic: str) -> None:
        """Do nothing: nobody else needs to know."""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return private memory."""
        return self._memory.get(name, size_bytes)

    def submit(self, desk: Desk, job: Job) -> None:
        """Start to persist the job."""
        self._in_flight = self._thread.submit(persist, desk, job, self._glimpses)

    def wait(self) -> None:
        """Wait for the thread, and raise what it raised."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
