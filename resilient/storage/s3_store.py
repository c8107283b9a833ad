"""Store for S3 on the library obstore, with several parts at once and without asyncio.

If possible, large objects are transferred by :mod:`resilient.storage.s3_transfer` instead of
obstore, because this needs one copy less.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import S3Store

from resilient.clock import SystemClock
from resilient.errors import (
    ConfigError,
    KeyExists,
    KeyNotFound,
    NotExclusive,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from resilient.redaction import shell_quote
from resilient.storage import s3_multipart
from resilient.storage.errors import TRUST_HINT, is_untrusted, kind_of_answer
from resilient.storage.options import OBSTORE_PART_BYTES, for_obstore, for_s3fs
from resilient.storage.s3_client import S3Connection, connect_s3, known_credentials
from resilient.storage.s3_multipart import SignedMultipartUploads
from resilient.storage.s3_transfer import Redirected, S3Transfer
from resilient.storage.store import ObjectInfo, check_key, is_key
from resilient.storage.transfer import TransferLimiter, as_byte_view, check_range, read_in_parts
from resilient.storage.urls import fit_to_show, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from resilient.clock import Clock
    from resilient.storage.options import S3Options
    from resilient.storage.store import Data
    from resilient.storage.transfer import Arrived, ScatterBuffer

_CAUGHT = (exceptions.BaseError, OSError, ValueError)
_PUT_OBJECT_MAX_BYTES = 5 << 30
_PIECE_BYTES = 1 << 20
_LARGE_BYTES_MIN = 1 << 20
_NOT_FOUND, _CONDITION_FAILED, _NOT_SATISFIABLE, _NOT_IMPLEMENTED = 404, 412, 416, 501
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
# No response of the server: unreachable, cut or timed out; or cut in the middle of a body.
_UNANSWERED = re.compile(r"HTTP error: |error (?:decoding|reading) response body|error sending")
_REFUSED = re.compile(r"InvalidCertificate\(\s*(\w+)")
# Address from which a machine without own credentials requests its role.
_ROLE = re.compile(r"http://(?:169\.254\.\d+\.\d+|\[fd00:ec2::254\])[:/]")


class ObstoreStore:
    """Objects in a bucket of S3 or of a compatible server.

    Every put is atomic: one request, or a multipart upload that is invisible before its end. The
    library signs the SHA-256 of each body, which the server compares with the received bytes. The
    library's own retries are off: only RetryingStore retries.

    Args:
        url: ``s3://bucket/prefix``.
        options: Endpoint, credentials, deadlines and back-pressure.

    Raises:
        ConfigError: The URL has no bucket, or the library rejects an option.
    """

    exclusive = True

    def __init__(self, url: str, options: S3Options) -> None:
        self.url = redacted(url)
        self._options = options
        self._parts = self.ranges = replace(options.parts(OBSTORE_PART_BYTES), are_shared=True)
        self._limiter = TransferLimiter(self._parts.in_flight)
        parts = urlsplit(url)
        # Ignore a user in the URL: s3:// has no such form, so the user is no credential.
        bucket, prefix = parts.netloc.rpartition("@")[2], parts.path.strip("/")
        self._name, self._prefix = bucket, prefix
        self._transfers: S3Transfer | None = None
        if not bucket:
            raise ConfigError(f"cannot open {self.url}: it names no bucket", hint="s3://bucket/run")
        try:
            self._bucket = S3Store(bucket, prefix=prefix or None, **for_obstore(options))
        except _CAUGHT as error:
            raise ConfigError(
                f"cannot open {self.url}: {_first_line(error)}", hint="resilient ckpt ls --help"
            ) from fit_to_show(error)
        if wire := connect_s3(bucket, options, SystemClock()):
            self._transfers = S3Transfer(self.url, wire, prefix)

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` and replace an existing object.

        Crash: the old object or the new one; invisible parts may be left (``sweep``).
        """
        view = as_byte_view(data, check_key(key))
        part_bytes = self._parts.bytes_for(len(view))
        part_count = self._parts.count_for(len(view))
        with self._errors("put", key), self._limiter.take(part_count) as in_flight:
            if not self._put_directly(key, view, part_bytes, in_flight):
                obstore.put(
                    self._bucket,
                    key,
                    view,
                    use_multipart=len(view) > part_bytes,
                    chunk_size=part_bytes,
                    max_concurrency=in_flight,
                )

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        The put is one PUT with ``If-None-Match: *``, never a multipart upload. Several servers
        ignore the condition when completing an upload.

        Crash: no object, or the whole object.
        """
        view = as_byte_view(data, check_key(key))
        if len(view) >= _PUT_OBJECT_MAX_BYTES:
            raise StoreError(
                f"cannot create `{key}` in {self.url}: an exclusive create on S3 is one PUT of "
                "less than 5 GiB",
                key=key,
            )
        with self._errors("create", key):
            try:
                obstore.put(self._bucket, key, view, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError as error:
                self._require_existing(key)
                raise KeyExists(
                    f"cannot create `{key}` in {self.url}: the key exists, nothing was changed",
                    key=key,
                ) from error

    def get(self, key: str) -> bytes:
        """Return the whole object; read a large object in several ranges of one version."""
        with self._errors("get", check_key(key), reading=True):
            response = self._get_first_part(key)
            size_bytes, version = response.meta["size"], response.meta["e_tag"]
            first_bytes = response.bytes()
            if len(first_bytes) >= size_bytes:
                return first_bytes.to_bytes()
            read_part = partial(self._read_version, key, version)
            return read_in_parts(read_part, size_bytes, self._parts, memoryview(first_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end."""
        return bytes(self._range(key, start, length))

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from offset ``start``; fewer bytes come only at the object's end."""
        check_range(check_key(key), start, len(buffer))
        if not len(buffer):
            self.stat(key)
            return 0
        if transfers := self._transfers:
            with self._fall_back_on_redirect():
                return transfers.fill(key, start, buffer, on_arrival)
        filled_bytes = 0
        with self._errors("get", key, reading=True):
            for piece in self._stream(key, start, len(buffer)):
                # Copy and verify the piece while the next pieces are on their way.
                stop = filled_bytes + len(piece)
                buffer.put(filled_bytes, piece)
                on_arrival(filled_bytes, stop)
                filled_bytes = stop
        return filled_bytes

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return []
        with self._errors("list", prefix):
            pages = obstore.list(self._bucket, folder or None, chunk_size=1000)
            entries = [ObjectInfo(entry["path"], entry["size"]) for page in pages for entry in page]
        return sorted(info for info in entries if info.key.startswith(prefix) and is_key(info.key))

    def delete(self, key: str) -> None:
        """Delete the object; a missing object is not an error."""
        with self._errors("delete", check_key(key)):
            try:
                obstore.delete(self._bucket, key)
            except FileNotFoundError as error:
                if not _is_missing(error):
                    raise

    def stat(self, key: str) -> ObjectInfo:
        """Return the key and the size of the object."""
        with self._errors("stat", check_key(key), reading=True):
            return ObjectInfo(key, obstore.head(self._bucket, key)["size"])

    def sweep(
        self, is_deletable: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Abort unfinished uploads; see :func:`resilient.storage.s3_multipart.abort_uploads`.

        obstore can neither list nor abort uploads. With known credentials the requests use this
        package's own client, and with a machine's role they use s3fs.
        """
        credentials = known_credentials(self._options)
        if credentials is None:
            return s3_multipart.abort_through_s3fs(
                self.url, for_s3fs(self._options), is_deletable, older_than_seconds, clock
            )
        uploads = SignedMultipartUploads(
            self._name, S3Connection(self._name, self._options, credentials, clock)
        )
        prefix = f"{self._prefix}/" if self._prefix else ""
        return s3_multipart.abort_uploads(uploads, prefix, is_deletable, older_than_seconds, clock)

    def _get_first_part(self, key: str) -> obstore.GetResult:
        """Get the first part, whose response also has the size and the version."""
        try:
            return obstore.get(self._bucket, key, options={"range": (0, self._parts.part_bytes)})
        except _CAUGHT as error:
            # An empty object has no valid range.
            if _status(error) == _NOT_SATISFIABLE:
                return obstore.get(self._bucket, key)
            raise

    def _range(self, key: str, start: int, length: int) -> memoryview:
        check_range(check_key(key), start, length)
        if length == 0:
            # HTTP has no empty range, but a missing object must still raise.
            self.stat(key)
            return memoryview(b"")
        with self._errors("get", key, reading=True):
            try:
                return memoryview(obstore.get_range(self._bucket, key, start=start, length=length))
            except _CAUGHT as error:
                if _status(error) == _NOT_SATISFIABLE:
                    return memoryview(b"")
                raise

    def _stream(self, key: str, start: int, length: int) -> Iterable[bytes]:
        try:
            response = obstore.get(self._bucket, key, options={"range": (start, start + length)})
        except _CAUGHT as error:
            if _status(error) == _NOT_SATISFIABLE:
                return ()
            raise
        return response.stream(_PIECE_BYTES)

    def _read_version(self, key: str, version: str | None, start: int, length: int) -> memoryview:
        options: dict[str, Any] = {"range": (start, start + length)}
        if version:
            options["if_match"] = version
        with self._errors("get", key, reading=True):
            return memoryview(obstore.get(self._bucket, key, options=options).bytes())  # type: ignore[arg-type]

    def _put_directly(self, key: str, view: memoryview, part_bytes: int, in_flight: int) -> bool:
        """Put a large object over our own connections and return whether that was possible."""
        transfers = self._transfers
        if len(view) >= _LARGE_BYTES_MIN and transfers:
            with self._fall_back_on_redirect():
                transfers.put(key, view, part_bytes, in_flight)
                return True
        return False

    @contextmanager
    def _fall_back_on_redirect(self) -> Iterator[None]:
        """Use only the library from the first redirect of the server on."""
        try:
            yield
        except Redirected:
            self._transfers = None

    def _require_existing(self, key: str) -> None:
        # 409: two requests conflicted, and perhaps neither succeeded. A retry shows the result.
        try:
            self.stat(key)
        except KeyNotFound as error:
            raise StoreUnavailable(
                f"cannot create `{key}` in {self.url}: a conflict left no object behind", key=key
            ) from error

    @contextmanager
    def _errors(self, verb: str, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except _CAUGHT as error:
            if reading and _is_missing(error):
                raise KeyNotFound(f"cannot {verb} `{key}`: not in {self.url}", key=key) from error
            kind, hint = _kind(error), f"resilient ckpt ls {shell_quote(self.url)}"
            if is_untrusted(str(error)):
                hint = TRUST_HINT
            elif kind is StoreDenied:
                hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the storage options"
            raise kind(
                f"cannot {verb} `{key}` in {self.url}: {_first_line(error)}", key=key, hint=hint
            ) from fit_to_show(error)


def _kind(error: Exception) -> type[StoreError]:
    """Classify ``error`` by response, type and text."""
    text = _first_line(error)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return StoreDenied
    if _ROLE.search(text) or is_untrusted(str(error)):
        return StoreDenied
    status = _status(error)
    if status == _NOT_IMPLEMENTED:
        return NotExclusive if "PUT" in text else StoreError
    # The object changed during the read: the retry reads the new object.
    if status == _CONDITION_FAILED or (not status and _UNANSWERED.search(str(error))):
        return StoreUnavailable
    return kind_of_answer(_code(error), status)


def _is_missing(error: Exception) -> bool:
    """Return whether ``error`` means a missing object, as opposed to a missing bucket."""
    return isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"


def _status(error: Exception) -> int:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else 0


def _code(error: Exception) -> str:
    match = _CODE.search(str(error))
    return match[1] if match else ""


def _first_line(error: Exception) -> str:
    """Return the message without the library's debug representation."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    # Only the debug representation names a rejected certificate.
    reason = _REFUSED.search(debug)
    certificate_problem = (
        f": the server's certificate is not trusted ({reason[1]})" if reason else ""
    )
    return redacted_text(text.strip()) + certificate_problem
