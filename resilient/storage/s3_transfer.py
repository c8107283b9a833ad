"""Large objects of S3 to and from memory over connections of our own.

A client library reads a body into memory of its own, piece by piece, and copies it from there;
with the bytes of a checkpoint that costs more than everything else. Here the socket fills the
memory that asked, and is filled from it.
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
    """An answer to what puts an object.

    Attributes:
        text: its body.
        tag: the ETag of what is stored.
        checksum: of the body that came with the request, if the server held it against that.
        algorithm: of the checksums that an upload will hold against its parts.
    """

    text: str
    tag: str
    checksum: str
    algorithm: str

    def line(self, part: int) -> str:
        """Return how the part with this answer is named when all are joined."""
        summed = (
            f"<ChecksumCRC32C>{escape(self.checksum)}</ChecksumCRC32C>" if self.checksum else ""
        )
        return (
            f"<Part><ETag>{escape(self.tag)}</ETag>{summed}<PartNumber>{part}</PartNumber></Part>"
        )


@dataclass(frozen=True, slots=True)
class PartPlan:
    """An object and how it goes.

    Attributes:
        view: its bytes.
        part_bytes: of each part but the last.
        in_flight: how many are on their way at once.
    """

    view: memoryview
    part_bytes: int
    in_flight: int

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-len(self.view) // self.part_bytes)

    def part(self, number: int) -> memoryview:
        """Return a part's bytes; the first is 1."""
        return self.view[(number - 1) * self.part_bytes : number * self.part_bytes]


class Redirected(Exception):
    """The server names another address, which a library may follow."""


class S3Transfer:
    """Whole objects to a bucket and ranges from it.

    Args:
        url: of the store, without secrets; for messages.
        wire: to its bucket.
        prefix: of every key; empty or ``a/b``.
    """

    def __init__(self, url: str, wire: S3Connection, prefix: str) -> None:
        self._url, self._wire, self._sums = url, wire, wire.sums
        self._prefix = f"{prefix}/" if prefix else ""

    def fill(self, key: str, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Fill ``room`` from offset ``start`` of an object; see :mod:`resilient.storage.transfer`.

        Args:
            key: of the object.
            start: offset in bytes.
            room: not empty.
            arrived: told of each piece.

        Returns:
            How many bytes came; fewer than there is room for only at the object's end.

        Raises:
            KeyNotFound: no such object.
            StoreError: refused, unreachable, cut or not in time.
            Redirected: ask a library.
        """
        span = f"bytes={start}-{start + len(room) - 1}"
        asked = HttpRequest("GET", self._prefix + key, headers={"range": span})
        with self._answer("get", key, asked) as answer:
            if answer.status == _NOT_SATISFIABLE:
                answer.text()
                return 0
            self._require(answer, "get", key)
            if start and answer.status != _PARTIAL:
                raise self._failed("get", key, StoreError, "the server sent no range of it")
            return _received(answer, room, arrived)

    def put(self, key: str, view: memoryview, part_bytes: int, in_flight: int) -> None:
        """Store an object, in parts if it is larger than one.

        The server refuses a body that is not the one meant; see :mod:`resilient.storage.s3_client`.

        Crash: the old object or the new one; parts that nobody sees may be left.

        Args:
            key: of the object.
            view: its bytes.
            part_bytes: of each part but the last.
            in_flight: how many are on their way at once.

        Raises:
            StoreError: refused, unreachable, cut or not in time.
            Redirected: ask a library.
        """
        cut = PartPlan(view, part_bytes, in_flight)
        if not self._sums.begin():
            self._put(key, cut, is_summed=False)
            return
        holds: bool | None = None
        try:
            if not (holds := self._put_summed(key, cut)):
                holds = None
                self._put(key, cut, is_summed=False)
                holds = False
        finally:
            self._sums.end(holds=holds)

    def _put_summed(self, key: str, cut: PartPlan) -> bool:
        """Store an object with checksums; False if that is not for this server."""
        try:
            return self._put(key, cut, is_summed=True)
        except StoreUnavailable:
            raise
        except StoreError:
            # Some refuse headers that they do not know, and a policy may ask for signatures. If
            # it is anything else, they say so again.
            return False

    def _put(self, key: str, cut: PartPlan, *, is_summed: bool) -> bool:
        """Store an object, and say whether the server held checksums against every part of it."""
        if len(cut.view) <= cut.part_bytes:
            whole = HttpRequest("PUT", self._prefix + key, body=cut.view, is_summed=is_summed)
            return bool(self._ask("put", key, whole).checksum)
        wanted = {ALGORITHM_HEADER: ALGORITHM} if is_summed else {}
        begun = self._ask(
            "put", key, HttpRequest("POST", self._prefix + key, {"uploads": ""}, signed=wanted)
        )
        number = field_of("UploadId", begun.text)
        if not number:
            raise self._unsaid("put", key, "UploadId", begun.text)
        try:
            is_held = begun.algorithm == ALGORITHM or not is_summed
            if is_held and self._put_parts(key, number, cut, is_summed=is_summed):
                return True
        except (StoreError, Redirected):
            self._abort(key, number)
            raise
        self._abort(key, number)
        return False

    def _abort(self, key: str, number: str) -> None:
        """Give an upload up: else it lies there until somebody sweeps. No more depends on it."""
        with suppress(StoreError, Redirected):
            self._ask("put", key, HttpRequest("DELETE", self._prefix + key, {"uploadId": number}))

    def _put_parts(self, key: str, number: str, cut: PartPlan, *, is_summed: bool) -> bool:
        """Put all parts and join them; False if a checksum was not held against one of them."""
        where = self._prefix + key

        def put(part: int) -> PutResponse:
            query = {"partNumber": str(part), "uploadId": number}
            asked = HttpRequest("PUT", where, query, body=cut.part(part), is_summed=is_summed)
            return self._ask("put", key, asked)

        parts = map_parallel(put, range(1, cut.count + 1), cut.in_flight)
        if is_summed and not all(one.checksum for one in parts):
            return False
        lines = "".join(one.line(part) for part, one in enumerate(parts, 1))
        text = f"<CompleteMultipartUpload>{lines}</CompleteMultipartUpload>".encode()
        whole = HttpRequest("POST", where, {"uploadId": number}, body=memoryview(text))
        ended = self._ask("put", key, whole).text
        # It may take long, so a server may answer 200 at once, and say later that it failed.
        if _WHOLE not in ended:
            raise self._unsaid("put", key, _WHOLE, ended)
        return True

    def _ask(self, verb: str, key: str, asked: HttpRequest) -> PutResponse:
        """Return what the server says."""
        with self._answer(verb, key, asked) as answer:
            self._require(answer, verb, key)
            held = answer.header(SUM_HEADER) if asked.is_summed else ""
            if held and held != answer.proof.sum:
                # Of what arrived. It was something else.
                raise self._failed(
                    verb, key, StoreUnavailable, "the server has another checksum than was sent"
                )
            text = answer.text().decode("utf-8", "replace")
            return PutResponse(text, answer.header("ETag"), held, answer.header(ALGORITHM_HEADER))

    @contextmanager
    def _answer(self, verb: str, key: str, asked: HttpRequest) -> Iterator[HttpResponse]:
        try:
            with self._wire.ask(asked) as answer:
                yield answer
        except WIRE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise self._failed(verb, key, classify_timeout(error), reason) from error

    def _require(self, answer: HttpResponse, verb: str, key: str) -> None:
        if answer.is_good:
            return
        text = answer.text().decode("utf-8", "replace")
        if answer.status in _REDIRECTED:
            raise Redirected
        code = field_of("Code", text)
        if answer.status == _NOT_FOUND and verb == "get" and code != "NoSuchBucket":
            raise KeyNotFound(f"cannot get `{key}`: not in {self._url}", key=key)
        said = f"{answer.status} {code}: {field_of('Message', text)}".rstrip(": ")
        raise self._failed(verb, key, kind_of_answer(code, answer.status), said)

    def _unsaid(self, verb: str, key: str, name: str, text: str) -> StoreError:
        """Return what to raise for a good status without what comes with it."""
        code = field_of("Code", text)
        kind = kind_of_answer(code, 0) if code else StoreUnavailable
        # Of what went wrong inside the server it says no more than that; once more is the cure.
        kind = StoreUnavailable if code == "InternalError" else kind
        return self._failed(verb, key, kind, code or f"half an answer, without {name}")

    def _failed(self, verb: str, key: str, kind: type[StoreError], reason: str) -> StoreError:
        hint = f"resilient ckpt ls {shell_quote(self._url)}"
        if is_untrusted(reason):
            hint = TRUST_HINT
        elif kind is StoreDenied:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the storage options"
        return kind(f"cannot {verb} `{key}` in {self._url}: {reason}", key=key, hint=hint)


def _received(answer: HttpResponse, room: ScatterBuffer, arrived: Arrived) -> int:
    """Read a body into ``room``, and tell of each piece while a cache still has it."""
    told = came = 0
    for piece in room.cut(0, len(room)):
        at = 0
        while at < len(piece):
            more = answer.into(piece[at : at + PIECE_BYTES])
            if not more:
                break
            at, came = at + more, came + more
            if came - told >= PIECE_BYTES:
                arrived(told, came)
                told = came
    if came > told:
        arrived(told, came)
    return came
