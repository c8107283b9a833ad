"""Transfer of large S3 objects from and to memory of the caller, without an intermediate copy.

A client library reads a body piece by piece into its own memory, and then copies each piece. For
the bytes of a checkpoint this copy costs more than all other work. This module uses its own
connections, whose sockets read and write the caller's memory directly.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from resilient.errors import KeyNotFound, StoreDenied, StoreError, StoreUnavailable
from resilient.redaction import shell_quote
from resilient.storage.errors import TRUST_HINT, is_untrusted, kind_of_answer
from resilient.storage.s3_client import (
    ALGORITHM,
    ALGORITHM_HEADER,
    PIECE_BYTES,
    SUM_HEADER,
    WIRE_ERRORS,
    HttpRequest,
    classify_timeout,
    field_of,
)
from resilient.storage.transfer import map_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.storage.s3_client import HttpResponse, S3Connection
    from resilient.storage.transfer import Arrived, ScatterBuffer

_PARTIAL, _NOT_FOUND, _NOT_SATISFIABLE = 206, 404, 416
_REDIRECTED = range(300, 400)
_WHOLE = "CompleteMultipartUploadResult"


@dataclass(frozen=True, slots=True)
class PutResponse:
    """A response to a request that puts an object or a part.

    Attributes:
        text: Body of the response.
        tag: ETag of the stored bytes.
        checksum: Checksum of the request's body, if the server verified it.
        algorithm: Checksum algorithm that an upload will verify its parts with.
    """

    text: str
    tag: str
    checksum: str
    algorithm: str

    def part_xml(self, part: int) -> str:
        """Return the XML that names the part with this response when all parts are joined."""
        summed = (
            f"<ChecksumCRC32C>{escape(self.checksum)}</ChecksumCRC32C>" if self.checksum else ""
        )
        return (
            f"<Part><ETag>{escape(self.tag)}</ETag>{summed}<PartNumber>{part}</PartNumber></Part>"
        )


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Division of an object into parts.

    Attributes:
        view: Bytes of the object.
        part_bytes: Size of each part but the last.
        in_flight: Number of parts in flight at once.
    """

    view: memoryview
    part_bytes: int
    in_flight: int

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-len(self.view) // self.part_bytes)

    def part(self, number: int) -> memoryview:
        """Return a part's bytes; the first part is 1."""
        return self.view[(number - 1) * self.part_bytes : number * self.part_bytes]


class Redirected(Exception):
    """The server redirects to another address, which a library may follow."""


class S3Transfer:
    """Whole objects to a bucket and ranges from it.

    Args:
        url: URL of the store without secrets, for messages.
        wire: Connections to the bucket.
        prefix: Prefix of every key; empty or ``a/b``.
    """

    def __init__(self, url: str, wire: S3Connection, prefix: str) -> None:
        self._url, self._wire, self._sums = url, wire, wire.sums
        self._prefix = f"{prefix}/" if prefix else ""

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from an object; see :mod:`resilient.storage.transfer`.

        Args:
            key: Key of the object.
            start: Offset in bytes.
            buffer: Memory for the bytes; not empty.
            on_arrival: Callback for each piece.

        Returns:
            Number of bytes read; fewer than the size of ``buffer`` only at the object's end.

        Raises:
            KeyNotFound: There is no such object.
            StoreError: The request was refused, cut or too late, or the server was unreachable.
            Redirected: The caller must use a library.
        """
        span = f"bytes={start}-{start + len(buffer) - 1}"
        request = HttpRequest("GET", self._prefix + key, headers={"range": span})
        with self._send("get", key, request) as response:
            if response.status == _NOT_SATISFIABLE:
                response.text()
                return 0
            self._require(response, "get", key)
            if start and response.status != _PARTIAL:
                raise self._error("get", key, StoreError, "the server did not send the range")
            return _read_body(response, buffer, on_arrival)

    def put(self, key: str, view: memoryview, part_bytes: int, in_flight: int) -> None:
        """Store an object, in parts if it is larger than one part.

        The server rejects a different body; see :mod:`resilient.storage.s3_client`.

        Crash: the old object or the new one; invisible parts may be left.

        Args:
            key: Key of the object.
            view: Bytes of the object.
            part_bytes: Size of each part but the last.
            in_flight: Number of parts in flight at once.

        Raises:
            StoreError: The request was refused, cut or too late, or the server was unreachable.
            Redirected: The caller must use a library.
        """
        plan = PartPlan(view, part_bytes, in_flight)
        if not self._sums.begin():
            self._put_object(key, plan, is_summed=False)
            return
        is_supported: bool | None = None
        try:
            if not (is_supported := self._put_summed(key, plan)):
                is_supported = None
                self._put_object(key, plan, is_summed=False)
                is_supported = False
        finally:
            self._sums.end(holds=is_supported)

    def _put_summed(self, key: str, plan: PartPlan) -> bool:
        """Store an object with checksums; return False if the server does not support them."""
        try:
            return self._put_object(key, plan, is_summed=True)
        except StoreUnavailable:
            raise
        except StoreError:
            # Some servers reject unknown headers, and a policy may require signatures. Any other
            # error occurs again with the signed request.
            return False

    def _put_object(self, key: str, plan: PartPlan, *, is_summed: bool) -> bool:
        """Store an object and return whether the server verified checksums of every part."""
        if len(plan.view) <= plan.part_bytes:
            request = HttpRequest("PUT", self._prefix + key, body=plan.view, is_summed=is_summed)
            return bool(self._ask("put", key, request).checksum)
        headers = {ALGORITHM_HEADER: ALGORITHM} if is_summed else {}
        response = self._ask(
            "put", key, HttpRequest("POST", self._prefix + key, {"uploads": ""}, signed=headers)
        )
        upload_id = field_of("UploadId", response.text)
        if not upload_id:
            raise self._incomplete_error("put", key, "UploadId", response.text)
        try:
            is_supported = response.algorithm == ALGORITHM or not is_summed
            if is_supported and self._put_parts(key, upload_id, plan, is_summed=is_summed):
                return True
        except (StoreError, Redirected):
            self._abort(key, upload_id)
            raise
        self._abort(key, upload_id)
        return False

    def _abort(self, key: str, upload_id: str) -> None:
        """Abort an upload, whose parts otherwise stay until a sweep; errors are ignored."""
        with suppress(StoreError, Redirected):
            self._ask(
                "put", key, HttpRequest("DELETE", self._prefix + key, {"uploadId": upload_id})
            )

    def _put_parts(self, key: str, upload_id: str, plan: PartPlan, *, is_summed: bool) -> bool:
        """Put and join all parts; return False if a part's checksum was not verified."""
        object_key = self._prefix + key

        def put(part: int) -> PutResponse:
            query = {"partNumber": str(part), "uploadId": upload_id}
            request = HttpRequest(
                "PUT", object_key, query, body=plan.part(part), is_summed=is_summed
            )
            return self._ask("put", key, request)

        parts = map_parallel(put, range(1, plan.count + 1), plan.in_flight)
        if is_summed and not all(part.checksum for part in parts):
            return False
        lines = "".join(uploaded.part_xml(part) for part, uploaded in enumerate(parts, 1))
        text = f"<CompleteMultipartUpload>{lines}</CompleteMultipartUpload>".encode()
        completion = HttpRequest("POST", object_key, {"uploadId": upload_id}, body=memoryview(text))
        response_text = self._ask("put", key, completion).text
        # Joining may take long: a server may answer 200 at once and report the failure later.
        if _WHOLE not in response_text:
            raise self._incomplete_error("put", key, _WHOLE, response_text)
        return True

    def _ask(self, verb: str, key: str, request: HttpRequest) -> PutResponse:
        """Return the server's response."""
        with self._send(verb, key, request) as response:
            self._require(response, verb, key)
            checksum = response.header(SUM_HEADER) if request.is_summed else ""
            if checksum and checksum != response.proof.sum:
                # The checksum is that of the received bytes, which differ from the sent bytes.
                raise self._error(
                    verb, key, StoreUnavailable, "the server reports another checksum than was sent"
                )
            text = response.text().decode("utf-8", "replace")
            return PutResponse(
                text, response.header("ETag"), checksum, response.header(ALGORITHM_HEADER)
            )

    @contextmanager
    def _send(self, verb: str, key: str, request: HttpRequest) -> Iterator[HttpResponse]:
        try:
            with self._wire.ask(request) as response:
                yield response
        except WIRE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise self._error(verb, key, classify_timeout(error), reason) from error

    def _require(self, response: HttpResponse, verb: str, key: str) -> None:
        if response.is_good:
            return
        text = response.text().decode("utf-8", "replace")
        if response.status in _REDIRECTED:
            raise Redirected
        code = field_of("Code", text)
        if response.status == _NOT_FOUND and verb == "get" and code != "NoSuchBucket":
            raise KeyNotFound(f"cannot get `{key}`: not in {self._url}", key=key)
        message = f"{response.status} {code}: {field_of('Message', text)}".rstrip(": ")
        raise self._error(verb, key, kind_of_answer(code, response.status), message)

    def _incomplete_error(self, verb: str, key: str, name: str, text: str) -> StoreError:
        """Return the error for a success status without the expected content."""
        code = field_of("Code", text)
        kind = kind_of_answer(code, 0) if code else StoreUnavailable
        # The server gives no details of an internal error; a retry solves it.
        kind = StoreUnavailable if code == "InternalError" else kind
        return self._error(verb, key, kind, code or f"incomplete response, without {name}")

    def _error(self, verb: str, key: str, kind: type[StoreError], reason: str) -> StoreError:
        hint = f"resilient ckpt ls {shell_quote(self._url)}"
        if is_untrusted(reason):
            hint = TRUST_HINT
        elif kind is StoreDenied:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the storage options"
        return kind(f"cannot {verb} `{key}` in {self._url}: {reason}", key=key, hint=hint)


def _read_body(response: HttpResponse, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
    """Read a body into ``buffer``, and report each piece while it is still in a cache."""
    reported_bytes = received_bytes = 0
    for piece in buffer.cut(0, len(buffer)):
        at = 0
        while at < len(piece):
            piece_bytes = response.into(piece[at : at + PIECE_BYTES])
            if not piece_bytes:
                break
            at, received_bytes = at + piece_bytes, received_bytes + piece_bytes
            if received_bytes - reported_bytes >= PIECE_BYTES:
                on_arrival(reported_bytes, received_bytes)
                reported_bytes = received_bytes
    if received_bytes > reported_bytes:
        on_arrival(reported_bytes, received_bytes)
    return received_bytes
