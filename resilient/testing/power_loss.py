"""POSIX file system in memory that loses unsynced data in a power loss."""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from resilient.storage.posix import DirEntry
from resilient.testing.fault_store import Crash, StoreFaultKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from resilient.storage.transfer import Arrived, ScatterBuffer
    from resilient.testing.fault_store import StoreFault


class Keep(Enum):
    """Unsynced data that survives a power loss. POSIX allows each of these values."""

    NOTHING = "no unsynced name and no unsynced byte"
    TORN = "every name; of unsynced content the first half"
    ZEROED = "every name; unsynced content has its length and is zeros"
    ADDED_NAMES = "new and replaced names, torn; removed names come back"
    REMOVED_NAMES = "removals; new and replaced names are lost"
    EVERYTHING = "all, as if it had been synced"


@dataclass(slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(slots=True)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)


class PowerLossFileSystem:
    """File system of a machine whose power a test can cut.

    Content becomes durable by its handle's ``sync``, and a name by ``sync_folder`` of its folder.
    Nothing is durable earlier. A replace is atomic, as on every journaling file system.

    Args:
        fault: Crash to inject, at an operation counted from 0; reads count.

    Attributes:
        operations: Number of started operations.
        trace: Names of the operations, in order.
    """

    def __init__(self, fault: StoreFault | None = None) -> None:
        self.operations = 0
        self.trace: list[str] = []
        self._fault = fault
        self._dead = False
        self._top = _Folder()
        self._lock = threading.RLock()

    def lose_power(self, keep: Keep) -> PowerLossFileSystem:
        """Return the file system as it is after a power loss; this object is unchanged."""
        file_system = PowerLossFileSystem()
        file_system._top = _revived_folder(self._top, keep, {})
        return file_system

    def paths(self) -> list[str]:
        """Return the path of every file, temporary files included."""
        return sorted(_paths(self._top, ""))

    def create(self, path: Path) -> PowerLossHandle:
        """Create an empty file."""
        with self._step("create"):
            folder = self._folder(path.parent)
            if path.name in folder.names:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            file = folder.names[path.name] = _File()
        return PowerLossHandle(self, file)

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Return bytes of a file."""
        with self._step("read"):
            content = bytes(self._file(path).content)
            return content[start:] if length is None else content[start : start + length]

    def read_into(self, path: Path, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Fill ``room`` with bytes of a file."""
        content = self.read(path, start, len(room))
        room.put(0, content)
        arrived(0, len(content))
        return len(content)

    def size_bytes(self, path: Path) -> int:
        """Return the length of a file."""
        with self._step("size_bytes"):
            return len(self._file(path).content)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file atomically."""
        with self._step("replace"):
            self._file(source)
            folder = self._folder(target.parent)
            if isinstance(folder.names.get(target.name), _Folder):
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(target))
            folder.names[target.name] = self._folder(source.parent).names.pop(source.name)

    def link(self, source: Path, target: Path) -> None:
        """Add a name to a file, if the name is free."""
        with self._step("link"):
            folder = self._folder(target.parent)
            if target.name in folder.names:
                raise FileExistsError(errno.EEXIST, "exists", str(target))
            folder.names[target.name] = self._file(source)

    def unlink(self, path: Path) -> None:
        """Remove a name of a file."""
        with self._step("unlink"):
            self._file(path)
            del self._folder(path.parent).names[path.name]

    def make_folder(self, path: Path) -> None:
        """Create a folder."""
        with self._step("make_folder"):
            parent = self._folder(path.parent)
            if path.name in parent.names:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            parent.names[path.name] = _Folder()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        with self._step("remove_folder"):
            if self._folder(path).names:
                raise OSError(errno.ENOTEMPTY, "not empty", str(path))
            del self._folder(path.parent).names[path.name]

    def sync_folder(self, path: Path) -> None:
        """Make the current names of a folder durable."""
        with self._step("sync_folder"):
            folder = self._folder(path)
            folder.synced = dict(folder.names)

    def items(self, path: Path) -> Iterable[DirEntry]:
        """Return the entries of a folder."""
        with self._step("items"):
            try:
                names = self._folder(path).names
            except FileNotFoundError:
                return []
            return [_item(name, node) for name, node in names.items()]

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._lock:
            if self._dead:
                raise Crash("dead since an earlier operation")
            number = self.operations
            self.operations += 1
            self.trace.append(name)
            self._crash_if(number, StoreFaultKind.CRASH_BEFORE)
            try:
                yield
            finally:
                # Also crash after an operation that failed.
                self._crash_if(number, StoreFaultKind.CRASH_AFTER)

    def _crash_if(self, number: int, kind: StoreFaultKind) -> None:
        if self._fault is not None and (self._fault.at, self._fault.kind) == (number, kind):
            self._dead = True
            raise Crash(f"{self._fault!r} in {self.trace[-1]}")

    def _node(self, path: Path) -> _File | _Folder:
        node: _File | _Folder = self._top
        for part in path.parts[1:]:
            if isinstance(node, _File):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
            if part not in node.names:
                raise FileNotFoundError(errno.ENOENT, "missing", str(path))
            node = node.names[part]
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        if isinstance(node, _File):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        if isinstance(node, _Folder):
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        return node


class PowerLossHandle:
    """File of a :class:`PowerLossFileSystem` that is open for writing."""

    def __init__(self, files: PowerLossFileSystem, file: _File) -> None:
        self._files = files
        self._file = file

    def write(self, data: memoryview) -> int:
        """Append only the first half of ``data``, because POSIX allows short writes."""
        with self._files._step("write"):  # noqa: SLF001 - one model in two classes
            part = data[: (data.nbytes + 1) // 2]
            self._file.content += part
            return part.nbytes

    def sync(self) -> None:
        """Make the current content durable."""
        with self._files._step("sync"):  # noqa: SLF001 - one model in two classes
            self._file.synced = bytes(self._file.content)

    def close(self) -> None:
        """Do nothing, because a close does not sync."""


def _item(name: str, node: _File | _Folder) -> DirEntry:
    if isinstance(node, _Folder):
        return DirEntry(name, is_folder=True)
    return DirEntry(name, is_folder=False, size_bytes=len(node.content))


def _paths(folder: _Folder, at: str) -> Iterator[str]:
    for name, node in folder.names.items():
        if isinstance(node, _Folder):
            yield from _paths(node, f"{at}/{name}")
        else:
            yield f"{at}/{name}"


def _surviving_names(folder: _Folder, keep: Keep) -> dict[str, _File | _Folder]:
    match keep:
        case Keep.NOTHING:
            return folder.synced
        case Keep.ADDED_NAMES:
            return folder.synced | folder.names
        case Keep.REMOVED_NAMES:
            return {name: node for name, node in folder.synced.items() if name in folder.names}
        case _:
            return folder.names


def _content(file: _File, keep: Keep) -> bytes:
    written_content = bytes(file.content)
    if written_content == file.synced or keep is Keep.EVERYTHING:
        return written_content
    if keep is Keep.ZEROED:
        return bytes(len(written_content))
    if keep in (Keep.TORN, Keep.ADDED_NAMES):
        return written_content[: len(written_content) // 2]
    return file.synced


def _revived_folder(folder: _Folder, keep: Keep, seen: dict[int, _File]) -> _Folder:
    names: dict[str, _File | _Folder] = {}
    for name, node in _surviving_names(folder, keep).items():
        if isinstance(node, _Folder):
            names[name] = _revived_folder(node, keep, seen)
        else:
            # A file with several names stays one file.
            names[name] = seen.setdefault(id(node), _revived_file(node, keep))
    return _Folder(names, dict(names))


def _revived_file(file: _File, keep: Keep) -> _File:
    content = _content(file, keep)
    return _File(bytearray(content), content)
