"""Parts of a served page that are made on demand.

The server makes one part at a time, and only while a client waits for this part.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from resilient.checkpoint.catalog import read_manifest
from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound, ResilientError
from resilient.format.keys import parse_checkpoint
from resilient.layouts.model import Unreadable
from resilient_cli.page.checkpoints import verification_html
from resilient_cli.page.tables import text
from resilient_cli.store_wrappers import CountingStore
from resilient_cli.survey import VerifyLevel, examine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.clock import Clock
    from resilient.diff.model import CheckpointView
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store

    ProgressCallback = Callable[[int, int], None]
    Work = Callable[[ProgressCallback], str]

Key = tuple[str, ...]
_PATIENCE_SECONDS = 15.0
"""Time in seconds after which a client without a new request no longer counts as waiting."""
_AT_ONCE_SECONDS = 0.25
_KEPT_MAX, _WAITING_MAX = 64, 8
_END_SECONDS = 10.0
_FAILED = '<p class="bad" role="alert">{}</p>'


class _NoClientError(Exception):
    """No client waits for the part any more."""


@dataclass(slots=True)
class _Job:
    """Part that is being made, or waits for its turn.

    Attributes:
        last_request_seconds: Time of the last request.
        done: Set when the job is over.
        progress_text: Progress as text.
    """

    last_request_seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    progress_text: str = "waiting for its turn"


class RenderQueue:
    """Queue that makes slow parts and caches their HTML. Thread-safe.

    Args:
        clock: Clock for the waiting times.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._render_lock = threading.Lock()
        self._jobs: dict[Key, _Job] = {}
        self._parts: OrderedDict[Key, str] = OrderedDict()
        self._single_use_keys: set[Key] = set()
        self._is_closed = False

    def ask(self, key: Key, work: Work, *, is_once: bool = False) -> tuple[int, str]:
        """Return 200 and the HTML, 202 and the progress, or 503 and the reason for a failure.

        Args:
            key: Key of the part, under which its HTML is cached.
            work: Function that makes the part. The function reports its progress. The queue stops
                the function early when no client waits any more.
            is_once: Deliver the HTML once, and make the part again for later requests.
        """
        with self._lock:
            if key in self._parts:
                return 200, self._take_html(key)
            job = self._jobs.get(key)
            if job is None:
                if self._is_closed or len(self._jobs) >= _WAITING_MAX:
                    return 503, "too many parts are being rendered: try again"
                job = self._jobs[key] = _Job(self._clock.monotonic_seconds())
                thread = threading.Thread(
                    target=self._make, args=(key, job, work, is_once), daemon=True
                )
                thread.start()
            job.last_request_seconds = self._clock.monotonic_seconds()
        if not job.done.wait(_AT_ONCE_SECONDS):
            return 202, job.progress_text
        with self._lock:
            if key in self._parts:
                return 200, self._take_html(key)
        return 503, "the part was not rendered: try again"

    def close(self) -> None:
        """Refuse new parts, and wait up to 10 s for each part in work."""
        with self._lock:
            self._is_closed = True
            waiting_jobs = list(self._jobs.values())
        for job in waiting_jobs:
            job.done.wait(_END_SECONDS)

    def _take_html(self, key: Key) -> str:
        self._parts.move_to_end(key)
        if key not in self._single_use_keys:
            return self._parts[key]
        self._single_use_keys.discard(key)
        return self._parts.pop(key)

    def _make(self, key: Key, job: _Job, work: Work, is_once: bool) -> None:  # noqa: FBT001
        answer = None
        try:
            with self._render_lock:
                self._require_waiting_client(job)
                job.progress_text = "reading"
                answer = work(lambda position, total: self._record_progress(job, position, total))
        except _NoClientError:
            job.progress_text = "no request waited for it"
        except (ResilientError, Unreadable, OSError) as error:
            # A later attempt to read may succeed, so the error is delivered only once.
            answer, is_once = _FAILED.format(text(error)), True
        finally:
            with self._lock:
                del self._jobs[key]
                if answer is not None:
                    self._cache_html(key, answer, is_once=is_once)
            job.done.set()

    def _cache_html(self, key: Key, answer: str, *, is_once: bool) -> None:
        self._parts[key] = answer
        if is_once:
            self._single_use_keys.add(key)
        while len(self._parts) > _KEPT_MAX:
            oldest_key, _ = self._parts.popitem(last=False)
            self._single_use_keys.discard(oldest_key)

    def _record_progress(self, job: _Job, position: int, total: int) -> None:
        job.progress_text = f"reading: {100 * position // max(1, total)} %"
        self._require_waiting_client(job)

    def _require_waiting_client(self, job: _Job) -> None:
        waited_seconds = self._clock.monotonic_seconds() - job.last_request_seconds
        if self._is_closed or waited_seconds > _PATIENCE_SECONDS:
            raise _NoClientError


class LazyParts:
    """Parts of the page about the checkpoints of one repository. Thread-safe.

    Args:
        store: Function that returns the store. Each request calls it: a run may start later.
        clock: Clock for the waiting times.
    """

    def __init__(self, store: Callable[[], Store | None], clock: Clock) -> None:
        self._store = store
        self._queue = RenderQueue(clock)

    def close(self) -> None:
        """Stop making parts."""
        self._queue.close()

    def part(self, name: str, query: Mapping[str, str]) -> tuple[int, str] | None:
        """Return a status and HTML, or None if there is no such part.

        Args:
            name: Name of the part.
            query: Names of the checkpoints and of the tensor, by field.
        """
        needs: Mapping[str, tuple[tuple[str, ...], Callable[..., str]]] = {
            "tensors": (("of",), _tensors),
            "histogram": (("of", "name"), _histogram),
            "compare": (("a", "b"), _compare),
            "both": (("a", "b", "name"), _pair_histogram),
            "verify": (("of",), _verify),
        }
        if name not in needs:
            return None
        fields, make = needs[name]
        store = self._store()
        if store is None or set(query) != set(fields):
            return 404, "this part does not exist"
        ids = [parse_checkpoint(query[field]) for field in fields if field != "name"]
        checkpoints = [
            checkpoint_id
            for checkpoint_id in ids
            if checkpoint_id is not None and _exists(store, checkpoint_id)
        ]
        if len(checkpoints) != len(ids):
            return 404, "this checkpoint no longer exists"
        names = [query["name"]] if "name" in fields else []
        key = (name, *(query[field] for field in fields))
        # Committed content does not change, but its bytes may get damaged.
        is_once = make is _verify
        return self._queue.ask(
            key, lambda progress: make(store, progress, *checkpoints, *names), is_once=is_once
        )


def _exists(store: Store, checkpoint: CheckpointId) -> bool:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def _side(store: Store, checkpoint: CheckpointId) -> CheckpointView:
    from resilient.diff.native import open_native  # Only these parts need numpy.

    return open_native(store, read_manifest(store, checkpoint))


def _tensors(store: Store, _: ProgressCallback, of: CheckpointId) -> str:
    from resilient_cli.page.tensors import tensors

    return tensors(
        _side(store, of),
        load=lambda name: f"histogram?{urlencode({'of': of.folder, 'name': name})}",
    )


def _histogram(store: Store, progress: ProgressCallback, of: CheckpointId, name: str) -> str:
    from resilient_cli.page.tensors import picture_of

    return picture_of(_side(store, of), name, progress)


def _compare(store: Store, progress: ProgressCallback, a: CheckpointId, b: CheckpointId) -> str:
    from resilient.diff.compare import compare
    from resilient_cli.page.diff_page import comparison

    result = compare(_side(store, a), _side(store, b), on_progress=progress)
    pair = {"a": a.folder, "b": b.folder}
    return comparison(result, load=lambda name: f"both?{urlencode({**pair, 'name': name})}")


def _pair_histogram(
    store: Store, progress: ProgressCallback, a: CheckpointId, b: CheckpointId, name: str
) -> str:
    from resilient_cli.page.tensors import pair_picture

    return pair_picture(_side(store, a), _side(store, b), name, progress)


def _verify(store: Store, progress: ProgressCallback, of: CheckpointId) -> str:
    try:
        size_bytes = read_manifest(store, of).size_bytes
    except (IncompatibleCheckpoint, IntegrityError):
        size_bytes = 0  # The verification below finds this damage.
    counting_store = CountingStore(
        store, lambda read_bytes: progress(min(read_bytes, size_bytes), size_bytes)
    )
    return verification_html(examine(counting_store, of, VerifyLevel.DEEP), VerifyLevel.DEEP)
