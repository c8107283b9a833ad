"""Store for any URL that fsspec knows, and exclusive creates through fsspec filesystems.

An exclusive create is a write that fails if the key already exists. A protocol supports exclusive
creates only if its library sends this condition to the service with the write. The service must
evaluate the condition and write in one atomic operation. We have checked the code of each such
library. The generic ``mode="create"`` of fsspec checks and then writes. This sequence is not
atomic, so it does not guarantee an exclusive create.
"""

from __future__ import annotations

import errno
import inspect
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from resilient.errors import KeyExists, KeyNotFound, NotExclusive
from resilient.redaction import shell_quote
from resilient.storage.errors import (
    TRUST_HINT,
    errors_of,
    is_missing,
    is_untrusted,
    kind_of_foreign,
    status_of,
)
from resilient.storage.fsspec_connect import MULTIPART_PROTOCOLS, connect
from resilient.storage.s3_multipart import abort_through_s3fs
from resilient.storage.store import ObjectInfo, check_key, is_key
from resilient.storage.transfer import (
    MultipartConfig,
    SlicedReader,
    as_byte_view,
    check_range,
    read_in_parts,
)
from resilient.storage.urls import fit_to_show, protocol_of, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from resilient.clock import Clock
    from resilient.storage.store import Data

Create = Callable[[Any, str, bytes], None]
"""Writes an object, or raises ``FileExistsError`` without a change."""

MEMORY_LOCK = threading.RLock()
"""Lock of all writers to ``memory://``, which is one dict per process and has no lock."""

_WRITER = "resilient-writer"
_GCS = frozenset({"gs", "gcs"})
_AZURE = frozenset({"az", "abfs", "abfss"})
_PUT_OBJECT_MAX_BYTES = 5 << 30
_CONFLICT = (409, 412)
_BOTOCORE_WITH_CONDITION = (1, 35, 20)


def create_for(protocol: str, filesystem: Any) -> Create | None:
    """Return the exclusive create of ``filesystem``, or None if it has none."""
    if protocol == "memory":
        return _create_in_memory
    if protocol in ("s3", "s3a") and _s3_supports_conditions(filesystem):
        return _create_on_s3
    if protocol in _GCS and _supports_mode(filesystem):
        return _create_on_gcs
    if protocol in _AZURE and "overwrite" in _parameters(filesystem):
        return _create_on_azure
    return None


def _create_in_memory(filesystem: Any, path: str, data: bytes) -> None:
    # The filesystem's ``open(path, "xb")`` checks and then writes, so two threads can both pass the
    # check.
    with MEMORY_LOCK:
        if filesystem.isfile(path):
            raise FileExistsError(errno.EEXIST, "the key exists", path)
        try:
            filesystem.pipe_file(path, data)
        except FileExistsError as error:
            # Not this key: an object has the name of a folder on the path.
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(error)) from error


def _create_on_s3(filesystem: Any, path: str, data: bytes) -> None:
    """Put with ``If-None-Match: *``, and recognize our own object.

    botocore and aiohttp resend a PUT if the connection breaks. The second PUT then fails with 412
    because of the first PUT, although this call created the object. Each call therefore marks its
    object with a token, and compares the token if the key is taken.

    A multipart upload is never used: several servers ignore the condition when completing one.
    """
    if len(data) >= _PUT_OBJECT_MAX_BYTES:
        raise OSError(errno.EFBIG, "an exclusive create on S3 is one PUT of less than 5 GiB", path)
    token = secrets.token_hex(16)
    try:
        filesystem.pipe_file(
            path,
            data,
            mode="create",
            chunksize=_PUT_OBJECT_MAX_BYTES,
            Metadata={_WRITER: token},
        )
    except OSError as error:
        if not isinstance(error, FileExistsError) and status_of(error) not in _CONFLICT:
            raise
        if _writer(filesystem, path) != token:
            raise FileExistsError(errno.EEXIST, "the key exists", path) from error


def _create_on_gcs(filesystem: Any, path: str, data: bytes) -> None:
    """Put with ``ifGenerationMatch=0``: only if the object has no live generation.

    gcsfs always tries six times, so a token identifies our own object here too. Its uploads in
    several requests carry the condition as well.
    """
    token = secrets.token_hex(16)
    try:
        filesystem.pipe_file(path, data, mode="create", metadata={_WRITER: token})
    except FileExistsError:
        filesystem.invalidate_cache()
        metadata = filesystem.info(path).get("metadata") or {}
        if metadata.get(_WRITER) != token:
            raise


def _create_on_azure(filesystem: Any, path: str, data: bytes) -> None:
    """Put a blob with ``If-None-Match: *``, which ``overwrite=False`` sends.

    The library sends only one request. A request without a response then raises its own error, so
    the error does not look like a key of another writer.
    """
    filesystem.pipe_file(path, data, overwrite=False, retry_total=0)


def _writer(filesystem: Any, path: str) -> str:
    try:
        metadata: dict[str, str] = filesystem.metadata(path, refresh=True)
    except FileNotFoundError as error:
        # 409: two requests conflicted, and perhaps neither succeeded. A retry shows the result.
        raise OSError(errno.EAGAIN, "a conflict left no object behind", path) from error
    return {name.lower(): value for name, value in metadata.items()}.get(_WRITER, "")


def _s3_supports_conditions(filesystem: Any) -> bool:
    # Older versions silently drop the unknown argument and overwrite.
    try:
        botocore = tuple(int(part) for part in version("botocore").split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return False
    return botocore >= _BOTOCORE_WITH_CONDITION and _supports_mode(filesystem)


def _supports_mode(filesystem: Any) -> bool:
    return "mode" in _parameters(filesystem)


def _parameters(filesystem: Any) -> frozenset[str]:
    return frozenset(inspect.signature(filesystem._pipe_file).parameters)  # noqa: SLF001 - its API


_RANGE_NOT_SATISFIABLE = 416
_NOT_IMPLEMENTED = 501
# Protocols with real folders, which must be created. On an object store the same call could create
# a bucket.
_WITH_FOLDERS = frozenset(
    {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp", "arrow_hdfs"}
)


class FsspecStore:
    """Objects under any URL that fsspec knows.

    The store is as atomic and durable as its service. Each object is written by one call, so an
    error in this library cannot commit half an object. ``exclusive`` is true only for libraries
    whose code was checked; see ``create_for``.

    Args:
        url: URL of the store. Chained URLs (``simplecache::s3://``) are rejected, because a cache
            can return stale data.
        parts: Part size and concurrency, if the library supports them (S3).
        storage_options: Options for fsspec, which override our defaults.

    Raises:
        ConfigError: fsspec does not know the protocol, or its package is not installed.
        StoreError: A server that is contacted at once refused or did not answer.
    """

    def __init__(
        self, url: str, parts: MultipartConfig | None = None, **storage_options: Any
    ) -> None:
        self.url = redacted(url)
        protocol = protocol_of(url)
        self._parts = (parts or MultipartConfig()) if protocol in MULTIPART_PROTOCOLS else None
        self._url, self._storage_options = url, storage_options
        self._filesystem, root = connect(url, protocol, storage_options)
        self._root = root.rstrip("/")
        self._caught = errors_of(protocol)
        self._create = create_for(protocol, self._filesystem)
        self.exclusive = self._create is not None
        self._with_folders = protocol in _WITH_FOLDERS
        self._write_lock: AbstractContextManager[object] = (
            MEMORY_LOCK if protocol == "memory" else nullcontext()
        )

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` and replace an existing object.

        Crash: as the service promises; on an object store the old object or the new one.
        """
        path, view = self._path(key), as_byte_view(data, key)
        with self._errors("put", key), self._write_lock:
            self._make_folder(path)
            if self._parts is None or len(view) <= self._parts.part_bytes:
                self._filesystem.pipe_file(path, _bytes(data, key))
            else:
                self._put_in_parts(path, view, self._parts)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        Crash: no object, or the whole object.
        """
        path, content = self._path(key), _bytes(data, key)
        if self._create is None:
            raise self._not_exclusive(key)
        with self._errors("create", key):
            try:
                self._create(self._filesystem, path, content)
            except FileExistsError as error:
                raise KeyExists(
                    f"cannot create `{key}` in {self.url}: the key exists, nothing was changed",
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
            # HTTP has no empty range, but a missing object must still raise.
            self.stat(key)
            return b""
        with self._errors("get", key, reading=True):
            try:
                data = bytes(self._filesystem.cat_file(path, start=start, end=start + length))
                # A web server may send the whole object for a range, and fsspec returns it as the
                # range.
                return data if len(data) <= length else data[start : start + length]
            except self._caught as error:
                if status_of(error) == _RANGE_NOT_SATISFIABLE:
                    return b""
                raise

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return []
        start = f"{self._root}/{folder}" if folder else self._root
        with self._errors("list", prefix):
            self._filesystem.invalidate_cache()
            try:
                infos = self._filesystem.find(start, detail=True)
            except self._caught as error:
                if is_missing(error):
                    return []
                raise
        # For a prefix below an object, adlfs returns a list with that object; nothing is below it.
        return sorted(self._entries(infos, prefix)) if isinstance(infos, dict) else []

    def delete(self, key: str) -> None:
        """Delete the object; a missing object is not an error."""
        path = self._path(key)
        with self._errors("delete", key):
            try:
                self._filesystem.rm_file(path)
            except self._caught as error:
                if not is_missing(error):
                    raise

    def stat(self, key: str) -> ObjectInfo:
        """Return the key and the size of the object."""
        path = self._path(key)
        with self._errors("stat", key, reading=True):
            self._filesystem.invalidate_cache()
            info = self._filesystem.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return ObjectInfo(key, int(info["size"]))

    def sweep(
        self, is_deletable: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Abort unfinished uploads on S3; see :mod:`resilient.storage.s3_multipart`."""
        if self._parts is None:
            return ()
        return abort_through_s3fs(
            self._url, self._storage_options, is_deletable, older_than_seconds, clock
        )

    def _put_in_parts(self, path: str, view: memoryview, parts: MultipartConfig) -> None:
        # The library sends one PUT below twice the part size, and this PUT accepts only bytes.
        part_bytes = parts.bytes_for(len(view))
        data = bytes(view) if len(view) < 2 * part_bytes else SlicedReader(view)
        self._filesystem.pipe_file(
            path, data, chunksize=part_bytes, max_concurrency=parts.in_flight
        )

    def _get_in_parts(self, path: str, parts: MultipartConfig) -> bytes:
        """Return the whole object; read a large object in several ranges at once.

        The size is requested first. An object that is replaced meanwhile could come out mixed. Keys
        that are written twice have small objects; large objects have their own digest and name.
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
            f"cannot create `{key}` in {self.url}: no exclusive create is known for this store, "
            "so two processes could both succeed; a local path, s3://, gs:// and az:// have one",
            key=key,
            hint="pip install --upgrade s3fs" if self.url.startswith("s3") else "",
        )

    def _make_folder(self, path: str) -> None:
        if self._with_folders:
            self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _entries(self, infos: Mapping[str, Mapping[str, Any]], prefix: str) -> Iterator[ObjectInfo]:
        for path, info in infos.items():
            key = path.removeprefix(f"{self._root}/")
            if key == path or info.get("type") != "file" or info.get("islink"):
                continue
            if key.startswith(prefix) and is_key(key):
                yield ObjectInfo(key, int(info["size"]))

    @contextmanager
    def _errors(self, verb: str, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except self._caught as error:
            if reading and is_missing(error):
                raise KeyNotFound(f"cannot {verb} `{key}`: not in {self.url}", key=key) from error
            kind, text = kind_of_foreign(error), redacted_text(str(error))
            hint = (
                TRUST_HINT if is_untrusted(text) else f"resilient ckpt ls {shell_quote(self.url)}"
            )
            raise kind(
                f"cannot {verb} `{key}` in {self.url}: {type(error).__name__}: {text}",
                key=key,
                hint=hint,
            ) from fit_to_show(error)


def _bytes(data: Data, key: str) -> bytes:
    # S3's client accepts no memoryview; this costs one copy.
    return data if isinstance(data, bytes) else bytes(as_byte_view(data, key))
