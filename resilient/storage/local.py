"""LocalStore, which stores objects as files of a folder, and removal of its temporary files.

A write creates a temporary file in the folder of the target and syncs this file. Then it renames or
links the file to its final name, and syncs the folders.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import (
    KeyExists,
    KeyNotFound,
    NotExclusive,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from resilient.redaction import shell_quote
from resilient.storage.errors import kind_of
from resilient.storage.posix import PosixFileSystem, parent_dirs
from resilient.storage.store import ObjectInfo, check_key, free_bytes_at, is_key
from resilient.storage.transfer import MultipartConfig, as_byte_view, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from resilient.clock import Clock
    from resilient.storage.posix import FileSystem, WritableFile
    from resilient.storage.store import Data
    from resilient.storage.transfer import Arrived, ScatterBuffer

TEMPORARY = ".tmp-"
"""Prefix of the name of an unfinished file: outside the grammar of keys, so invisible."""


class TempFileSweeper:
    """Sweep of the temporary files that killed writers left in a folder store."""

    _root: Path
    url: str

    def sweep(
        self, is_deletable: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Delete temporary files of killed writers.

        ``is_deletable`` receives the keys of the temporary files themselves. The keys of the
        unfinished objects are unknown, but their folder is known. A folder that becomes empty is
        deleted too.
        """

        def key_of(path: Path) -> str:
            return path.relative_to(self._root).as_posix()

        try:
            removed_paths = sweep_temporaries(
                self._root, older_than_seconds, clock, lambda path: is_deletable(key_of(path))
            )
        except OSError as error:
            raise kind_of(error)(
                f"cannot sweep {self.url}: {error.strerror or error}",
                hint=f"ls -ld {shell_quote(self._root)}",
            ) from error
        for folder in {path.parent for path in removed_paths}:
            # The folder still has entries.
            with suppress(OSError):
                folder.rmdir()
        return tuple(map(key_of, removed_paths))


def sweep_temporaries(
    root: Path,
    older_than_seconds: float,
    clock: Clock,
    is_wanted: Callable[[Path], bool] = lambda _: True,
) -> list[Path]:
    """Delete temporary files without a write for ``older_than_seconds``.

    A write in progress touches its file with each part, so an hour is long enough even if the
    writer may still be alive. Other names are not touched, and symbolic links are not followed. If
    a live store's temporary file is deleted by mistake, one ``put`` fails; no object is damaged.

    Args:
        root: Folder of the store.
        older_than_seconds: Minimum age by the file system's clock; allow for clock skew.
        clock: Source of the current wall time.
        is_wanted: Predicate of a temporary file: true if it may be deleted.

    Returns:
        The deleted files.
    """
    oldest = datetime.fromisoformat(clock.now_iso()).timestamp() - older_than_seconds
    removed_paths = []
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            path = Path(folder, name)
            if name.startswith(TEMPORARY) and is_wanted(path) and _is_stale(path, oldest):
                # A slow writer may have renamed its file just now.
                with suppress(FileNotFoundError):
                    path.unlink()
                    removed_paths.append(path)
    return sorted(removed_paths)


def _is_stale(path: Path, oldest: float) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime <= oldest


_POSIX = PosixFileSystem()
_NO_OBJECT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_CREATE_TRIES_MAX = 20


class LocalStore(TempFileSweeper):
    """Objects as files under one folder.

    Foreign entries of the folder are not touched. Symbolic links, pipes and names outside the
    grammar of keys are neither listed nor read. A folder that is a symbolic link is not entered.

    Crash: a process that dies leaves an invisible file whose name begins with ``.tmp-``. ``sweep``
    deletes the file; the next attempt of the run also calls ``sweep``.

    Args:
        root: Folder of the store; created by the first ``put``.
        files: File operations; tests pass a model of power loss.
    """

    exclusive = True
    # Long ranges, because the kernel reads ahead for a sequential reader.
    ranges = MultipartConfig(part_bytes=256 << 20, in_flight=4)

    def __init__(self, root: Path, files: FileSystem = _POSIX) -> None:
        self._root = root.resolve()
        self._files = files
        self._is_root_path_synced = False
        self._are_folders_synced = False
        self.url = self._root.as_uri()

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` and replace an existing object.

        Crash: the old object or the new one, whole; once this has returned, the new one.
        """
        final, view = self._file(key), as_byte_view(data, key)
        with ExitStack() as undo, self._errors("put", key):
            temporary = self._write(final.parent, view, key, undo)
            self._files.replace(temporary, final)
            undo.pop_all()
            self._sync_folders(final.parent, key)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        The link is the exclusive step. The linked file is already whole and durable.

        Crash: no object, or the whole object; once this has returned, the whole object.
        """
        final, view = self._file(key), as_byte_view(data, key)
        with ExitStack() as undo, self._errors("create", key):
            temporary = self._write(final.parent, view, key, undo)
            self._link(temporary, final, key)
            undo.close()
            self._sync_folders(final.parent, key)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        file = self._file(key)
        with self._errors("get", key, reading=True):
            return self._files.read(file, 0, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end."""
        file = self._file(key)
        check_range(key, start, length)
        with self._errors("get", key, reading=True):
            return self._files.read(file, start, length)

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from offset ``start``; fewer bytes come only at the object's end."""
        file = self._file(key)
        check_range(key, start, len(buffer))
        with self._errors("get", key, reading=True):
            return self._files.read_into(file, start, buffer, on_arrival)

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        with self._errors("list", prefix):
            return sorted(_walk(self._files, self._root, "", prefix))

    def delete(self, key: str) -> None:
        """Delete the object and the folders that become empty; a missing object is not an error.

        The folder is synced even if the object was missing. Another process may have deleted the
        object and died before its sync; the object would then reappear after a power loss.

        Crash: the object exists whole, or is deleted; once this has returned, deleted.
        """
        file = self._file(key)
        with self._errors("delete", key):
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._files.unlink(file)
            with suppress(FileNotFoundError, NotADirectoryError):
                self._sync(lambda: self._files.sync_folder(file.parent), key)
            self._remove_emptied(file.parent)

    def stat(self, key: str) -> ObjectInfo:
        """Return the object's entry."""
        file = self._file(key)
        with self._errors("stat", key, reading=True):
            return ObjectInfo(key, self._files.size_bytes(file))

    def settle(self) -> None:
        """Sync every folder once, because a killed process may not have synced its folders.

        Crash: no visible change.
        """
        if self._are_folders_synced:
            return
        with self._errors("settle", ""):
            for folder in parent_dirs(self._files, self._root):
                # A folder that does not exist yet, or not any more, has no entries to sync.
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._sync(lambda path=folder: self._files.sync_folder(path), "")  # type: ignore[misc]
        self._are_folders_synced = True

    def free_bytes(self) -> int | None:
        """Return how many bytes may still be written here, None if unknown."""
        return free_bytes_at(self._root)

    def _file(self, key: str) -> Path:
        file = self._root / check_key(key)
        for folder in file.parents:
            if folder == self._root:
                return file
            if folder.is_symlink():
                break
        raise StoreDenied(
            f"cannot use `{key}` in {self.url}: a symbolic link on its way may leave the store",
            key=key,
            hint=f"ls -l {shell_quote(self._root)}",
        )

    def _write(self, folder: Path, view: memoryview, key: str, undo: ExitStack) -> Path:
        temporary, handle = self._create(folder, key)
        undo.callback(_discard, self._files, temporary)
        with closing(handle):
            _write_all(handle, view)
            self._sync(handle.sync, key)
        return temporary

    def _create(self, folder: Path, key: str) -> tuple[Path, WritableFile]:
        # The name is unique over hosts and forks. The name is short, because a name may have at
        # most 255 bytes, and a segment of the key may already use them all.
        temporary = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        for _ in range(_CREATE_TRIES_MAX):
            with suppress(FileNotFoundError):
                return temporary, self._files.create(temporary)
            # The folder never existed, or a delete in another process removed it with its last
            # object.
            self._make_folder(folder)
        raise StoreUnavailable(
            f"cannot put `{key}` in {self.url}: another process deletes its folder repeatedly",
            key=key,
        )

    def _make_folder(self, folder: Path) -> None:
        # A missing root is new, or was deleted with the whole store; the store then starts again.
        self._is_root_path_synced = self._is_root_path_synced and folder != self._root
        with suppress(FileExistsError):
            try:
                self._files.make_folder(folder)
            except FileNotFoundError:
                parent_existed = folder.parent.is_dir()
                self._make_folder(folder.parent)
                with _parent_may_vanish(folder, parent_existed=parent_existed):
                    self._files.make_folder(folder)

    def _link(self, temporary: Path, final: Path, key: str) -> None:
        try:
            self._files.link(temporary, final)
        except FileExistsError as error:
            raise KeyExists(
                f"cannot create `{key}` in {self.url}: the key exists, nothing was changed",
                key=key,
            ) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise NotExclusive(
                f"cannot create `{key}` in {self.url}: this file system has no hard links "
                f"({error.strerror}), so two processes could both succeed",
                key=key,
                hint=f"findmnt --target {self._root}",
            ) from error

    def _sync_folders(self, folder: Path, key: str) -> None:
        # Sync every folder up to the root, not only folders that this call made. Another process
        # may have made a folder without a sync yet, and an object is only as durable as its path.
        for parent in (folder, *folder.parents):
            if parent == self._root.parent:
                break
            # A missing folder means that a later delete removed the folder with the object.
            with suppress(FileNotFoundError):
                self._sync(lambda path=parent: self._files.sync_folder(path), key)  # type: ignore[misc]
        self._sync_root_path(key)

    def _sync_root_path(self, key: str) -> None:
        # No store deletes its root, so one sync of the path to the root is enough.
        if self._is_root_path_synced:
            return
        for parent in self._root.parents:
            self._sync(lambda path=parent: self._sync_if_allowed(path), key)  # type: ignore[misc]
        self._is_root_path_synced = True

    def _sync_if_allowed(self, folder: Path) -> None:
        # A folder without permission to open it existed before this run.
        with suppress(PermissionError):
            self._files.sync_folder(folder)

    def _sync(self, sync: Callable[[], None], key: str) -> None:
        """Run a sync whose failure is final.

        After a failed fsync the kernel may mark the lost pages as clean. The next fsync then
        succeeds although the data is lost. Therefore the error is never ``StoreUnavailable``, which
        is retried. After a link, a retry would find the key taken by this process and trust it.
        """
        try:
            sync()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            kind = StoreFull if kind_of(error) is StoreFull else StoreError
            raise kind(
                f"cannot make `{key}` durable in {self.url}: {error.strerror or error}; older "
                "objects are untouched",
                key=key,
                hint=f"df -h {shell_quote(self._root)}" if kind is StoreFull else "dmesg | tail",
            ) from error

    def _remove_emptied(self, folder: Path) -> None:
        # No sync is needed, because an empty folder that reappears is no object. The loop ends at a
        # folder that has entries or that another process removed.
        with suppress(OSError):
            while folder != self._root:
                self._files.remove_folder(folder)
                folder = folder.parent

    @contextmanager
    def _errors(self, verb: str, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if reading and error.errno in _NO_OBJECT:
                raise KeyNotFound(f"cannot {verb} `{key}`: not in {self.url}", key=key) from error
            kind = kind_of(error)
            raise kind(
                f"cannot {verb} `{key}` in {self.url}: {error.strerror or error}",
                key=key,
                hint=f"{'df -h' if kind is StoreFull else 'ls -ld'} {shell_quote(self._root)}",
            ) from error


@contextmanager
def _parent_may_vanish(folder: Path, *, parent_existed: bool) -> Iterator[None]:
    """Continue if the parent folder was just removed; the caller then tries again.

    Raises:
        StoreDenied: The parent existed before and still exists, so it accepts no folders.
    """
    try:
        yield
    except FileNotFoundError as error:
        if parent_existed and folder.parent.is_dir():
            raise StoreDenied(
                f"cannot write below `{folder.parent}`: it does not accept the folder `{folder}`",
                hint="nothing was changed; give another folder, on a file system for files",
            ) from error


def _discard(files: FileSystem, temporary: Path) -> None:
    # A file that cannot be deleted is invisible, and is deleted later.
    with suppress(OSError):
        files.unlink(temporary)


def _walk(files: FileSystem, folder: Path, parent_key: str, prefix: str) -> Iterator[ObjectInfo]:
    for item in files.items(folder):
        key = parent_key + item.name
        if not is_key(key):
            continue
        if not item.is_folder:
            if key.startswith(prefix):
                yield ObjectInfo(key, item.size_bytes)
        elif f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
            yield from _walk(files, folder / item.name, f"{key}/", prefix)


def _write_all(handle: WritableFile, view: memoryview) -> None:
    while view.nbytes:
        written_bytes = handle.write(view)
        if written_bytes <= 0:
            raise OSError(errno.EIO, "the file accepts no more bytes, without a reason")
        view = view[written_bytes:]
