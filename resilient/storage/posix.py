"""POSIX file operations, direct I/O, and fsync of the files of killed processes.

Tests replace these operations with a model of power loss.

A killed process can leave a change of a folder that is visible, but not durable yet. A power loss
then undoes this change. It may remove a file name that readers have already seen. It may also
restore the deleted manifest (table of contents) of a checkpoint, although the files of the
checkpoint are deleted.
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
"""Disk blocks have this size or a divisor of it; the page size is a multiple of it."""
_WRITE_PIECE_BYTES = 16 << 20
_DIRECT_BYTES_MIN = 1 << 20
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_DIRECT = getattr(os, "O_DIRECT", 0)


class PosixWritableFile:
    """A file descriptor open for writing.

    Large pieces are written to the disk directly from the caller's memory. Nothing is copied, and
    the disk starts at once instead of at the sync. The page cache keeps the files of the training,
    because a checkpoint, which is rarely read again, does not displace them. If the file system or
    the memory does not support direct I/O, the write uses the page cache. ``sync`` is needed in
    both cases.

    Args:
        descriptor: Descriptor of an empty file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._may_be_direct = bool(_DIRECT)
        self._is_direct = False
        self._offset = 0

    def write(self, data: memoryview) -> int:
        """Write a first part of ``data`` with ``write(2)``."""
        written_bytes = self._write_directly(data) or self._write_through_cache(data)
        self._offset += written_bytes
        return written_bytes

    def sync(self) -> None:
        """Sync the descriptor that wrote, as only this one is sure to report a write error."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _write_directly(self, data: memoryview) -> int:
        """Write whole blocks past the page cache; return their bytes, 0 if not supported."""
        may_be = self._may_be_direct and not self._offset % _BLOCK_BYTES
        if not may_be or len(data) < _DIRECT_BYTES_MIN:
            return 0
        size_bytes = min(len(data), _WRITE_PIECE_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            self._set_direct(direct=True)
            return os.write(self._descriptor, data[:size_bytes])
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            self._may_be_direct = False
            return 0

    def _write_through_cache(self, data: memoryview) -> int:
        self._set_direct(direct=False)
        return os.write(self._descriptor, data)

    def _set_direct(self, *, direct: bool) -> None:
        if direct == self._is_direct:
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        new_flags = flags | _DIRECT if direct else flags & ~_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, new_flags)
        self._is_direct = direct


_READ_MAX_BYTES = 1 << 30
_READ_PIECE_BYTES = 512 << 10
"""A part of a core's own cache: the bytes are digested before they leave the cache."""
_VECTOR_MAX = 1024
"""Maximum number of memory pieces in one system call, ``IOV_MAX``."""


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One entry of a folder: a folder, or a regular file with its size."""

    name: str
    is_folder: bool
    size_bytes: int = 0


class WritableFile(Protocol):
    """A file being written."""

    def write(self, data: memoryview) -> int:
        """Append a first part of ``data`` and return its length; it may be short."""

    def sync(self) -> None:
        """Make the content durable; after a failure the content is lost."""

    def close(self) -> None:
        """Close the file."""


class FileContentOps(Protocol):
    """Operations on the content of a file."""

    def create(self, path: Path) -> WritableFile:
        """Create a file that did not exist, with the mode that the umask leaves."""

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Return bytes of a regular file; up to its end if ``length`` is None."""

    def read_into(self, path: Path, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from a regular file; return the number of bytes read before its end."""

    def size_bytes(self, path: Path) -> int:
        """Return the length of a regular file."""


class FileNameOps(Protocol):
    """Operations on file names. A change is durable only after ``sync_folder``."""

    def replace(self, source: Path, target: Path) -> None:
        """Rename the file ``source`` to ``target`` atomically."""

    def link(self, source: Path, target: Path) -> None:
        """Add the name ``target`` to the file, or raise FileExistsError."""

    def unlink(self, path: Path) -> None:
        """Remove a name."""


class DirectoryOps(Protocol):
    """Operations on folders."""

    def make_folder(self, path: Path) -> None:
        """Create one folder."""

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def items(self, path: Path) -> Iterable[DirEntry]:
        """Return folders and regular files, without symbolic links; empty without the folder."""


class FileSystem(FileContentOps, FileNameOps, DirectoryOps, Protocol):
    """All file operations that a LocalStore needs."""


class PosixFileSystem:
    """The machine's own file system."""

    def create(self, path: Path) -> PosixWritableFile:
        """Create with ``O_EXCL``; the mode 0666 lets the umask decide about readers."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return PosixWritableFile(os.open(path, flags, 0o666))

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Read only the range; never through a symbolic link, never from a pipe."""
        with _opened(path) as descriptor:
            size_bytes = _regular_size(os.fstat(descriptor), path)
            end = size_bytes if length is None else min(size_bytes, start + length)
            return _read_range(descriptor, start, end)

    def read_into(self, path: Path, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Read with ``preadv(2)``, which copies the bytes once, into the caller's memory.

        One descriptor reads from front to back for any layout of the memory, because the kernel
        reads ahead per descriptor. Pieces are reported in a size that fits the processor's cache.
        """
        with _opened(path) as descriptor:
            _regular_size(os.fstat(descriptor), path)
            filled = 0
            while filled < len(buffer):
                pieces = buffer.cut(filled, filled + _READ_PIECE_BYTES)
                read_bytes = os.preadv(descriptor, pieces[:_VECTOR_MAX], start + filled)
                if not read_bytes:
                    break
                filled += read_bytes
                on_arrival(filled - read_bytes, filled)
            return filled

    def size_bytes(self, path: Path) -> int:
        """Call ``lstat(2)``."""
        return _regular_size(path.lstat(), path)

    def replace(self, source: Path, target: Path) -> None:
        """Call ``rename(2)``."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Link with ``link(2)``; in case of EEXIST, the link count decides whether it succeeded.

        On NFS the response to a successful link can be lost. The client's own retry then fails with
        EEXIST. No other process uses ``source``, so a link count of 2 means that this call
        succeeded.
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
        """Sync the folder with ``fsync(2)``.

        A file system without that operation answers EINVAL. Nothing more can be done there, and
        EINVAL reports no lost data.
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
        """Scan a folder that other processes may change, without entries that vanish meanwhile."""
        try:
            with os.scandir(path) as entries:
                return [item for entry in entries if (item := _dir_entry(entry)) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _dir_entry(entry: os.DirEntry[str]) -> DirEntry | None:
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
    # O_NONBLOCK: the open of a pipe in the folder would otherwise never return.
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
    # A join of one chunk copies nothing.
    return b"".join(chunks)


@runtime_checkable
class FsyncCapable(Protocol):
    """Store in which visible files may not be durable, or wrapper of such a store."""

    def settle(self) -> None:
        """Make every visible file durable; one call per process is enough.

        Raises:
            StoreError: A file could not be made durable, so nothing may depend on it.
        """


def fsync_leftovers(store: Store) -> None:
    """Make every visible file of ``store`` durable, if the store is FsyncCapable.

    Raises:
        StoreError: A file could not be made durable.
    """
    if isinstance(store, FsyncCapable):
        store.settle()


def parent_dirs(files: FileSystem, folder: Path) -> Iterator[Path]:
    """Yield a store's folders, each before its parent."""
    for item in files.items(folder):
        if item.is_folder and is_key(item.name):
            yield from parent_dirs(files, folder / item.name)
    yield folder
