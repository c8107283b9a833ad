"""Any URL of fsspec as a Store."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from resilient.errors import KeyExists, KeyNotFound, NotExclusive
from resilient.showing import quoted
from resilient.storage.buffers import byte_view, check_range
from resilient.storage.fs_connect import IN_PARTS, connect
from resilient.storage.fs_errors import (
    TRUST_HINT,
    errors_of,
    is_missing,
    is_untrusted,
    kind_of_foreign,
    status_of,
)
from resilient.storage.fs_exclusive import MEMORY_LOCK, create_for
from resilient.storage.parts import Parts, Pieces, read_in_parts
from resilient.storage.store import Entry, check_key, is_key
from resilient.storage.uploads import abort_through_s3fs
from resilient.storage.urls import fit_to_show, protocol_of, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from resilient.clock import Clock
    from resilient.storage.store import Data

_RANGE_NOT_SATISFIABLE = 416
_NOT_IMPLEMENTED = 501
# Real folders, which have to be made; on an object store the same call could make a bucket.
_WITH_FOLDERS = frozenset(
    {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp", "arrow_hdfs"}
)


class FsspecStore:
    """Objects under any URL that fsspec knows.

    Atomic and durable as far as the service behind it is: each object is written by one call,
    so that no error of ours can commit half of it. ``exclusive`` only where the library was
    read and proven; see ``fs_exclusive``.

    Args:
        url: where; chained URLs (``simplecache::s3://``) are refused, for a cache lies.
        parts: how large objects travel, where the library lets us say it (S3).
        storage_options: passed on to fsspec; what is given wins over our defaults.

    Raises:
        ConfigError: fsspec does not know the protocol, or its package is not installed.
        StoreError: a server that is asked at once refused, or did not answer.
    """

    def __init__(self, url: str, parts: Parts | None = None, **storage_options: Any) -> None:
        self.url = redacted(url)
        protocol = protocol_of(url)
        self._parts = (parts or Parts()) if protocol in IN_PARTS else None
        self._url, self._given = url, storage_options
        self._filesystem, root = connect(url, protocol, storage_options)
        self._root = root.rstrip("/")
        self._caught = errors_of(protocol)
        self._create = create_for(protocol, self._filesystem)
        self.exclusive = self._create is not None
        self._with_folders = protocol in _WITH_FOLDERS
        self._guard: AbstractContextManager[object] = (
            MEMORY_LOCK if protocol == "memory" else nullcontext()
        )

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key``, replacing what was there.

        Crash: as the service promises; on an object store the old object or the new one.
        """
        path, view = self._path(key), byte_view(data, key)
        with self._errors("put", key), self._guard:
            self._make_folder(path)
            if self._parts is None or len(view) <= self._parts.part_bytes:
                self._filesystem.pipe_file(path, _bytes(data, key))
            else:
                self._put_in_parts(path, view, self._parts)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        Crash: no object or all of it.
        """
        path, content = self._path(key), _bytes(data, key)
        if self._create is None:
            raise self._not_exclusive(key)
        with self._errors("create", key):
            try:
                self._create(self._filesystem, path, content)
            except FileExistsError as error:
                raise KeyExists(
                    f"cannot create `{key}` in {self.url}: the key is taken, nothing was changed",
                    key=key,
                ) from error
            except self._caught as error:
                if status_of(error) == _NOT_IMPLEMENTED:
                    raise self._not_exclusive(key) from error
                raise

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        path = self._path(key)
        with self._errors("get", key, reading=True):
            if self._parts is None:
                return bytes(self._filesystem.cat_file(path))
            return self._get_in_parts(path, self._parts)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end."""
        path = self._path(key)
        check_range(key, start, length)
        if length == 0:
            # HTTP cannot ask for nothing, but a missing object is still missing.
            self.stat(key)
            return b""
        with self._errors("get", key, reading=True):
            try:
                data = bytes(self._filesystem.cat_file(path, start=start, end=start + length))
                # A web server may send the whole for a part, and fsspec takes it for the part.
                return data if len(data) <= length else data[start : start + length]
            except self._caught as error:
                if status_of(error) == _RANGE_NOT_SATISFIABLE:
                    return b""
                raise

    def list(self, prefix: str = "") -> Iterable[Entry]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return []
        start = f"{self._root}/{folder}" if folder else self._root
        with self._errors("list", prefix):
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.find(start, detail=True)
            except self._caught as error:
                if is_missing(error):
                    return []
                raise
        # Asked below an object, adlfs names that object in a list; nothing is below it.
        return sorted(self._entries(found, prefix)) if isinstance(found, dict) else []

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""
        path = self._path(key)
        with self._errors("delete", key):
            try:
                self._filesystem.rm_file(path)
            except self._caught as error:
                if not is_missing(error):
                    raise

    def stat(self, key: str) -> Entry:
        """Return the object's entry."""
        path = self._path(key)
        with self._errors("stat", key, reading=True):
            self._filesystem.invalidate_cache()
            found = self._filesystem.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            return Entry(key, int(found["size"]))

    def sweep(
        self, is_ours: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Abort unfinished uploads on S3; see :mod:`resilient.storage.uploads`."""
        if self._parts is None:
            return ()
        return abort_through_s3fs(self._url, self._given, is_ours, older_than_seconds, clock)

    def _put_in_parts(self, path: str, view: memoryview, parts: Parts) -> None:
        # The library sends one PUT below twice the part size, and that one takes bytes alone.
        part_bytes = parts.bytes_for(len(view))
        data = bytes(view) if len(view) < 2 * part_bytes else Pieces(view)
        self._filesystem.pipe_file(
            path, data, chunksize=part_bytes, max_concurrency=parts.in_flight
        )

    def _get_in_parts(self, path: str, parts: Parts) -> bytes:
        """Return an object whole; a large one in several ranges at once.

        Its size is asked for first. An object that is replaced meanwhile could come out mixed,
        and the keys that are written twice are small; what is large has a digest and a name of
        its own.
        """
        self._filesystem.invalidate_cache()
        info = self._filesystem.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        size_bytes = int(info["size"])
        if size_bytes <= parts.part_bytes:
            return bytes(self._filesystem.cat_file(path))
        return read_in_parts(
            lambda start, length: self._filesystem.cat_file(path, start=start, end=start + length),
            size_bytes,
            parts,
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _not_exclusive(self, key: str) -> NotExclusive:
        return NotExclusive(
            f"cannot create `{key}` in {self.url}: no exclusive create is known there, so two "
            "processes could both believe they were first; a local path, s3://, gs:// and az:// "
            "have one",
            key=key,
            hint="pip install --upgrade s3fs" if self.url.startswith("s3") else "",
        )

    def _make_folder(self, path: str) -> None:
        if self._with_folders:
            self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _entries(self, found: Mapping[str, Mapping[str, Any]], prefix: str) -> Iterator[Entry]:
        for path, info in found.items():
            key = path.removeprefix(f"{self._root}/")
            if key == path or info.get("type") != "file" or info.get("islink"):
                continue
            if key.startswith(prefix) and is_key(key):
                yield Entry(key, int(info["size"]))

    @contextmanager
    def _errors(self, verb: str, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except self._caught as error:
            if reading and is_missing(error):
                raise KeyNotFound(f"cannot {verb} `{key}`: not in {self.url}", key=key) from error
            kind, text = kind_of_foreign(error), redacted_text(str(error))
            hint = TRUST_HINT if is_untrusted(text) else f"resilient ckpt ls {quoted(self.url)}"
            raise kind(
                f"cannot {verb} `{key}` in {self.url}: {type(error).__name__}: {text}",
                key=key,
                hint=hint,
            ) from fit_to_show(error)


def _bytes(data: Data, key: str) -> bytes:
    # S3's client takes no memoryview; one copy is the price.
    return data if isinstance(data, bytes) else bytes(byte_view(data, key))
