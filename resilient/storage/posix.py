"""POSIX file operations (seam for power-loss tests), direct I/O, fsync of what a killed process left.

A file of the machine that is being written, past the page cache where that can be.

The POSIX operations that a LocalStore stands on, as a seam for a model of power loss.

What can be seen and is not durable yet: a process that was killed left it, and nobody synced it.

Who builds on it could lose it later: a power loss takes back a name that somebody has read, or
brings back a manifest whose files were swept since.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from resilient.storage.store import is_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from resilient.storage.store import Store
    from resilient.storage.transfer import Arrived, ScatterBuffer

_BLOCK_BYTES = 4096
"""Of this size, or a divisor of it, are the blocks of disks, and memory's pages a multiple."""
_PIECE_BYTES = 16 << 20
_DIRECT_BYTES_MIN = 1 << 20
_NOT_DIRECTLY = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_DIRECT = getattr(os, "O_DIRECT", 0)


class PosixWritableFile:
    """A file descriptor open for writing.

    Large pieces go to the disk straight from the caller's memory: nothing is copied, the disk
    starts at once and not when a sync asks for it, and training's files stay in the page cache,
    where a checkpoint would not be read again. A file system or memory that cannot have that is
    written through the page cache. ``sync`` is as needed either way.

    Args:
        descriptor: of an empty file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._may_be_direct = bool(_DIRECT)
        self._is_direct = False
        self._at = 0

    def write(self, data: memoryview) -> int:
        """Call ``write(2)`` with a first part of ``data``."""
        written = self._write_directly(data) or self._write_through_cache(data)
        self._at += written
        return written

    def sync(self) -> None:
        """Call ``fsync(2)`` on the descriptor that wrote, the one sure to be told of an error."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Call ``close(2)``."""
        os.close(self._descriptor)

    def _write_directly(self, data: memoryview) -> int:
        """Write whole blocks past the page cache; return how many bytes, 0 if that cannot be."""
        may_be = self._may_be_direct and not self._at % _BLOCK_BYTES
        if not may_be or len(data) < _DIRECT_BYTES_MIN:
            return 0
        size_bytes = min(len(data), _PIECE_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            self._switch(direct=True)
            return os.write(self._descriptor, data[:size_bytes])
        except OSError as error:
            if error.errno not in _NOT_DIRECTLY:
                raise
            self._may_be_direct = False
            return 0

    def _write_through_cache(self, data: memoryview) -> int:
        self._switch(direct=False)
        return os.write(self._descriptor, data)

    def _switch(self, *, direct: bool) -> None:
        if direct == self._is_direct:
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        wanted = flags | _DIRECT if direct else flags & ~_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, wanted)
        self._is_direct = direct


_READ_MAX_BYTES = 1 << 30
_FILES_PIECE_BYTES = 512 << 10
"""A part of what a core's own cache holds: its bytes are digested before they leave that."""
_VECTOR_MAX = 1024
"""So many pieces of memory does one call of the kernel take, ``IOV_MAX``."""


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a folder: a folder, or a regular file with its size."""

    name: str
    is_folder: bool
    size_bytes: int = 0


class WritableFile(Protocol):
    """A file being written."""

    def write(self, data: memoryview) -> int:
        """Append a first part of ``data`` and return its length; it may be short."""

    def sync(self) -> None:
        """Make the content durable; a failure means that content is lost."""

    def close(self) -> None:
        """Let go of the file."""


class FileContentOps(Protocol):
    """What is in a file."""

    def create(self, path: Path) -> WritableFile:
        """Create a file that did not exist, with the mode that the umask leaves."""

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Return bytes of a regular file; to its end where ``length`` is None."""

    def read_into(self, path: Path, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Fill ``room`` from a regular file; return how many bytes came before its end."""

    def size_bytes(self, path: Path) -> int:
        """Return the length of a regular file."""


class FileNameOps(Protocol):
    """What a file is called. Nothing here is durable before ``sync_folder``."""

    def replace(self, source: Path, target: Path) -> None:
        """Give the file at ``source`` the name ``target``, atomically."""

    def link(self, source: Path, target: Path) -> None:
        """Give the file the name ``target`` too, or raise FileExistsError."""

    def unlink(self, path: Path) -> None:
        """Remove a name."""


class DirectoryOps(Protocol):
    """Where names are kept."""

    def make_folder(self, path: Path) -> None:
        """Create one folder."""

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def items(self, path: Path) -> Iterable[DirEntry]:
        """Return folders and regular files, without symbolic links; none if it is missing."""


class FileSystem(FileContentOps, FileNameOps, DirectoryOps, Protocol):
    """All of it."""


class PosixFileSystem:
    """The machine's own file system."""

    def create(self, path: Path) -> PosixWritableFile:
        """Create with ``O_EXCL``; 0666 lets the umask decide who may read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return PosixWritableFile(os.open(path, flags, 0o666))

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Read only the range; never through a symbolic link, never from a pipe."""
        with _opened(path) as descriptor:
            size_bytes = _regular_size(os.fstat(descriptor), path)
            end = size_bytes if length is None else min(size_bytes, start + length)
            return _read_range(descriptor, start, end)

    def read_into(self, path: Path, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Call ``preadv(2)``, which copies the bytes once, to where they are wanted.

        One descriptor reads from front to back, however the memory lies: the kernel reads ahead
        of a descriptor.
        What has arrived is told in pieces that the processor's cache can hold.
        """
        with _opened(path) as descriptor:
            _regular_size(os.fstat(descriptor), path)
            filled = 0
            while filled < len(room):
                pieces = room.cut(filled, filled + _FILES_PIECE_BYTES)
                came = os.preadv(descriptor, pieces[:_VECTOR_MAX], start + filled)
                if not came:
                    break
                filled += came
                arrived(filled - came, filled)
            return filled

    def size_bytes(self, path: Path) -> int:
        """Call ``lstat(2)``."""
        return _regular_size(path.lstat(), path)

    def replace(self, source: Path, target: Path) -> None:
        """Call ``rename(2)``."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Call ``link(2)``, and believe the link count over the answer.

        On NFS the answer to a link that succeeded can be lost; the client's own repetition
        then says EEXIST. ``source`` is known to nobody else, so two links are this call's.
        """
        try:
            target.hardlink_to(source)
        except FileExistsError:
            if source.lstat().st_nlink != 2:  # noqa: PLR2004 - its two names: source and target
                raise

    def unlink(self, path: Path) -> None:
        """Call ``unlink(2)``."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """Call ``mkdir(2)``."""
        path.mkdir()

    def remove_folder(self, path: Path) -> None:
        """Call ``rmdir(2)``."""
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Call ``fsync(2)`` on the folder.

        EINVAL is how a file system without that operation answers; nothing more can be done
        there, and it is no report of lost data.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)

    def items(self, path: Path) -> Iterable[DirEntry]:
        """Scan a folder that others may be changing; what vanished meanwhile is left out."""
        try:
            with os.scandir(path) as found:
                return [item for entry in found if (item := _item(entry)) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _item(entry: os.DirEntry[str]) -> DirEntry | None:
    if entry.is_dir(follow_symlinks=False):
        return DirEntry(entry.name, is_folder=True)
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return DirEntry(entry.name, is_folder=False, size_bytes=status.st_size)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Without O_NONBLOCK the open of a pipe that someone left in the folder would never return.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _regular_size(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return status.st_size


def _read_range(descriptor: int, start: int, end: int) -> bytes:
    chunks = []
    while start < end:
        chunk = os.pread(descriptor, min(end - start, _READ_MAX_BYTES), start)
        if not chunk:
            break
        chunks.append(chunk)
        start += len(chunk)
    # Joining one chunk copies nothing.
    return b"".join(chunks)


@runtime_checkable
class FsyncCapable(Protocol):
    """A store where there is a difference, or which wraps one that may be such."""

    def settle(self) -> None:
        """Make durable whatever can be seen now; once for a process is enough.

        Raises:
            StoreError: it could not be made durable, so nothing may be built upon it.
        """


def fsync_leftovers(store: Store) -> None:
    """Make durable what can be seen in ``store``, where that is not one and the same.

    Raises:
        StoreError: it could not be made durable.
    """
    if isinstance(store, FsyncCapable):
        store.settle()


def parent_dirs(files: FileSystem, folder: Path) -> Iterator[Path]:
    """Return a store's folders, each before the one that holds its name."""
    for item in files.items(folder):
        if item.is_folder and is_key(item.name):
            yield from parent_dirs(files, folder / item.name)
    yield folder
