"""Deliberate defects of the control plane, put in while the simulator runs.

Each must be found; a simulator that finds nothing in broken code proves nothing.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.checkpoint import commit as committing
from resilient.checkpoint import generations
from resilient.distributed import coordination
from resilient.distributed.coordination import ControlGroup
from resilient.errors import DeadlineExceeded, StoreUnavailable
from resilient.format.manifest import decode, encode
from resilient.train.preemption import StopCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _no_fence(_store: Any, _mine: int, _token: str = "") -> None:
    """Let an older life commit."""


def _lost_vote(gathered: Any, rule: Callable[[list[Any]], Any]) -> Any:
    """Rule over those who could do their part, and forget who could not."""
    if isinstance(gathered, coordination.RankFailure):
        return gathered
    return coordination.capture_failure(
        lambda: rule([one["value"] for one in gathered if "value" in one])
    )


def _silent_vote(self: ControlGroup, topic: str, value: Any, within_seconds: float) -> Any:
    """Take silence for consent to a commit: rule over those who have answered in time."""
    try:
        return _GATHER(self, topic, value, within_seconds)
    except DeadlineExceeded:
        shown = [self._kv_store.peek(self.key(topic, rank)) for rank in range(self.world.size)]
        if "receipt" not in str(shown):
            raise
        return [json.loads(one) for one in shown if one is not None]


def _double_commit(store: Any, key: str, data: bytes) -> None:
    """Commit again with a new manifest if the answer was lost."""
    try:
        store._store.put_new(key, data)
    except StoreUnavailable:
        later = replace(decode(data, key), created_at="2026-02-01T00:00:00.000Z")
        store.put(key, encode(later))


def _shared_number(store: Any, key: str, data: bytes) -> None:
    """Take a life's number without asking whether it is taken."""
    store.put(key, data)


def _lone_stop(self: StopCoordinator, _turn: Any) -> None:
    """Stop where this rank is, wherever the others are."""
    _AGREE(self, self._position)


_GATHER, _AGREE = ControlGroup.gather, StopCoordinator._agree

BREAKAGES: dict[str, tuple[Any, str, Any]] = {
    "fence": (committing, "check_fence", _no_fence),
    "vote": (coordination, "_decide_or_fail", _lost_vote),
    "silence": (ControlGroup, "gather", _silent_vote),
    "commit": (committing, "put_manifest", _double_commit),
    "number": (generations, "create_record", _shared_number),
    "stop": (StopCoordinator, "_agree", _lone_stop),
}
"""What is broken, and what the simulator then must say of some seed."""

SIGNS = {
    "fence": "was committed after life",
    "vote": "was committed with the votes of",
    "silence": "was committed with the votes of",
    "commit": "double commit",
    "number": "two lives share generation",
    "stop": "ranks of one life stop after steps",
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Have the library broken in one way inside; an empty name leaves it as it is."""
    if not name:
        yield
        return
    place, attribute, defect = BREAKAGES[name]
    before = getattr(place, attribute)
    setattr(place, attribute, defect)
    try:
        yield
    finally:
        setattr(place, attribute, before)
