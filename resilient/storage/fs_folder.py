"""Folders at any URL of fsspec, read only, with requests for ranges."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError, KeyNotFound, ResilientError
from resilient.showing import quoted
from resilient.storage.cloud_options import for_cloud
from resilient.storage.folder import FILES_MAX, Listing
from resilient.storage.fs_connect import connect, knows_ranges
from resilient.storage.fs_errors import errors_of, is_missing, kind_of_foreign
from resilient.storage.s3_options import for_s3fs, read_s3_options
from resilient.storage.urls import fit_to_show, protocol_of, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WHOLE_BYTES_MAX = 64 << 20
"""What is held of a file whose server sends no parts of it."""
_CHANGED = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
"""What s3fs, adlfs, the local one, gcsfs, sftp and memory call the moment of the last write."""
_ONE_FILE_ONLY = ("http", "https")


class FsspecFolder:
    """A prefix, or one object, of a service that fsspec knows.

    Over ``http`` only single files: a web server's page of links is no listing.

    Raises:
        ConfigError: the URL is malformed, or the package for it is not installed.
        StoreError: a server that is asked at once refused, or did not answer.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = redacted(url)
        protocol = protocol_of(url)
        self._protocol, self._caught = protocol, errors_of(protocol)
        self._filesystem, root = connect(url, protocol, _given(protocol, storage_options))
        self._root = root.rstrip("/")
        self._paths: dict[str, str] = {}
        self._sizes: Mapping[str, int] = {}
        self._wholes: dict[str, bytes | None] = {}

    def list(self) -> Listing:
        """Return what is there now."""
        with self._errors(""):
            if self._protocol in _ONE_FILE_ONLY:
                found = {self._root: self._filesystem.info(self._root)}
            else:
                found = self._filesystem.find(self._root, detail=True)
        if not found:
            raise KeyNotFound(f"nothing is at {self.url}", key=self.url)
        files = [(path, info) for path, info in sorted(found.items()) if info["type"] == "file"]
        if any(info.get("size") is None for _, info in files):
            raise ConfigError(
                f"cannot read {self.url}: its server does not tell the size of a file",
                hint=f"curl -LO {quoted(self.url)}",
            )
        self._paths = {self._name(path): path for path, _ in files[:FILES_MAX]}
        sizes = {self._name(path): int(info["size"]) for path, info in files[:FILES_MAX]}
        self._sizes = sizes
        is_file = [path.rstrip("/") for path, _ in files] == [self._root]
        told = {self._name(path): _changed(info) for path, info in files[:FILES_MAX]}
        changed = {name: seconds for name, seconds in told.items() if seconds is not None}
        is_whole = len(files) <= FILES_MAX
        return Listing(sizes, is_whole=is_whole, is_file=is_file, changed=changed)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a listed file from ``start``; fewer only at its end."""
        if name not in self._paths:
            raise KeyNotFound(f"no `{name[:200]}` in {self.url}", key=name)
        if length <= 0:
            return b""
        with self._errors(name):
            path = self._paths[name]
            if self._protocol in _ONE_FILE_ONLY:
                whole = self._whole(name, path)
                if whole is not None:
                    return whole[start : start + length]
            return bytes(self._filesystem.cat_file(path, start=start, end=start + length))

    def _whole(self, name: str, path: str) -> bytes | None:
        """Return a file of a web server that sends no parts of it; None of one that does.

        Raises:
            ConfigError: it is too large to be held.
        """
        if name not in self._wholes:
            if knows_ranges(self._filesystem, path):
                self._wholes[name] = None
            elif self._sizes[name] > _WHOLE_BYTES_MAX:
                raise ConfigError(
                    f"cannot read {self.url}: its server sends no parts of a file, and this one "
                    f"has {self._sizes[name]} bytes; copy it first",
                    hint=f"curl -LO {quoted(self.url)}",
                )
            else:
                self._wholes[name] = bytes(self._filesystem.cat_file(path))
        return self._wholes[name]

    def _name(self, path: str) -> str:
        if path.rstrip("/") == self._root:
            return self._root.rpartition("/")[2]
        return path.removeprefix(self._root).lstrip("/")

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except ResilientError:
            # A ConfigError is a ValueError too, and file systems raise that of their own.
            raise
        except self._caught as error:
            where = f"`{name[:200]}` in {self.url}" if name else self.url
            if is_missing(error):
                raise KeyNotFound(f"nothing is at {where}", key=name) from error
            told = (error.__cause__ or error) if isinstance(error, FileNotFoundError) else error
            raise kind_of_foreign(error)(
                f"cannot read {where}: {type(told).__name__}: {redacted_text(str(told))}",
                key=name,
                hint=f"curl -IL {quoted(self.url)}" if self._protocol in _ONE_FILE_ONLY else "",
            ) from fit_to_show(error)


def _changed(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, as far as its file system says it and in its own words."""
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


def _given(protocol: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if protocol in ("s3", "s3a"):
        return for_s3fs(read_s3_options(options))
    return for_cloud(protocol, options)
