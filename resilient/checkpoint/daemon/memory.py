"""Shared memory of a host's saver daemon: pool in the daemon, and buffers leased to a rank.

The saver daemon is a process per host that writes checkpoints in the background. A rank leases one
buffer per file name. The rank uses the same buffer from save to save if the buffer is long enough.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.connection import SLOTS_MAX
from resilient.errors import ConfigError, StoreFull
from resilient.format.safetensors_file import StagedFile
from resilient.storage.shared_memory import SPARE_BYTES, available_memory_bytes, map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.errors import ResilientError
    from resilient.format.safetensors_file import FileContent
    from resilient.storage.shared_memory import SharedFolder

_PAGE_BYTES = 4096
# No file of a checkpoint can have this name.
_SLOT_PREFIX = "slot/"


@dataclass(frozen=True, slots=True)
class MemoryQuota:
    """Limit on a rank's share of the daemon's memory.

    Attributes:
        host_bytes_max: Limit for all ranks of the host; 0 for none.
        ranks: Number of ranks that share it.
        is_auto: Whether the limit comes from the machine and not from the user.
    """

    host_bytes_max: int = 0
    ranks: int = 1
    is_auto: bool = False

    @property
    def size_bytes(self) -> int:
        """Share of this rank, in bytes."""
        return self.host_bytes_max // self.ranks

    def has_room(self, needed_bytes: int) -> bool:
        """Return whether ``needed_bytes`` can be staged at once.

        An automatic limit is not a user's choice, so this method does not reject a larger save. The
        trainer then stages the bytes in its own memory.
        """
        if not self.size_bytes or needed_bytes <= self.size_bytes:
            return True
        left_bytes = available_memory_bytes() if self.is_auto else None
        return left_bytes is not None and left_bytes > needed_bytes + SPARE_BYTES

    def spare_bytes(self, used_bytes: int) -> int | None:
        """Return the bytes that this rank's save may use temporarily, in addition to staged bytes.

        Args:
            used_bytes: Bytes that this rank has staged.

        Returns:
            None for no limit.
        """
        if not self.size_bytes:
            return None
        left_bytes = available_memory_bytes() if self.is_auto else None
        free_bytes = 0 if left_bytes is None else (left_bytes - SPARE_BYTES) // self.ranks
        return max(self.size_bytes - used_bytes, free_bytes, 0)

    def refuse(self, needed_bytes: int) -> ResilientError:
        """Return the error for a host limit below the needed bytes."""
        if self.is_auto:
            return StoreFull(
                f"{needed_bytes} bytes are needed and the saver daemon of this host has "
                f"{self.host_bytes_max}",
                hint=f"resilient train --host-bytes-max {needed_bytes} or more",
            )
        return ConfigError(
            f"staging needs at least {needed_bytes} bytes of this host's memory and "
            f"host_bytes_max allows {self.host_bytes_max}; nothing was saved, older "
            "checkpoints are intact",
            hint=f"resilient train --host-bytes-max {needed_bytes} or more",
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {
            "host_bytes_max": self.host_bytes_max,
            "ranks": self.ranks,
            "is_auto": self.is_auto,
        }


class LeasedBuffers:
    """Shared memory that the daemon has reserved for this rank, mapped in this process.

    Args:
        ask: Function that sends a request to the daemon.

    Attributes:
        release_other_memory: Callback with a number of bytes. The callback releases other memory
            of this rank if that frees enough, and returns whether it did.
    """

    def __init__(self, ask: Callable[..., dict[str, Any]]) -> None:
        self._ask = ask
        self.release_other_memory: Callable[[int], bool] | None = None
        self._buffers: dict[str, memoryview] = {}
        self._paths: dict[str, str] = {}
        self.share = MemoryQuota()

    def get(self, name: str, size_bytes: int) -> memoryview:
        """Return memory for a file: the memory of the last call if that is long enough.

        Raises:
            ConfigError: The limit is too small.
            ResilientError: No memory is free.
        """
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size_bytes:
            # The daemon releases the old memory before it reserves the new memory.
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = self._reserve(name, size_bytes, is_new=buffer is None)
        return buffer[:size_bytes]

    def path_of(self, name: str) -> Path:
        """Return the path of the memory with this name, for reads by other processes."""
        return Path(self._paths[name])

    @property
    def size_bytes(self) -> int:
        """Bytes that this rank has leased."""
        return sum(map(len, self._buffers.values()))

    def release_all(self) -> None:
        """Return all memory to the pool.

        Raises:
            ResilientError: The daemon is gone.
        """
        self._release([*self._buffers])

    def with_memory(self, file: StagedFile) -> StagedFile:
        """Return a file in shared memory; copy the file now if it is not there yet."""
        buffer = self._buffers.get(file.name)
        data = memoryview(file.data)
        if buffer is not None and buffer.obj is data.obj:
            return file
        target = self.get(file.name, len(data))
        target[:] = data
        return StagedFile(file.name, target, file.tensors)

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Return whether files of these lengths fit together; release all other memory.

        Args:
            sizes: Bytes by name.
        """
        lengths = {name: len(self._buffers.get(name, b"")) for name in sizes}
        fits = self.share.has_room(sum(max(_rounded(sizes[size]), lengths[size]) for size in sizes))
        self._release([name for name in self._buffers if not fits or name not in sizes])
        return fits

    def slots(self, files: Sequence[FileContent]) -> dict[str, memoryview]:
        """Return the memory through which these files are streamed, by slot name.

        Raises:
            ConfigError: There is no memory for a single slot.
        """
        if not files:
            return {}
        slot_bytes = _rounded(max(file.size_bytes for file in files))
        others_bytes = sum(
            len(value) for name, value in self._buffers.items() if _SLOT_PREFIX not in name
        )
        count = (self.share.size_bytes - others_bytes) // slot_bytes
        if count < 1:
            raise self.share.refuse((slot_bytes + others_bytes) * self.share.ranks)
        names = [f"{_SLOT_PREFIX}{number}" for number in range(min(count, len(files), SLOTS_MAX))]
        return {name: self.get(name, slot_bytes) for name in names}

    @property
    def spare_bytes(self) -> int | None:
        """Bytes that a save may use in addition to staged ones; None for no limit."""
        return self.share.spare_bytes(self.size_bytes)

    def forget(self) -> None:
        """Never write to the memory again, because a suspended daemon may still read it."""
        self._buffers = {}

    def _release(self, names: Sequence[str]) -> None:
        if names:
            self._ask("release", names=list(names))
            for name in names:
                self._buffers.pop(name, None)

    def _reserve(self, name: str, size_bytes: int, *, is_new: bool) -> memoryview:
        # A file that grows by a few bytes from save to save must not need a request each time.
        has_reserve = not is_new
        while True:
            wanted_bytes = size_bytes + size_bytes // 2 if has_reserve else size_bytes
            try:
                answer = self._ask("reserve", name=name, size_bytes=_rounded(wanted_bytes))
            except (ConfigError, StoreFull):
                if not has_reserve and not self._frees_memory(size_bytes):
                    raise
                has_reserve = False
            else:
                self._paths[name] = answer["path"]
                return map_file(Path(answer["path"]), answer["size_bytes"], writable=True)

    def _frees_memory(self, size_bytes: int) -> bool:
        if self.release_other_memory is None:
            return False
        reply = self._ask("missing", size_bytes=_rounded(size_bytes))
        return self.release_other_memory(int(reply["size_bytes"]))


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


UNBOUNDED = MemoryQuota()


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """Shared file: path, size, and the daemon's own view of it."""

    path: Path
    size_bytes: int
    memory: memoryview


class SharedMemoryPool:
    """Pool that lends shared memory, at most ``host_bytes_max`` at once.

    Args:
        folder: Folder of the shared files.
        share: Limit for all ranks of this host, and number of these ranks.

    Attributes:
        share: As given.
    """

    def __init__(self, folder: SharedFolder, share: MemoryQuota = UNBOUNDED) -> None:
        self._folder = folder
        self.share = share
        self._used_bytes = 0
        self._saving = Counter[str]()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> SharedBuffer:
        """Return a new segment.

        Raises:
            ConfigError: The segment would exceed a limit that the user set.
            StoreFull: The segment would exceed an automatic limit, or the machine has not enough
                memory.
        """
        with self._lock:
            needed_bytes = self._used_bytes + size_bytes
            if 0 < self.share.host_bytes_max < needed_bytes:
                raise self.share.refuse(needed_bytes)
            path = self._folder.allocate(size_bytes)
            self._used_bytes = needed_bytes
        return SharedBuffer(path, size_bytes, map_file(path, size_bytes, writable=False))

    def missing_bytes(self, size_bytes: int) -> int:
        """Return how many bytes to free before ``size_bytes`` fit; at most ``size_bytes``."""
        with self._lock:
            excess_bytes = self._used_bytes + size_bytes - self.share.host_bytes_max
        # Without a limit, or within it, the machine itself has no more memory.
        return excess_bytes if 0 < self.share.host_bytes_max and excess_bytes > 0 else size_bytes

    def release(self, segment: SharedBuffer) -> None:
        """Release a segment; processes that have mapped the segment may still read it."""
        with self._lock:
            self._folder.free(segment.path)
            self._used_bytes -= segment.size_bytes

    @contextmanager
    def saving(self, url: str) -> Iterator[None]:
        """Mark for every daemon of this host that a save to ``url`` is in flight in the block."""
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
        """Return whether a daemon of this host, whose agent died, still saves to this URL."""
        return self._folder.is_marked_elsewhere(_mark(url))


def _mark(url: str) -> str:
    return f"saving-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
