"""Parts of a served page that are made on demand.

One part is made at a time, and only while a client waits for it.
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
from resilient_cli.page.checkpoints import verified
from resilient_cli.page.tables import text
from resilient_cli.store_wrappers import CountingStore
from resilient_cli.survey import VerifyLevel, examine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.clock import Clock
    from resilient.diff.model import CheckpointView
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store

    Told = Callable[[int, int], None]
    Work = Callable[[Told], str]

Key = tuple[str, ...]
_PATIENCE_SECONDS = 15.0
"""A client without a request in this time no longer waits."""
_AT_ONCE_SECONDS = 0.25
_KEPT_MAX, _WAITING_MAX = 64, 8
_END_SECONDS = 10.0
_FAILED = '<p class="bad" role="alert">{}</p>'


class _LeftError(Exception):
    """No client waits for the part any more."""


@dataclass(slots=True)
class _Job:
    """Part that is being made, or waits for its turn.

    Attributes:
        asked_seconds: Time of the last request.
        done: Set when the job is over.
        said: Progress, for people.
    """

    asked_seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    said: str = "waiting for its turn"


class RenderQueue:
    """Queue that makes slow parts and caches their HTML. Thread-safe.

    Args:
        clock: Clock for the waiting times.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._jobs: dict[Key, _Job] = {}
        self._kept: OrderedDict[Key, str] = OrderedDict()
        self._once: set[Key] = set()
        self._closed = False

    def ask(self, key: Key, work: Work, *, is_once: bool = False) -> tuple[int, str]:
        """Return 200 and the HTML, 202 and the progress, or 503 and the reason for a failure.

        Args:
            key: Key of the part, under which its HTML is cached.
            work: Function that makes the part. It reports its progress, and is ended early when no
                client asks any more.
            is_once: Deliver the HTML once, and make the part again for later requests.
        """
        with self._lock:
            if key in self._kept:
                return 200, self._hand_out(key)
            job = self._jobs.get(key)
            if job is None:
                if self._closed or len(self._jobs) >= _WAITING_MAX:
                    return 503, "too many parts are being rendered: try again"
                job = self._jobs[key] = _Job(self._clock.monotonic_seconds())
                thread = threading.Thread(
                    target=self._make, args=(key, job, work, is_once), daemon=True
                )
                thread.start()
            job.asked_seconds = self._clock.monotonic_seconds()
        if not job.done.wait(_AT_ONCE_SECONDS):
            return 202, job.said
        with self._lock:
            if key in self._kept:
                return 200, self._hand_out(key)
        return 503, "the part was not rendered: try again"

    def close(self) -> None:
        """Refuse new parts, and wait up to 10 s for each one in work."""
        with self._lock:
            self._closed = True
            waiting = list(self._jobs.values())
        for job in waiting:
            job.done.wait(_END_SECONDS)

    def _hand_out(self, key: Key) -> str:
        self._kept.move_to_end(key)
        if key not in self._once:
            return self._kept[key]
        self._once.discard(key)
        return self._kept.pop(key)

    def _make(self, key: Key, job: _Job, work: Work, is_once: bool) -> None:  # noqa: FBT001
        answer = None
        try:
            with self._turn:
                self._look(job)
                job.said = "reading"
                answer = work(lambda done, of: self._told(job, done, of))
        except _LeftError:
            job.said = "no request waited for it"
        except (ResilientError, Unreadable, OSError) as error:
            # A later attempt to read may succeed, so the error is delivered only once.
            answer, is_once = _FAILED.format(text(error)), True
        finally:
            with self._lock:
                del self._jobs[key]
                if answer is not None:
                    self._keep(key, answer, is_once=is_once)
            job.done.set()

    def _keep(self, key: Key, answer: str, *, is_once: bool) -> None:
        self._kept[key] = answer
        if is_once:
            self._once.add(key)
        while len(self._kept) > _KEPT_MAX:
            oldest, _ = self._kept.popitem(last=False)
            self._once.discard(oldest)

    def _told(self, job: _Job, done: int, of: int) -> None:
        job.said = f"reading: {100 * done // max(1, of)} %"
        self._look(job)

    def _look(self, job: _Job) -> None:
        waited_seconds = self._clock.monotonic_seconds() - job.asked_seconds
        if self._closed or waited_seconds > _PATIENCE_SECONDS:
            raise _LeftError


class LazyParts:
    """Parts about the checkpoints of one repository, and about nothing else. Thread-safe.

    Args:
        store: Function that returns the store; called each time, because a run may just begin.
        clock: Clock for the waiting times.
    """

    def __init__(self, store: Callable[[], Store | None], clock: Clock) -> None:
        self._store = store
        self._desk = RenderQueue(clock)

    def close(self) -> None:
        """Make no more parts."""
        self._desk.close()

    def part(self, name: str, asked: Mapping[str, str]) -> tuple[int, str] | None:
        """Return a status and HTML, or None if there is no such part.

        Args:
            name: Name of the part.
            asked: Names of the checkpoints and of the tensor, by field.
        """
        needs: Mapping[str, tuple[tuple[str, ...], Callable[..., str]]] = {
            "tensors": (("of",), _tensors),
            "histogram": (("of", "name"), _histogram),
            "compare": (("a", "b"), _compare),
            "both": (("a", "b", "name"), _both),
            "verify": (("of",), _verify),
        }
        if name not in needs:
            return None
        fields, make = needs[name]
        store = self._store()
        if store is None or set(asked) != set(fields):
            return 404, "this part does not exist"
        ids = [parse_checkpoint(asked[one]) for one in fields if one != "name"]
        known = [one for one in ids if one is not None and _is_there(store, one)]
        if len(known) != len(ids):
            return 404, "this checkpoint no longer exists"
        rest = [asked["name"]] if "name" in fields else []
        key = (name, *(asked[one] for one in fields))
        # Committed content does not change, but its bytes may get damaged.
        is_once = make is _verify
        return self._desk.ask(key, lambda told: make(store, told, *known, *rest), is_once=is_once)


def _is_there(store: Store, checkpoint: CheckpointId) -> bool:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def _side(store: Store, checkpoint: CheckpointId) -> CheckpointView:
    from resilient.diff.native import open_native  # Only these parts need numpy.

    return open_native(store, read_manifest(store, checkpoint))


def _tensors(store: Store, _: Told, of: CheckpointId) -> str:
    from resilient_cli.page.tensors import tensors

    return tensors(
        _side(store, of),
        load=lambda name: f"histogram?{urlencode({'of': of.folder, 'name': name})}",
    )


def _histogram(store: Store, told: Told, of: CheckpointId, name: str) -> str:
    from resilient_cli.page.tensors import picture_of

    return picture_of(_side(store, of), name, told)


def _compare(store: Store, told: Told, a: CheckpointId, b: CheckpointId) -> str:
    from resilient.diff.compare import compare
    from resilient_cli.page.diff_page import comparison

    found = compare(_side(store, a), _side(store, b), on_progress=told)
    pair = {"a": a.folder, "b": b.folder}
    return comparison(found, load=lambda name: f"both?{urlencode({**pair, 'name': name})}")


def _both(store: Store, told: Told, a: CheckpointId, b: CheckpointId, name: str) -> str:
    from resilient_cli.page.tensors import picture_of_both

    return picture_of_both(_side(store, a), _side(store, b), name, told)


def _verify(store: Store, told: Told, of: CheckpointId) -> str:
    try:
        size_bytes = read_manifest(store, of).size_bytes
    except (IncompatibleCheckpoint, IntegrityError):
        size_bytes = 0  # The verification below finds this damage.
    heard = CountingStore(store, lambda done: told(min(done, size_bytes), size_bytes))
    return verified(examine(heard, of, VerifyLevel.DEEP), VerifyLevel.DEEP)
