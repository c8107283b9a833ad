"""The shared memory that one keeper gives to the ranks of its host, and its bound."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.storage.shared import map_file
from resilient.vault.keeper.leased import Share

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from resilient.storage.shared import SharedFolder

UNBOUNDED = Share()


@dataclass(frozen=True, slots=True)
class Segment:
    """One shared file: where it is, how much it holds, and the keeper's own view of it."""

    path: Path
    size_bytes: int
    memory: memoryview


class Room:
    """Gives shared memory away, at most ``host_bytes_max`` at once, and takes it back.

    Args:
        folder: where it lies.
        share: the bound for all ranks of this host, and how they share it.

    Attributes:
        share: of each rank.
    """

    def __init__(self, folder: SharedFolder, share: Share = UNBOUNDED) -> None:
        self._folder = folder
        self.share = share
        self._used_bytes = 0
        self._saving = Counter[str]()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Segment:
        """Return a new segment.

        Raises:
            ConfigError: it would exceed a bound that the user set.
            StoreFull: it would exceed the machine's, or the machine has not that much left.
        """
        with self._lock:
            needed_bytes = self._used_bytes + size_bytes
            if 0 < self.share.host_bytes_max < needed_bytes:
                raise self.share.refuse(needed_bytes)
            path = self._folder.allocate(size_bytes)
            self._used_bytes = needed_bytes
        return Segment(path, size_bytes, map_file(path, size_bytes, writable=False))

    def missing_bytes(self, size_bytes: int) -> int:
        """Return how much must be given back before so much can be taken; at most all of it."""
        with self._lock:
            over_bytes = self._used_bytes + size_bytes - self.share.host_bytes_max
        # Without a bound, or within it, it is the machine that has no more.
        return over_bytes if 0 < self.share.host_bytes_max and over_bytes > 0 else size_bytes

    def give_back(self, segment: Segment) -> None:
        """Let a segment go; whoever has it mapped may go on to read."""
        with self._lock:
            self._folder.free(segment.path)
            self._used_bytes -= segment.size_bytes

    @contextmanager
    def saving(self, url: str) -> Iterator[None]:
        """Inside, every keeper of this host sees that a save to ``url`` is in flight."""
        with self._lock:
            self._saving[url] += 1
            self._folder.mark(_mark(url))
        try:
            yield
        finally:
            with self._lock:
                self._saving[url] -= 1
                if not self._saving[url]:
                    self._folder.unmark(_mark(url))

    def is_saved_elsewhere(self, url: str) -> bool:
        """Say whether another keeper of this host, of an agent that died, still saves there."""
        return self._folder.is_marked_elsewhere(_mark(url))


def _mark(url: str) -> str:
    return f"saving-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
