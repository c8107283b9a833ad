"""Removal of the locks on build folders that dead processes left on this host.

``torch.utils.cpp_extension`` builds DeepSpeed's operators, among others. The builder locks a build
folder by an empty file ``lock``, which it creates exclusively and removes after the build. During
the build, the builder keeps this file open. A killed builder leaves the file, and every later
process waits for the file without a limit.

Other locks need no removal. The kernel frees the ``flock`` of a dead process (filelock, inductor,
Triton, huggingface_hub), and ``SoftFileLock`` of filelock detects a dead owner itself.

The agent removes a lock only if each of these conditions is true:

* The lock looks like a lock of torch: same folder in the extension cache, same size and same mode
  bits.
* This user owns the lock.
* The file system is local, so no process of another host can own the lock.
* This process sees every process that can reach the folder. In a container, this is true only for
  the container's own root file system.
* No process has the lock open or works in the build folder, at two checks 0.3 s apart. A builder
  closes its lock just before it removes the lock, so one check is not enough.
* This process can read the list of open files of every process of this user. Exceptions are the
  host's init process and login programs such as sshd.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level
from resilient.redaction import shell_quote
from resilient.storage.shared_memory import lock_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.clock import Clock
    from resilient.events import Emitter

_NAME = "lock"
_BETWEEN_LOOKS_SECONDS = 0.3
_PROC = Path("/proc")
_INITIAL_NAMESPACE = "pid:[4026531836]"
"""PID namespace of the host; the kernel fixes the number (``PROC_PID_INIT_INO``)."""
_LOCAL_TYPES = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
_NO_BUILDERS = frozenset({"(sd-pam)", "ssh-agent", "sshd", "sshd-session"})
"""Login programs; even the user who runs them cannot read their open files."""
_OCTAL = re.compile(r"\\([0-7]{3})")
_MOUNT_POINT, _ROOT_FIELDS = 4, 6
_USER_FIELD = re.compile(r"^Uid:\t(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class BuildLockRemoved(Event):
    """The agent removed a build lock that a dead process left.

    Attributes:
        path: Path of the lock.
        created_at: Time at which the lock was created, UTC.
    """

    template: ClassVar[str] = (
        "removed the build lock {path}: the process that created the lock at {created_at} is dead"
    )
    path: str
    created_at: str


@dataclass(frozen=True, slots=True)
class BuildLockLeft(Event):
    """The agent left a build lock, because its owner may be alive.

    Attributes:
        path: Path of the lock.
        reason: Fact that makes the removal unsafe.
    """

    level: ClassVar[Level] = Level.WARNING
    path: str
    reason: str

    def message(self) -> str:
        """Return the message: path, reason and the command that removes the lock."""
        return (
            f"left the build lock {self.path}: {self.reason}. Ranks may wait for the lock; if no "
            f"process builds there: rm {shell_quote(self.path)}"
        )


@dataclass(frozen=True, slots=True)
class Users:
    """Processes of this host that use a lock or its folder.

    Attributes:
        holders: Processes that have the lock open.
        workers: Processes whose working directory is in the build folder.
        unreadable: Processes of this user whose open files cannot be read.
    """

    holders: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """Reason to leave the lock; empty if there is none."""
        if self.holders:
            return f"{describe_process(self.holders[0])} has the lock open"
        if self.workers:
            return f"{describe_process(self.workers[0])} works in that folder"
        if self.unreadable:
            return f"the open files of {describe_process(self.unreadable[0])} cannot be read"
        return ""


def remove_dead_locks(environ: Mapping[str, str], clock: Clock, emit: Emitter) -> None:
    """Remove the build locks of dead processes from torch's extension cache.

    Waits 0.3 s if there is a lock without a live owner, else does not wait.

    Crash: a lock is removed or is still there.

    Args:
        environ: Environment of the workers, which names the cache.
        clock: Clock for the time between the two checks.
        emit: Listener for an event per lock without a live owner.
    """
    with ExitStack() as stack:
        dead_locks = []
        for path in find_locks(environ):
            identity = _identity(path)
            # Agents take turns at a folder: a second agent could remove the lock of a new build.
            handle = lock_folder(path.parent)
            if identity is None or handle is None:
                continue
            stack.callback(os.close, handle)
            users = users_of(path)
            reason = _unsafe(path) or users.reason
            if not reason:
                dead_locks.append((path, identity))
            elif not users.holders:
                emit(BuildLockLeft(str(path), reason))
        if dead_locks:
            clock.sleep(_BETWEEN_LOOKS_SECONDS)
        for path, identity in dead_locks:
            _remove(path, identity, emit)


def find_locks(environ: Mapping[str, str]) -> list[Path]:
    """Return the build locks in torch's extension cache, of dead and of live processes.

    Args:
        environ: Environment of the workers, which names the cache.
    """
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        locks = Path(folder).glob(f"*/{_NAME}")
    else:
        home = environ.get("HOME") or str(Path("~").expanduser())
        caches = Path(environ.get("XDG_CACHE_HOME") or Path(home, ".cache"))
        # One folder for each version of Python and of CUDA.
        locks = Path(caches, "torch_extensions").glob(f"py*_*/*/{_NAME}")
    return sorted(lock for lock in _readable(locks) if _is_lock_of_torch(lock))


def users_of(path: Path) -> Users:
    """Return the processes of this host that use a lock or its folder."""
    status = _status(path)
    holders, workers, unreadable_pids = [], [], []
    folder = os.path.realpath(path.parent)
    for process in _processes():
        try:
            if status is not None and _has_open(process, status):
                holders.append(process)
            cwd = (_PROC / str(process) / "cwd").readlink()
            if cwd.is_relative_to(folder):
                workers.append(process)
        except PermissionError:
            if _may_build(process):
                unreadable_pids.append(process)
        except OSError:
            continue  # The process has ended.
    return Users(tuple(holders), tuple(workers), tuple(unreadable_pids))


def held_files(suffix: str) -> dict[str, int]:
    """Return the files with a suffix that a process of this host has locked by ``flock``.

    Args:
        suffix: End of the files' names.

    Returns:
        Process by path.
    """
    owners: dict[str, int] = {}
    for line in _text(_PROC / "locks").splitlines():
        fields = line.split()
        if len(fields) < _ROOT_FIELDS or fields[1] != "FLOCK" or not fields[4].isdecimal():
            continue
        process, number = int(fields[4]), fields[5].rpartition(":")[2]
        for link, target in _open_files(process):
            status = _status(link) if target.endswith(suffix) else None
            if status is not None and str(status.st_ino) == number:
                owners[target] = process
    return owners


def why_unsafe(folder: str, mounts: str, *, sees_all: bool) -> str:
    """Return the reason why an invisible process may use a folder; empty if none can.

    Args:
        folder: Real path of the folder.
        mounts: Content of ``/proc/self/mountinfo``.
        sees_all: Whether this process sees all processes of the host.
    """
    point, kind = _mount_of(folder, mounts)
    if kind not in _LOCAL_TYPES:
        return f"other hosts may use its file system ({kind or 'unknown'})"
    if not sees_all and (point, kind) != ("/", "overlay"):
        return "processes outside this container may use that folder"
    return ""


def describe_process(process: int) -> str:
    """Return number and name of a process."""
    name = _text(_PROC / str(process) / "comm").strip()
    return f"process {process} ({name})" if name else f"process {process}"


def _unsafe(path: Path) -> str:
    status = _status(path)
    if status is None or status.st_uid != os.geteuid():
        return "another user owns the lock"
    mounts = _text(_PROC / "self" / "mountinfo")
    return why_unsafe(os.path.realpath(path.parent), mounts, sees_all=_sees_all())


def _remove(path: Path, identity: tuple[int, int, int], emit: Emitter) -> None:
    if _identity(path) != identity:
        return  # The lock is gone, or another process has created a new one.
    if reason := users_of(path).reason:
        emit(BuildLockLeft(str(path), reason))
        return
    creation_time = datetime.fromtimestamp(identity[2] / 1e9, UTC)
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        emit(BuildLockLeft(str(path), f"the removal failed ({error.strerror})"))
        return
    emit(BuildLockRemoved(str(path), creation_time.isoformat(timespec="seconds")))


def _is_lock_of_torch(path: Path) -> bool:
    """Return whether torch created a file: torch writes nothing and keeps the default mode bits."""
    status = _status(path)
    if status is None or path.is_symlink() or not stat.S_ISREG(status.st_mode):
        return False
    return status.st_size == 0 and bool(status.st_mode & stat.S_IXUSR)


def _identity(path: Path) -> tuple[int, int, int] | None:
    status = _status(path)
    return None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns)


def _has_open(process: int, lock_status: os.stat_result) -> bool:
    """Return whether a process has a lock open.

    Raises:
        PermissionError: The open files cannot be read.
        OSError: The process has ended.
    """
    with os.scandir(_PROC / str(process) / "fd") as links:
        for link in links:
            # Check only files of that name: a lost network file system would block.
            try:
                name = Path(link.path).readlink().name
            except FileNotFoundError:
                continue  # The file was closed meanwhile.
            if name != _NAME:
                continue
            status = _status(Path(link.path))
            if status is not None and os.path.samestat(status, lock_status):
                return True
    return False


def _open_files(process: int) -> Iterator[tuple[Path, str]]:
    folder = _PROC / str(process) / "fd"
    for link in _readable(folder.iterdir()):
        yield link, _link(link)


def _may_build(process: int) -> bool:
    """Return whether a process without readable files may own a lock of this user."""
    folder = _PROC / str(process)
    match = _USER_FIELD.search(_text(folder / "status"))
    if match is None or int(match[1]) != os.geteuid():
        return False
    state = _text(folder / "stat").rpartition(")")[2].split()[:1]
    is_dead = not state or state[0] in "ZX"
    is_init = process == 1 and _sees_all()
    return not (is_dead or is_init) and _text(folder / "comm").strip() not in _NO_BUILDERS


def _sees_all() -> bool:
    """Return whether this process is in the host's own PID namespace."""
    try:
        return str((_PROC / "self" / "ns" / "pid").readlink()) == _INITIAL_NAMESPACE
    except OSError:
        return False


def _mount_of(folder: str, mounts: str) -> tuple[str, str]:
    """Return mount point and type of the file system that holds a folder."""
    best = ("", "")
    for line in mounts.splitlines():
        head, _, tail = line.partition(" - ")
        fields, kinds = head.split(), tail.split()
        if len(fields) <= _MOUNT_POINT or not kinds:
            continue
        point = _OCTAL.sub(lambda field: chr(int(field[1], 8)), fields[_MOUNT_POINT])
        is_above = folder == point or folder.startswith(f"{point.rstrip('/')}/")
        # Of two mounts at one point the later one hides the earlier one.
        if is_above and len(point) >= len(best[0]):
            best = (point, kinds[0])
    return best


def _processes() -> Sequence[int]:
    own_pid = os.getpid()
    numbers = (int(path.name) for path in _readable(_PROC.iterdir()) if path.name.isdecimal())
    return [number for number in numbers if number != own_pid]


def _readable(paths: Iterator[Path]) -> list[Path]:
    try:
        return list(paths)
    except OSError:
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
