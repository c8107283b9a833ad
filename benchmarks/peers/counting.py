"""In-memory store and key-value server that count the requests of each rank.

Both also track the longest chain of calls in a save, as Lamport's clock does. Each call takes one
step. A rank that waits for a value continues from the step at which the value was posted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from resilient.format.keys import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from resilient.storage.store import Data, ObjectInfo
    from resilient.testing.memory_store import MemoryStore

LISTED_PER_PAGE = 1000


@dataclass
class Meter:
    """Requests of one rank during one save.

    Attributes:
        store: Store requests by kind; a listing counts once per thousand keys.
        board: Calls of the key-value store by kind.
        sent_bytes: Bytes of posted values and their keys.
        received_bytes: Bytes of received values.
        at: Number of calls in sequence so far, including those of other ranks that were awaited.
    """

    store: Counter[str] = field(default_factory=Counter)
    board: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    at: int = 0
    path: int = 0
    path_to_commit: int = 0
    cpu_seconds: float = 0.0
    cpu_to_commit_seconds: float = 0.0
    _began: int = 0
    _cpu_began_seconds: float = 0.0
    _stood_in_seconds: float = 0.0

    def begin(self) -> None:
        """Reset the counts of the previous save."""
        self.store.clear()
        self.board.clear()
        self.sent_bytes = self.received_bytes = 0
        self._stood_in_seconds = 0.0
        self._began, self._cpu_began_seconds = self.at, time.thread_time()

    def end(self) -> None:
        """Record the position of this rank after the save."""
        self.path, self.cpu_seconds = self.at - self._began, self._own_seconds()

    def commits(self) -> None:
        """Record the position of this rank when the manifest is in the store."""
        self.path_to_commit = self.at - self._began
        self.cpu_to_commit_seconds = self._own_seconds()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Exclude the processor time of code that stands in for another process."""
        began_seconds = time.thread_time()
        try:
            yield
        finally:
            self._stood_in_seconds += time.thread_time() - began_seconds

    def _own_seconds(self) -> float:
        return time.thread_time() - self._cpu_began_seconds - self._stood_in_seconds


class Place:
    """Values by key with the position of their poster, and the ranks that wait for them."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.lock = threading.Lock()
        self.awaited: dict[str, list[Waiter]] = {}


class Waiter:
    """Rank that waits for all of some keys."""

    def __init__(self, absent: set[str]) -> None:
        self.absent = absent
        self.done = threading.Event()


class CountingBoardStore:
    """One rank's client of the server, with the TCPStore methods that a key-value store uses."""

    def __init__(self, place: Place, meter: Meter) -> None:
        self._place = place
        self._meter = meter

    def set(self, key: str, value: bytes) -> None:
        """Post a value."""
        with self._counted("set"), self._place.lock:
            self._meter.sent_bytes += len(key) + len(value)
            self._place.values[key] = (value, self._meter.at)
            for waiter in self._place.awaited.pop(key, ()):
                waiter.absent.discard(key)
                if not waiter.absent:
                    waiter.done.set()

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait for all of ``keys``."""
        with self._counted("wait"):
            with self._place.lock:
                waiter = Waiter({key for key in keys if key not in self._place.values})
                for key in waiter.absent:
                    self._place.awaited.setdefault(key, []).append(waiter)
                if not waiter.absent:
                    waiter.done.set()
            if not waiter.done.wait(timeout.total_seconds()):
                raise dist.DistStoreError("nobody came")
            with self._place.lock:
                last = max(self._place.values[key][1] for key in keys)
            self._meter.at = max(self._meter.at, last)

    def get(self, key: str) -> bytes:
        """Return one value."""
        with self._counted("get"):
            return self._take(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values in one call."""
        with self._counted("multi_get"):
            return [self._take(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys have a value."""
        with self._counted("check"), self._place.lock:
            return all(key in self._place.values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a value."""
        with self._counted("delete"), self._place.lock:
            return self._place.values.pop(key, None) is not None

    def _take(self, key: str) -> bytes:
        with self._place.lock:
            value, _ = self._place.values[key]
        self._meter.received_bytes += len(value)
        return value

    @contextmanager
    def _counted(self, kind: str) -> Iterator[None]:
        with self._meter.standing_in():
            self._meter.board[kind] += 1
            self._meter.at += 1
            yield


class CountingStore:
    """One rank's client of the store."""

    exclusive = True

    def __init__(self, shared: MemoryStore, meter: Meter) -> None:
        self.url = shared.url
        self._shared = shared
        self._meter = meter

    def put(self, key: str, data: Data) -> None:
        """Count and forward the request."""
        with self._counted("put"):
            self._shared.put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Count and forward the request, and record a commit."""
        with self._counted("put_new"):
            self._shared.put_new(key, data)
        if key.endswith(f"/{MANIFEST}"):
            self._meter.commits()

    def get(self, key: str) -> bytes:
        """Count and forward the request."""
        with self._counted("get"):
            return self._shared.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Count and forward the request."""
        with self._counted("get"):
            return self._shared.get_range(key, start, length)

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Count the pages and forward the request."""
        with self._counted("list"):
            found = list(self._shared.list(prefix))
            more = max(len(found) - 1, 0) // LISTED_PER_PAGE
            self._meter.store["list"] += more
            self._meter.at += more
        return found

    def delete(self, key: str) -> None:
        """Count and forward the request."""
        with self._counted("delete"):
            self._shared.delete(key)

    def stat(self, key: str) -> ObjectInfo:
        """Count and forward the request."""
        with self._counted("stat"):
            return self._shared.stat(key)

    @contextmanager
    def _counted(self, kind: str) -> Iterator[None]:
        with self._meter.standing_in():
            self._meter.store[kind] += 1
            self._meter.at += 1
            yield
