"""What takes a while to say: made one at a time, and only while somebody waits for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.errors import ResilientError
from resilient.layouts.values import Unreadable
from resilient_cli.page.tables import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.clock import Clock

    Told = Callable[[int, int], None]
    Work = Callable[[Told], str]

Key = tuple[str, ...]
_PATIENCE_SECONDS = 15.0
"""Who has not asked again for so long waits no more."""
_AT_ONCE_SECONDS = 0.25
_KEPT_MAX, _WAITING_MAX = 64, 8
_END_SECONDS = 10.0
_FAILED = '<p class="bad" role="alert">{}</p>'


class _LeftError(Exception):
    """Nobody waits for it any more."""


@dataclass(slots=True)
class _Job:
    """Something that is being made, or waits for its turn.

    Attributes:
        asked_seconds: when somebody asked last.
        done: whether it is over.
        said: how far it is, for people.
    """

    asked_seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    said: str = "waiting for its turn"


class Desk:
    """Answers with HTML that takes long to make. Any thread.

    Args:
        clock: time.
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
        """Return 200 and the answer; 202 and how far it is; or 503 and why there is none.

        Args:
            key: what is asked for; an answer is kept under it.
            work: makes it; told how much is done, it ends early once nobody asks any more.
            is_once: whether it is made anew for who asks after it was handed out.
        """
        with self._lock:
            if key in self._kept:
                return 200, self._hand_out(key)
            job = self._jobs.get(key)
            if job is None:
                if self._closed or len(self._jobs) >= _WAITING_MAX:
                    return 503, "too much is being made at once: ask again"
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
        return 503, "it was not made: ask again"

    def close(self) -> None:
        """Make nothing more; return when nothing is being made."""
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
            job.said = "nobody waited for it"
        except (ResilientError, Unreadable, OSError) as error:
            # What is read again may be there again.
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
