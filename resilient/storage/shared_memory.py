"""Folders of shared memory in /dev/shm, mapped buffers, and measurement of free host memory.

Each folder has one owner, the process that has locked the folder. The kernel releases the lock when
the owner dies for any reason. ``sweep`` deletes the folders of dead owners. Because it tests the
lock and no process id, it also works across PID namespaces. Python's multiprocessing.shared_memory
is not used, because its resource tracker deletes a segment when any process that mapped the segment
dies (Python issue 82300).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from resilient.errors import StoreDenied, StoreFull
from resilient.redaction import shell_quote

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the smaller of the memory left to the machine and to this process's control groups.

    Shared memory counts against both limits. The size of its file system shows neither limit.

    Args:
        root: Folder that contains ``proc`` and ``sys``.

    Returns:
        None if neither limit is known.
    """
    limits = [*_machine_memory_left(root), *_group_memory_left(root)]
    return min(limits, default=None)


def _machine_memory_left(root: Path) -> list[int]:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return [int(value.split()[0]) << 10]
    return []


def _group_memory_left(root: Path) -> list[int]:
    """Return the memory left to each control group (version 2) around this process."""
    limits: list[int] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        names = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
        top = root / "sys/fs/cgroup"
        for name in names:
            group = top / name.strip("/")
            limits += [
                _bytes_left(parent)
                for parent in (group, *group.parents)
                if _is_bounded(parent, top)
            ]
    return limits


def _is_bounded(group: Path, top: Path) -> bool:
    limit = group / "memory.max"
    return group.is_relative_to(top) and limit.exists() and limit.read_text().strip() != "max"


def _bytes_left(group: Path) -> int:
    limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    # The page cache counts as used, but the kernel frees it on demand.
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + int(stat.get("inactive_file", 0))


# Linux 5.14; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23
_STRIDE_BYTES = 1 << 20


def private(size_bytes: int) -> memoryview:
    """Return zeroed memory private to this process, in huge pages if the machine has them."""
    if size_bytes == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    exclude_from_forks(mapped)
    return memoryview(mapped)


def exclude_from_forks(mapped: mmap.mmap) -> None:
    """Exclude memory from processes forked from this one, such as data loader workers.

    Otherwise each fork shares the pages until they are written to. The next copy into such a page
    causes a page fault, which takes 10 times as long as a warm copy. The copied pages double the
    memory until the child ends. A child does not need this memory, because the threads that persist
    saves are not forked.
    """
    with suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_DONTFORK)


class PrivateBuffers:
    """Private memory by name, reused if it is long enough."""

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}

    def get(self, name: str, size_bytes: int) -> memoryview:
        """Return at least ``size_bytes`` of memory."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers[name] = private(size_bytes)
        return buffer


def prefault(memory: memoryview) -> None:
    """Touch every page of fresh memory, so that the first writer does not wait for page faults.

    Args:
        memory: Writable memory whose content is not needed.
    """
    mapped = memory.obj
    if isinstance(mapped, mmap.mmap):
        with suppress(OSError):
            mapped.madvise(_MADV_POPULATE_WRITE)
            return
    zeros = bytes(_STRIDE_BYTES)
    for start in range(0, len(memory), _STRIDE_BYTES):
        piece = memory[start : start + _STRIDE_BYTES]
        piece[:] = zeros[: len(piece)]


ROOT = Path(os.environ.get("RESILIENT_SHARED_FOLDER") or "/dev/shm")  # noqa: S108 - in memory
"""Folder for shared memory. Set another folder if the container's folder is too small."""
_PREFIX = "resilient-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-[0-9a-f]{{8}}")
_OWNER = "owner.json"
_ATTEMPTS_MAX = 16
SPARE_BYTES = 128 << 20
"""Memory of the machine that is never allocated."""


class SharedFolder:
    """A folder of shared memory that exists until this process closes it.

    Args:
        root: Parent folder, on a file system in memory.

    Raises:
        StoreDenied: The folder cannot be created.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._segment_count = 0
        try:
            self.path, self._lock = _create(root)
            self._write_owner()
        except OSError as error:
            raise StoreDenied(
                f"cannot make shared memory in {root}: {error.strerror}",
                hint=f"ls -ld {shell_quote(root)}",
            ) from error

    def allocate(self, size_bytes: int) -> Path:
        """Return a new file of ``size_bytes`` with reserved memory, so that no write can fail.

        Raises:
            StoreFull: This amount of memory is not free.
        """
        left_bytes = available_memory_bytes()
        if left_bytes is not None and size_bytes > left_bytes - SPARE_BYTES:
            raise StoreFull(
                f"{size_bytes} bytes of shared memory are too many: this host has {left_bytes} "
                f"bytes of memory left and {SPARE_BYTES} must stay",
                hint="free -b; a container's is set by its memory limit",
            )
        self._segment_count += 1
        path = self.path / f"{self._segment_count:06d}"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserve now: a write to a hole in a full file system kills the writer with SIGBUS.
            os.posix_fallocate(handle, 0, max(size_bytes, 1))
        except OSError as error:
            path.unlink()
            raise StoreFull(
                f"{self._root} has no {size_bytes} bytes left ({free_bytes(self._root)} are free)",
                hint=f"df -h {shell_quote(self._root)}; a container's is set by --shm-size, and "
                "another folder in memory is taken by RESILIENT_SHARED_FOLDER=...",
            ) from error
        finally:
            os.close(handle)
        return path

    def free(self, path: Path) -> None:
        """Delete a file; a process that has it mapped keeps the mapped memory."""
        path.unlink(missing_ok=True)

    def mark(self, name: str) -> None:
        """Show other processes that this owner uses ``name``, until ``unmark``."""
        (self.path / name).touch()

    def unmark(self, name: str) -> None:
        """Remove a mark."""
        (self.path / name).unlink(missing_ok=True)

    def is_marked_elsewhere(self, name: str) -> bool:
        """Return whether another living owner has marked ``name``."""
        marking_folders = {mark.parent for mark in self._root.glob(f"{_PREFIX}*/{name}")}
        return any(_is_owned(path) for path in marking_folders - {self.path})

    def close(self) -> None:
        """Delete the folder and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _write_owner(self) -> None:
        """Write the owner for people to read; only the lock decides."""
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        owner = {"pid": os.getpid(), "started_ticks": int(started)}
        (self.path / _OWNER).write_text(json.dumps(owner))


def _create(root: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that has its lock."""
    for _ in range(_ATTEMPTS_MAX):
        path = root / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = lock_folder(path)
        if lock is not None:
            return path, lock
    raise FileNotFoundError(0, "another process deletes new folders repeatedly")


def lock_folder(path: Path) -> int | None:
    """Lock ``path`` and return the descriptor; None if it is gone or locked by another owner.

    Crash: the kernel releases the lock.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The folder may have been deleted between the two calls above.
        if os.path.samestat(path.stat(), os.fstat(handle)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _is_owned(path: Path) -> bool:
    lock = lock_folder(path)
    if lock is not None:
        os.close(lock)
    return lock is None and path.exists()


def used_bytes(root: Path = ROOT) -> int:
    """Return how much memory the shared folders under ``root`` use, over all jobs of this host.

    Folders that this user may not read are not counted.
    """
    used = 0
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its owner may be gone, or another user
            # st_blocks counts 512 bytes each, on any file system.
            used += sum(512 * path.stat().st_blocks for path in folder.iterdir())
    return used


def sweep(root: Path = ROOT) -> list[Path]:
    """Delete the folders of this user whose owners are dead, and return the deleted folders.

    A live owner has the lock of its folder, so the folder is not touched. A new folder that is not
    locked yet may be deleted; its creator detects that and creates another. A foreign folder with
    such a name, such as a repository in memory, is not deleted.
    """
    removed_paths = []
    for path in sorted(root.glob(f"{_PREFIX}*")):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
            continue
        if not _is_shared_memory_folder(path):
            continue
        lock = lock_folder(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            removed_paths.append(path)
    return removed_paths


def _is_shared_memory_folder(path: Path) -> bool:
    """Return whether a folder is a shared memory folder, by its name and its owner file.

    An owner that was killed before it wrote the owner file had put nothing else there.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    try:
        owner = json.loads((path / _OWNER).read_text())
        if owner["pid"] == int(match[1]):
            return True
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return {entry.name for entry in path.iterdir()} <= {_OWNER}


def map_file(path: Path, size_bytes: int, *, writable: bool) -> memoryview:
    """Map the first ``size_bytes`` of a shared file.

    Raises:
        OSError: The file is gone.
        ValueError: The file is shorter.
    """
    if size_bytes == 0:
        return memoryview(b"")
    handle = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(handle, size_bytes, access=access)
    finally:
        os.close(handle)
    if writable:
        exclude_from_forks(mapped)
    return memoryview(mapped)


def free_bytes(root: Path = ROOT) -> int:
    """Return how many bytes of shared memory are free."""
    stats = os.statvfs(root)
    return stats.f_bavail * stats.f_frsize
