"""Read-only access to folders that other tools wrote, on a local disk or through fsspec.

A :class:`~resilient.storage.store.Store` accepts only names in the form of this library's own
files. A checkpoint of another tool has other files, such as ``.metadata``, and names chosen by its
users. Only names in the listing of the folder can be read. A name that is found inside a file
therefore cannot lead outside the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from resilient.errors import ConfigError, KeyNotFound, ResilientError, StoreDenied, StoreError
from resilient.redaction import shell_quote
from resilient.storage.errors import errors_of, is_missing, kind_of, kind_of_foreign
from resilient.storage.open import local_path
from resilient.storage.options import for_cloud, for_s3fs, read_s3_options
from resilient.storage.urls import (
    fit_to_show,
    protocol_of,
    redacted,
    redacted_text,
    require_plain_host,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BROKEN_LINK_ERRORS = (errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)
LINK = "a link that leads out"
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
FILES_MAX = 200_000
"""Maximum number of files of a folder; a checkpoint of 10,000 ranks has about as many."""
DEPTH_MAX = 16
"""Maximum depth of nested folders."""


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """Contents of a folder.

    Attributes:
        sizes: Bytes of each file, by its name relative to the folder, with ``/`` between parts.
        outside: Unread entries: symbolic links that lead out of the folder, and special files.
        kinds: Kind of each unread entry.
        changed: Last write time of each file, in seconds since 1970, if known.
        is_whole: Whether the listing is complete.
        is_file: Whether the URL names a single file, which is the only entry.
    """

    sizes: Mapping[str, int]
    outside: tuple[str, ...] = ()
    is_whole: bool = True
    is_file: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, float] = field(default_factory=dict)

    def is_there(self, name: str) -> bool:
        """Return whether an entry with this name exists, of any kind."""
        return name in self.sizes or name in self.outside

    def why_unread(self, name: str) -> str:
        """Return the reason why a name that is not a listed file cannot be read."""
        if leads_out(name):
            return "it is outside of the folder, and was not read"
        if name not in self.outside:
            return "it is missing"
        return f"it is {self.kinds.get(name, LINK)}, and was not opened"


def leads_out(path: str) -> bool:
    """Return whether a name found in a file leads out of the folder, on any system."""
    parts = path.replace("\\", "/").split("/")
    return path.startswith(("/", "\\", "~")) or ".." in parts or ":" in parts[0]


class Folder(Protocol):
    """A folder, or a single file presented as a folder with only this file."""

    url: str

    def list(self) -> DirectoryListing:
        """Return the current contents.

        Raises:
            KeyNotFound: The file does not exist.
            StoreError: The folder could not be listed.
        """

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a listed file from ``start``; fewer only at its end.

        Raises:
            KeyNotFound: There is no such file.
            StoreError: The file could not be read.
        """


def open_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Open the folder, or the single file, at a path or URL; nothing is ever written.

    Args:
        url: A path, or any URL that fsspec knows.
        storage_options: Options as for :func:`resilient.storage.open.open_store`.

    Raises:
        ConfigError: The URL is empty or malformed, or its package is not installed.
        StoreError: The server refused or did not answer; not every protocol connects at once.
    """
    if not url.strip():
        raise ConfigError("cannot open a folder: its path or URL is empty")
    if protocol_of(url) == "file":
        return LocalFolder(local_path(url))
    require_plain_host(url)

    return FsspecFolder(url, storage_options or {})


def open_inside(root: Path, path: Path, bytes_max: int | None = None) -> BinaryIO:
    """Open a plain file of a folder that the user named, to read its bytes.

    Links inside the folder are followed. A link that leads out, a pipe, a socket and a device are
    rejected and never read. A read of ``/dev/zero`` or of a pipe without a writer would never end.

    Args:
        root: The folder.
        path: The file, below ``root``.
        bytes_max: Largest size that is accepted; None accepts any.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The file cannot be opened.
        StoreDenied: The path is not a regular file inside the folder, or the file is too large.
    """
    real = os.path.realpath(path)
    refusal_reason = "" if _is_inside(Path(os.path.realpath(root)), real) else LINK
    refusal_reason = refusal_reason or _why_unread(os.stat(real), bytes_max)  # noqa: PTH116 - as below
    if refusal_reason:
        raise _refusal(root, path, refusal_reason, real)
    # O_NONBLOCK: the open of a pipe that took the file's place would wait for a writer.
    handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    refusal_reason = _why_unread(os.fstat(handle), bytes_max)
    if refusal_reason:
        os.close(handle)
        raise _refusal(root, path, refusal_reason, real)
    return os.fdopen(handle, "rb")


def _why_unread(status: os.stat_result, bytes_max: int | None) -> str:
    """Return why a file is not read; empty for a plain file of an accepted size."""
    if not stat.S_ISREG(status.st_mode):
        return next((label for is_it, label in _KINDS if is_it(status.st_mode)), "not a plain file")
    if bytes_max is not None and status.st_size > bytes_max:
        return f"larger than {bytes_max >> 30} GiB"
    return ""


def _refusal(root: Path, path: Path, reason: str, real: str) -> StoreDenied:
    name = os.path.relpath(path, root)
    hint = f"ls -lL {shell_quote(path)}"
    if reason == LINK:
        hint = f"if you trust it, name the folder itself: {shell_quote(os.path.dirname(real))}"  # noqa: PTH120
    return StoreDenied(
        f"`{name[:200]}` in {root} is {reason}, and was not read", key=name, hint=hint
    )


class LocalFolder:
    """A folder of this machine's file systems.

    Symbolic links to files inside the folder are followed. Links to the outside, links to folders,
    pipes and devices are reported and never opened.
    """

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._path = path
        self._single = path.is_file()
        self._root = path.parent if self._single else path
        self._real = Path(os.path.realpath(self._root))

    def list(self) -> DirectoryListing:
        """Return the current contents."""
        sizes: dict[str, int] = {}
        outside: dict[str, str] = {}
        change_seconds: dict[str, float] = {}
        entries = iter([self._path.name]) if self._single else _names_below(self._root)
        try:
            for name in entries:
                if len(sizes) >= FILES_MAX:
                    return DirectoryListing(
                        sizes, tuple(outside), is_whole=False, kinds=outside, changed=change_seconds
                    )
                status = self._stat(name)
                if status is None:
                    outside[name] = self._kind(name)
                else:
                    sizes[name], change_seconds[name] = status.st_size, status.st_mtime
        except FileNotFoundError as error:
            raise KeyNotFound(f"nothing is at {self.url}", key=self.url) from error
        except OSError as error:
            raise self._error("", error) from error
        return DirectoryListing(
            sizes, tuple(outside), is_file=self._single, kinds=outside, changed=change_seconds
        )

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a listed file from ``start``; fewer only at its end."""
        try:
            if self._stat(name) is None:
                raise KeyNotFound(f"`{name}` is not a file inside {self.url}", key=name)
            # O_NONBLOCK: a pipe that takes the file's place meanwhile must not block this process.
            handle = os.open(self._root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return _read_all(handle, start, length)
            finally:
                os.close(handle)
        except (FileNotFoundError, ValueError) as error:
            raise KeyNotFound(f"no `{name[:200]}` in {self.url}", key=name) from error
        except OSError as error:
            raise self._error(name, error) from error

    def _stat(self, name: str) -> os.stat_result | None:
        """Return the status of a plain file inside the root, None for anything else."""
        path = self._root / name
        if not self._single and not _is_inside(self._real, os.path.realpath(path)):
            return None
        try:
            status = path.stat()
        except OSError as error:
            if error.errno in _BROKEN_LINK_ERRORS:
                return None
            raise
        return status if stat.S_ISREG(status.st_mode) else None

    def _kind(self, name: str) -> str:
        """Return the kind of an entry that is not a plain file inside the root; follow no links."""
        try:
            mode = (self._root / name).lstat().st_mode
        except OSError:
            return LINK
        return next((label for is_it, label in _KINDS if is_it(mode)), LINK)

    def _error(self, name: str, error: OSError) -> StoreError:
        location = f"`{name[:200]}` in {self.url}" if name else self.url
        return kind_of(error)(f"cannot read {location}: {error.strerror}", key=name)


def _is_inside(root: Path, path: str) -> bool:
    return path.startswith(str(root).rstrip("/") + "/")


def _read_all(handle: int, start: int, length: int) -> bytes:
    pieces = []
    while length > 0 and (piece := os.pread(handle, length, start)):
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return b"".join(pieces)


def _names_below(root: Path) -> Iterator[str]:
    """Yield the names below a folder, except folders; links to folders are included."""
    pending_folders = [("", 0)]
    while pending_folders:
        prefix, depth = pending_folders.pop()
        try:
            with os.scandir(root / prefix) as entries:
                sorted_entries = sorted(entries, key=lambda item: item.name)
        except FileNotFoundError:
            if not prefix:
                raise
            continue  # the folder was deleted meanwhile, for example by retention
        for entry in sorted_entries:
            name = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif depth < DEPTH_MAX:
                pending_folders.append((f"{name}/", depth + 1))


_WHOLE_BYTES_MAX = 64 << 20
"""Maximum size of a file that is kept in memory because its server sends no ranges."""
_CHANGED = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
"""Name of the last write time in s3fs, adlfs, the local filesystem, gcsfs, sftp and memory."""
_ONE_FILE_ONLY = ("http", "https")


class FsspecFolder:
    """A prefix, or a single object, of a service that fsspec knows.

    ``http`` supports only single files, because a web server's page of links is not a reliable
    listing.

    Raises:
        ConfigError: The URL is malformed, or its package is not installed.
        StoreError: The server refused or did not answer; not every protocol connects at once.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        # Commands on a local folder import this module, and do not need fsspec.
        from resilient.storage.fsspec_connect import connect

        self.url = redacted(url)
        protocol = protocol_of(url)
        self._protocol, self._caught = protocol, errors_of(protocol)
        self._filesystem, root = connect(url, protocol, _options_for(protocol, storage_options))
        self._root = root.rstrip("/")
        self._paths: dict[str, str] = {}
        self._sizes: Mapping[str, int] = {}
        self._full_contents: dict[str, bytes | None] = {}

    def list(self) -> DirectoryListing:
        """Return the current contents."""
        with self._errors(""):
            if self._protocol in _ONE_FILE_ONLY:
                infos = {self._root: self._filesystem.info(self._root)}
            else:
                infos = self._filesystem.find(self._root, detail=True)
        if not infos:
            raise KeyNotFound(f"nothing is at {self.url}", key=self.url)
        files = [(path, info) for path, info in sorted(infos.items()) if info["type"] == "file"]
        if any(info.get("size") is None for _, info in files):
            raise ConfigError(
                f"cannot read {self.url}: its server does not report the size of a file",
                hint=f"curl -LO {shell_quote(self.url)}",
            )
        self._paths = {self._name(path): path for path, _ in files[:FILES_MAX]}
        sizes = {self._name(path): int(info["size"]) for path, info in files[:FILES_MAX]}
        self._sizes = sizes
        is_file = [path.rstrip("/") for path, _ in files] == [self._root]
        changes = {self._name(path): _changed(info) for path, info in files[:FILES_MAX]}
        change_seconds = {name: seconds for name, seconds in changes.items() if seconds is not None}
        is_whole = len(files) <= FILES_MAX
        return DirectoryListing(sizes, is_whole=is_whole, is_file=is_file, changed=change_seconds)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a listed file from ``start``; fewer only at its end."""
        if name not in self._paths:
            raise KeyNotFound(f"no `{name[:200]}` in {self.url}", key=name)
        if length <= 0:
            return b""
        with self._errors(name):
            path = self._paths[name]
            if self._protocol in _ONE_FILE_ONLY:
                full_content = self._full_content(name, path)
                if full_content is not None:
                    return full_content[start : start + length]
            return bytes(self._filesystem.cat_file(path, start=start, end=start + length))

    def _full_content(self, name: str, path: str) -> bytes | None:
        """Return the whole file if its web server sends no ranges; None if the server does.

        Raises:
            ConfigError: The file is too large to keep in memory.
        """
        from resilient.storage.fsspec_connect import supports_ranges

        if name not in self._full_contents:
            if supports_ranges(self._filesystem, path):
                self._full_contents[name] = None
            elif self._sizes[name] > _WHOLE_BYTES_MAX:
                raise ConfigError(
                    f"cannot read {self.url}: its server sends no byte ranges, and this file has "
                    f"{self._sizes[name]} bytes; copy it first",
                    hint=f"curl -LO {shell_quote(self.url)}",
                )
            else:
                self._full_contents[name] = bytes(self._filesystem.cat_file(path))
        return self._full_contents[name]

    def _name(self, path: str) -> str:
        if path.rstrip("/") == self._root:
            return self._root.rpartition("/")[2]
        return path.removeprefix(self._root).lstrip("/")

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except ResilientError:
            # A ConfigError is also a ValueError, which file systems raise as their own error.
            raise
        except self._caught as error:
            location = f"`{name[:200]}` in {self.url}" if name else self.url
            if is_missing(error):
                raise KeyNotFound(f"nothing is at {location}", key=name) from error
            cause = (error.__cause__ or error) if isinstance(error, FileNotFoundError) else error
            raise kind_of_foreign(error)(
                f"cannot read {location}: {type(cause).__name__}: {redacted_text(str(cause))}",
                key=name,
                hint=f"curl -IL {shell_quote(self.url)}"
                if self._protocol in _ONE_FILE_ONLY
                else "",
            ) from fit_to_show(error)


def _changed(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, if its file system reports it."""
    for name in _CHANGED:
        match info.get(name):
            case datetime() as at:
                return at.timestamp() if at.tzinfo else at.replace(tzinfo=UTC).timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str(text):
                with suppress(ValueError):
                    return datetime.fromisoformat(text).timestamp()
    return None


def _options_for(protocol: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if protocol in ("s3", "s3a"):
        return for_s3fs(read_s3_options(options))
    return for_cloud(protocol, options)
