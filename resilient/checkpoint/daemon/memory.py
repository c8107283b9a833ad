"""Shared-memory pool of a host, and a rank's lease on it.

A rank's share of its host's keeper: memory that lasts from save to save, by name.

The shared memory that one keeper gives to the ranks of its host, and its bound.
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
# A name that no file of a checkpoint can have.
_SLOT = "slot/"


@dataclass(frozen=True, slots=True)
class MemoryQuota:
    """What a rank may take of the keeper's memory.

    Attributes:
        host_bytes_max: bound for all ranks of the host; 0 for none.
        ranks: that share it.
        is_auto: whether the bound is the machine's and not the user's.
    """

    host_bytes_max: int = 0
    ranks: int = 1
    is_auto: bool = False

    @property
    def size_bytes(self) -> int:
        """What is this rank's."""
        return self.host_bytes_max // self.ranks

    def has_room(self, needed_bytes: int) -> bool:
        """Say whether so much can be staged at once.

        What the machine by itself gives a keeper is no wish of the user's: as long as the
        trainer has memory of its own for it, it is staged there.
        """
        if not self.size_bytes or needed_bytes <= self.size_bytes:
            return True
        left_bytes = available_memory_bytes() if self.is_auto else None
        return left_bytes is not None and left_bytes > needed_bytes + SPARE_BYTES

    def spare_bytes(self, used_bytes: int) -> int | None:
        """Return how much this rank's save may take for a while beside what is staged.

        Args:
            used_bytes: what this rank has staged.

        Returns:
            None if nothing bounds it.
        """
        if not self.size_bytes:
            return None
        left_bytes = available_memory_bytes() if self.is_auto else None
        free_bytes = 0 if left_bytes is None else (left_bytes - SPARE_BYTES) // self.ranks
        return max(self.size_bytes - used_bytes, free_bytes, 0)

    def refuse(self, needed_bytes: int) -> ResilientError:
        """Return the error that says that the host's bound is smaller than what is needed of it."""
        if self.is_auto:
            return StoreFull(
                f"{needed_bytes} bytes are needed and this host's keeper has {self.host_bytes_max}",
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
    """Shared memory that the keeper has reserved for this rank, mapped here.

    Args:
        ask: asks the keeper.

    Attributes:
        make_room: has something else of this rank go if that is enough, in bytes; says whether it
            went.
    """

    def __init__(self, ask: Callable[..., dict[str, Any]]) -> None:
        self._ask = ask
        self.make_room: Callable[[int], bool] | None = None
        self._held: dict[str, memoryview] = {}
        self._paths: dict[str, str] = {}
        self.share = MemoryQuota()

    def get(self, name: str, size_bytes: int) -> memoryview:
        """Return memory for a file, the same as last time where it is long enough.

        Raises:
            ConfigError: the bound is too small.
            ResilientError: there is none.
        """
        held = self._held.get(name)
        if held is None or len(held) < size_bytes:
            # Whatever becomes of it, the keeper no longer has what there was.
            self._held.pop(name, None)
            held = self._held[name] = self._reserve(name, size_bytes, is_new=held is None)
        return held[:size_bytes]

    def path_of(self, name: str) -> Path:
        """Return where memory lies that was got by this name; other processes may read it there."""
        return Path(self._paths[name])

    @property
    def size_bytes(self) -> int:
        """How much this rank has of it."""
        return sum(map(len, self._held.values()))

    def release_all(self) -> None:
        """Give all of it back.

        Raises:
            ResilientError: the keeper is gone.
        """
        self._release([*self._held])

    def with_memory(self, file: StagedFile) -> StagedFile:
        """Return a file in shared memory: it lies there, or is copied now."""
        held = self._held.get(file.name)
        data = memoryview(file.data)
        if held is not None and held.obj is data.obj:
            return file
        target = self.get(file.name, len(data))
        target[:] = data
        return StagedFile(file.name, target, file.tensors)

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths fit together; let go of all others.

        Args:
            sizes: bytes by name.
        """
        lengths = {name: len(self._held.get(name, b"")) for name in sizes}
        fits = self.share.has_room(sum(max(_rounded(sizes[one]), lengths[one]) for one in sizes))
        self._release([name for name in self._held if not fits or name not in sizes])
        return fits

    def slots(self, files: Sequence[FileContent]) -> dict[str, memoryview]:
        """Return the memory through which these files are streamed, by name of the slot.

        Raises:
            ConfigError: there is no room for one of them.
        """
        if not files:
            return {}
        slot_bytes = _rounded(max(file.size_bytes for file in files))
        others_bytes = sum(len(one) for name, one in self._held.items() if _SLOT not in name)
        count = (self.share.size_bytes - others_bytes) // slot_bytes
        if count < 1:
            raise self.share.refuse((slot_bytes + others_bytes) * self.share.ranks)
        names = [f"{_SLOT}{number}" for number in range(min(count, len(files), SLOTS_MAX))]
        return {name: self.get(name, slot_bytes) for name in names}

    @property
    def spare_bytes(self) -> int | None:
        """How much a save may take beside what is staged; None if nothing bounds it."""
        return self.share.spare_bytes(self.size_bytes)

    def forget(self) -> None:
        """Never write there again: the keeper may only be asleep, and read."""
        self._held = {}

    def _release(self, names: Sequence[str]) -> None:
        if names:
            self._ask("release", names=list(names))
            for name in names:
                self._held.pop(name, None)

    def _reserve(self, name: str, size_bytes: int, *, is_new: bool) -> memoryview:
        # What grows by a few bytes from save to save shall not ask each time.
        is_roomy = not is_new
        while True:
            wanted_bytes = size_bytes + size_bytes // 2 if is_roomy else size_bytes
            try:
                answer = self._ask("reserve", name=name, size_bytes=_rounded(wanted_bytes))
            except (ConfigError, StoreFull):
                if not is_roomy and not self._makes_room(size_bytes):
                    raise
                is_roomy = False
            else:
                self._paths[name] = answer["path"]
                return map_file(Path(answer["path"]), answer["size_bytes"], writable=True)

    def _makes_room(self, size_bytes: int) -> bool:
        if self.make_room is None:
            return False
        missing = self._ask("missing", size_bytes=_rounded(size_bytes))
        return self.make_room(int(missing["size_bytes"]))


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


UNBOUNDED = MemoryQuota()


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """One shared file: where it is, how much it holds, and the keeper's own view of it."""

    path: Path
    size_bytes: int
    memory: memoryview


class SharedMemoryPool:
    """Gives shared memory away, at most ``host_bytes_max`` at once, and takes it back.

    Args:
        folder: where it lies.
        share: the bound for all ranks of this host, and how they share it.

    Attributes:
        share: of each rank.
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
            ConfigError: it would exceed a bound that the user set.
            StoreFull: it would exceed the machine's, or the machine has not that much left.
        """
        with self._lock:
            needed_bytes = self._used_bytes + size_bytes
            if 0 < self.share.host_bytes_max < needed_bytes:
                raise self.share.refuse(needed_bytes)
            path = self._folder.allocate(size_bytes)
            self._used_bytes = needed_bytes
        return SharedBuffer(path, size_bytes, map_file(path, size_bytes, writable=False))

    def missing_bytes(self, size_bytes: int) -> int:
        """Return how much must be given back before so much can be taken; at most all of it."""
        with self._lock:
            over_bytes = self._used_bytes + size_bytes - self.share.host_bytes_max
        # Without a bound, or within it, it is the machine that has no more.
        return over_bytes if 0 < self.share.host_bytes_max and over_bytes > 0 else size_bytes

    def give_back(self, segment: SharedBuffer) -> None:
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
