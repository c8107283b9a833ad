"""/dev/shm folders, mapped buffers, free host memory.

How much memory this process may still take before the kernel kills somebody for it.

Memory of this process, and the cost of its first touch paid early.

Shared memory by files in a memory-backed folder (/dev/shm), each folder owned by one process.

A folder belongs to whoever holds its lock. The kernel lets the lock go when the owner dies,
however it dies, so ``sweep`` tells stale folders from live ones in any PID namespace. Python's
multiprocessing.shared_memory is not used: its resource tracker unlinks segments behind our back
when the process that mapped them dies (Python issue 82300).
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
    """Return the least of what the machine and this process's control groups have left.

    Shared memory counts against both, and its file system's size says nothing of either.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        None where nobody tells.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return min(found, default=None)


def _of_machine(root: Path) -> list[int]:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return [int(value.split()[0]) << 10]
    return []


def _of_groups(root: Path) -> list[int]:
    """Return what each control group (version 2) around this process has left."""
    found: list[int] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        names = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
        top = root / "sys/fs/cgroup"
        for name in names:
            group = top / name.strip("/")
            found += [_left(one) for one in (group, *group.parents) if _is_bounded(one, top)]
    return found


def _is_bounded(group: Path, top: Path) -> bool:
    limit = group / "memory.max"
    return group.is_relative_to(top) and limit.exists() and limit.read_text().strip() != "max"


def _left(group: Path) -> int:
    limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    # The page cache counts as used, and goes when somebody needs the memory.
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + int(stat.get("inactive_file", 0))


# Linux 5.14; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23
_STRIDE_BYTES = 1 << 20


def private(size_bytes: int) -> memoryview:
    """Return zeros that only this process sees, in huge pages where the machine gives them."""
    if size_bytes == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    keep_from_children(mapped)
    return memoryview(mapped)


def keep_from_children(mapped: mmap.mmap) -> None:
    """Leave memory out of the processes that are forked from this one, such as a loader's.

    Else each fork shares its pages until they are written to: the next copy into it takes a fault
    per page, ten times as long as a warm one, and as much memory again while the child lives. A
    child has no use for it: the threads that persist are not there.
    """
    with suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_DONTFORK)


class PrivateBuffers:
    """Private memory by name, the same as last time where it is long enough."""

    def __init__(self) -> None:
        self._held: dict[str, memoryview] = {}

    def get(self, name: str, size_bytes: int) -> memoryview:
        """Return at least ``size_bytes`` of memory."""
        held = self._held.get(name)
        if held is None or len(held) < size_bytes:
            held = self._held[name] = private(size_bytes)
        return held


def prefault(memory: memoryview) -> None:
    """Have every page of fresh memory there, so that whoever writes first does not wait for it.

    Args:
        memory: writable; nobody needs what is in it.
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
"""Where shared memory is made: another file system in memory, where a container's is too small."""
_PREFIX = "resilient-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-[0-9a-f]{{8}}")
_OWNER = "owner.json"
_ATTEMPTS_MAX = 16
SPARE_BYTES = 128 << 20
"""Memory of the machine that is never taken."""


class SharedFolder:
    """A folder of shared memory that exists as long as this process wants it.

    Args:
        root: where it is made; a file system in memory.

    Raises:
        StoreDenied: it cannot be made there.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._made = 0
        try:
            self.path, self._lock = _create(root)
            self._tell()
        except OSError as error:
            raise StoreDenied(
                f"cannot make shared memory in {root}: {error.strerror}",
                hint=f"ls -ld {shell_quote(root)}",
            ) from error

    def allocate(self, size_bytes: int) -> Path:
        """Return a new file of ``size_bytes`` whose memory is promised, so no write can fail.

        Raises:
            StoreFull: that much is not free.
        """
        left_bytes = available_memory_bytes()
        if left_bytes is not None and size_bytes > left_bytes - SPARE_BYTES:
            raise StoreFull(
                f"{size_bytes} bytes of shared memory are too many: this host has {left_bytes} "
                f"bytes of memory left and {SPARE_BYTES} must stay",
                hint="free -b; a container's is set by its memory limit",
            )
        self._made += 1
        path = self.path / f"{self._made:06d}"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # A hole that cannot be filled later would kill the writer with SIGBUS.
            os.posix_fallocate(handle, 0, max(size_bytes, 1))
        except OSError as error:
            path.unlink()
            raise StoreFull(
                f"{self._root} has no {size_bytes} bytes left ({free_bytes(self._root)} are free)",
                hint=f"df -h {shell_quote(self._root)}; a container's is set by --shm-size, and another "
                "folder in memory is taken by RESILIENT_SHARED_FOLDER=...",
            ) from error
        finally:
            os.close(handle)
        return path

    def free(self, path: Path) -> None:
        """Let a file go; who has mapped it keeps what it mapped."""
        path.unlink(missing_ok=True)

    def mark(self, name: str) -> None:
        """Let others see that this owner is at ``name``, until ``unmark``."""
        (self.path / name).touch()

    def unmark(self, name: str) -> None:
        """Take a mark away."""
        (self.path / name).unlink(missing_ok=True)

    def is_marked_elsewhere(self, name: str) -> bool:
        """Say whether another living owner is at ``name``."""
        others = {found.parent for found in self._root.glob(f"{_PREFIX}*/{name}")}
        return any(_is_owned(path) for path in others - {self.path})

    def close(self) -> None:
        """Let everything go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _tell(self) -> None:
        """Say for people who the owner is; the lock alone decides."""
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        owner = {"pid": os.getpid(), "started_ticks": int(started)}
        (self.path / _OWNER).write_text(json.dumps(owner))


def _create(root: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS_MAX):
        path = root / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = lock_folder(path)
        if lock is not None:
            return path, lock
    raise FileNotFoundError(0, "somebody sweeps faster than we make folders")


def lock_folder(path: Path) -> int | None:
    """Return a descriptor that holds the lock of ``path``, None if another does or it is gone.

    Crash: the kernel lets the lock go.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been swept between the two calls above.
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
    """Return how much memory all that is shared under ``root`` takes, of all jobs of this host.

    What this user may not look into is not counted.
    """
    used = 0
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its owner may be gone, or another user
            # st_blocks counts 512 bytes each, whatever the file system.
            used += sum(512 * one.stat().st_blocks for one in folder.iterdir())
    return used


def sweep(root: Path = ROOT) -> list[Path]:
    """Remove the folders of this user whose owners are dead, and return them.

    A live owner holds its lock, so nothing of it is touched. A folder that was made this
    moment and is not locked yet may go; its maker notices and makes another. What somebody else
    called so, such as a repository in memory, is no such folder and stays.
    """
    swept = []
    for path in sorted(root.glob(f"{_PREFIX}*")):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
            continue
        if not _is_one(path):
            continue
        lock = lock_folder(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            swept.append(path)
    return swept


def _is_one(path: Path) -> bool:
    """Say whether a folder is one of ours: by its name, and by what its owner wrote into it.

    An owner that was killed before it had written that had put nothing else there.
    """
    named = _NAME.fullmatch(path.name)
    if named is None:
        return False
    try:
        owner = json.loads((path / _OWNER).read_text())
        if owner["pid"] == int(named[1]):
            return True
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return {one.name for one in path.iterdir()} <= {_OWNER}


def map_file(path: Path, size_bytes: int, *, writable: bool) -> memoryview:
    """Return the first ``size_bytes`` of a shared file as memory.

    Raises:
        OSError: it is gone.
        ValueError: it is shorter.
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
        keep_from_children(mapped)
    return memoryview(mapped)


def free_bytes(root: Path = ROOT) -> int:
    """Return how many bytes of shared memory nobody uses."""
    held = os.statvfs(root)
    return held.f_bavail * held.f_frsize
