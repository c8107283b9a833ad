"""Object-store simulator in memory, with planned faults for single requests.

Large objects are uploaded in parts, as on S3: begin, upload parts, complete. The object is
invisible until the upload is complete. The server, not the client, evaluates the condition
``If-None-Match: *``. Faults happen between client and server, so a client may not know whether the
server executed its request.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from resilient.errors import KeyExists, KeyNotFound, StoreError
from resilient.storage.errors import kind_of_answer
from resilient.storage.store import ObjectInfo, check_key
from resilient.storage.transfer import as_byte_view, check_range
from resilient.testing.fault_store import Crash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from resilient.clock import Clock
    from resilient.storage.store import Data

Result = TypeVar("Result")


class RequestFault(Enum):
    """Fault of a request."""

    DIES_BEFORE = "the client dies before the request leaves"
    DIES_AFTER = "the client dies after the effect, before the answer"
    BUSY = "503, nothing happened"
    CONFLICT = "409, nothing happened"
    ANSWER_LOST = "a timeout, and yet it happened"
    TWICE = "it is delivered twice, and the second answer is received: 412 for an exclusive create"
    LATE = "a timeout; it happens after ``after`` further requests, of any client"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class PlannedRequestFault:
    """Planned fault of one request.

    Attributes:
        at: Number of the request, from 0 over all clients.
        trouble: Kind of the fault.
        after: Number of later requests before a ``LATE`` one arrives.
        lasting: Number of consecutive requests with the fault, because a client that retries fails
            only after several.
    """

    at: int
    trouble: RequestFault
    after: int = 0
    lasting: int = 1


class ObjectServer:
    """Server with objects, unfinished uploads and a fault plan.

    Args:
        objects: Initial objects.
        planned_faults: Planned faults.

    Attributes:
        requests: Number of requests so far.
        trace: Verb and key of each request.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes] | None = None,
        planned_faults: Iterable[PlannedRequestFault] = (),
    ) -> None:
        self.objects = dict(objects or {})
        self.uploads: dict[int, tuple[str, dict[int, bytes]]] = {}
        self.requests = 0
        self.trace: list[tuple[str, str]] = []
        self._plan = {
            fault.at + offset: fault for fault in planned_faults for offset in range(fault.lasting)
        }
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._upload_count = 0
        self._lock = threading.RLock()

    def request(self, verb: str, key: str, effect: Callable[[], Result]) -> Result:
        """Handle one request, with its planned fault."""
        with self._lock:
            return self._take(verb, key, effect)

    def _take(self, verb: str, key: str, effect: Callable[[], Result]) -> Result:
        number = self.requests
        self.requests += 1
        self.trace.append((verb, key))
        self._deliver(number)
        planned_fault = self._plan.get(number)
        if planned_fault is None:
            return effect()
        match planned_fault.trouble:
            case RequestFault.DIES_BEFORE:
                raise Crash(f"before request {number}, {verb} `{key}`")
            case RequestFault.DIES_AFTER:
                _apply_without_result(effect)
                raise Crash(f"after request {number}, {verb} `{key}`")
            case RequestFault.TWICE:
                _apply_without_result(effect)
                return effect()
            case RequestFault.ANSWER_LOST:
                _apply_without_result(effect)
            case RequestFault.LATE:
                self._late.append((number + planned_fault.after, effect))
        raise _answer(planned_fault.trouble, verb, key)

    def calm(self) -> None:
        """Deliver all late requests, and cancel all planned faults."""
        self._plan.clear()
        self._deliver(1 << 62)

    def begin(self, key: str) -> int:
        """Begin an upload and return its number."""
        self._upload_count += 1
        self.uploads[self._upload_count] = (key, {})
        return self._upload_count

    def take_part(self, upload: int, number: int, content: bytes) -> None:
        """Store one part of an upload."""
        self._upload(upload)[1][number] = content

    def complete(self, upload: int, parts: int) -> None:
        """Turn an upload into an object; repetition is harmless for some time, as with S3."""
        if upload not in self.uploads:
            return
        key, uploaded_parts = self._upload(upload)
        if len(uploaded_parts) != parts:
            raise StoreError(f"upload of `{key}` lacks a part", key=key)
        del self.uploads[upload]
        self.objects[key] = b"".join(uploaded_parts[number] for number in range(parts))

    def _upload(self, upload: int) -> tuple[str, dict[int, bytes]]:
        if upload not in self.uploads:
            raise StoreError("no such upload")
        return self.uploads[upload]

    def _deliver(self, now: int) -> None:
        due_effects = [effect for at, effect in self._late if at <= now]
        self._late = [(at, effect) for at, effect in self._late if at > now]
        for effect in due_effects:
            _apply_without_result(effect)


def _apply_without_result(effect: Callable[[], object]) -> None:
    """Apply the effect and drop its result."""
    with suppress(StoreError):
        effect()


def _answer(trouble: RequestFault, verb: str, key: str) -> StoreError:
    code, status = {
        RequestFault.BUSY: ("SlowDown", 503),
        RequestFault.CONFLICT: ("ConditionalRequestConflict", 409),
    }.get(trouble, ("RequestTimeout", 408))
    return kind_of_answer(code, status)(f"cannot {verb} `{key}`: {status} {code}", key=key)


class ObjectClient:
    """Store client of an :class:`ObjectServer`: one process, which may die.

    Args:
        server: Server with the objects.
        part_bytes: Size above which objects are uploaded in parts, except exclusive creates.
        page: Number of keys per list request.
    """

    exclusive = True

    def __init__(self, server: ObjectServer, part_bytes: int = 512, page: int = 12) -> None:
        self.url = "test://objects"
        self._server = server
        self._part_bytes = part_bytes
        self._page = page
        self._is_dead = False

    def put(self, key: str, data: Data) -> None:
        """Store an object, in parts if it is large."""
        content = bytes(as_byte_view(data, check_key(key)))
        if len(content) <= self._part_bytes:
            self._ask("put", key, lambda: self._server.objects.update({key: content}))
            return
        upload = self._ask("begin", key, lambda: self._server.begin(key))
        parts = [
            content[at : at + self._part_bytes] for at in range(0, len(content), self._part_bytes)
        ]
        for number, part in enumerate(parts):
            self._ask("part", key, lambda n=number, p=part: self._server.take_part(upload, n, p))  # type: ignore[misc]
        self._ask("complete", key, lambda: self._server.complete(upload, len(parts)))

    def put_new(self, key: str, data: Data) -> None:
        """Create an object with ``If-None-Match: *``."""
        content = bytes(as_byte_view(data, check_key(key)))

        def create() -> None:
            if key in self._server.objects:
                raise KeyExists(f"cannot create `{key}`: 412", key=key)
            self._server.objects[key] = content

        self._ask("put_new", key, create)

    def get(self, key: str) -> bytes:
        """Return an object."""
        return self._ask("get", key, lambda: self._find(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return part of an object."""
        check_range(key, start, length)
        return self._ask("get", key, lambda: self._find(key)[start : start + length])

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return the entries, page by page."""
        last_key, entries = "", list[ObjectInfo]()
        while True:
            page = self._ask("list", prefix, lambda after=last_key: self._list(prefix, after))  # type: ignore[misc]
            entries += page
            if len(page) < self._page:
                return entries
            last_key = page[-1].key

    def delete(self, key: str) -> None:
        """Remove an object."""
        check_key(key)
        self._ask("delete", key, lambda: self._server.objects.pop(key, None))

    def stat(self, key: str) -> ObjectInfo:
        """Return an entry."""
        return self._ask("stat", key, lambda: ObjectInfo(key, len(self._find(key))))

    def sweep(
        self, is_ours: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Abort unfinished uploads; this server treats all of them as old."""
        del older_than_seconds, clock
        uploads = self._server.uploads
        answer = self._ask("uploads", "", lambda: {n: key for n, (key, _) in uploads.items()})
        own_uploads = {number: key for number, key in answer.items() if is_ours(key)}
        for number, key in own_uploads.items():
            self._ask("abort", key, lambda number=number: uploads.pop(number, None))  # type: ignore[misc]
        return tuple(own_uploads.values())

    def _list(self, prefix: str, after: str) -> tuple[ObjectInfo, ...]:
        objects = self._server.objects
        keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
        return tuple(ObjectInfo(key, len(objects[key])) for key in keys[: self._page])

    def _find(self, key: str) -> bytes:
        if check_key(key) not in self._server.objects:
            raise KeyNotFound(f"cannot get `{key}`: 404", key=key)
        return self._server.objects[key]

    def _ask(self, verb: str, key: str, effect: Callable[[], Result]) -> Result:
        if self._is_dead:
            raise Crash("dead since an earlier request")
        try:
            return self._server.request(verb, key, effect)
        except Crash:
            self._is_dead = True
            raise
