"""Heartbeats between hosts whose clocks are apart, or jump.

Torch's nodes put the time of day of their own clock into the state of the rendezvous, and each
holds the others' against its own: an hour of difference is an hour of silence. Here what counts is
when this node saw a heartbeat change, by its clock that only runs forward.
"""

from __future__ import annotations

import math
import pickle
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from resilient.agent.health.sight import Sight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler

_Answer = tuple[bytes, Any]
# Of the time between two heartbeats: a node asks at least that often, unless it stood still.
_AWAY_FACTOR = 1.5


@dataclass(slots=True)
class _Seen:
    """A moment of another node's clock.

    Attributes:
        raw: as it was written.
        at_seconds: when it was first seen, on our clock that only runs forward.
        ours: what stands in its place in the state that was read last.
    """

    raw: datetime
    at_seconds: float
    ours: datetime


class SeenBackend(RendezvousBackend):
    """A rendezvous' state with the moments in it as this node saw them.

    What is written has the moments as their nodes wrote them, so each node judges by itself. A node
    that was suspended has seen no heartbeats meanwhile, and holds that against nobody.

    Args:
        inner: where the state is.
        last_call_seconds: how long the last call lasts, from when it is seen.
        seconds: a clock that only runs forward.
        away_seconds: without a question, after which this node must have been suspended.
    """

    def __init__(
        self,
        inner: RendezvousBackend,
        last_call_seconds: float,
        seconds: Callable[[], float] = time.monotonic,
        away_seconds: float = math.inf,
    ) -> None:
        self._inner = inner
        self._last_call_seconds = last_call_seconds
        self._seconds = seconds
        self._sight = Sight(away_seconds)
        self._seen: dict[Any, _Seen] = {}

    @property
    def name(self) -> str:
        """Return the inner one's."""
        return self._inner.name

    def get_state(self) -> _Answer | None:
        """Return the state as it was seen here, and its version."""
        self._sight.open(self._seconds())
        found = self._inner.get_state()
        return None if found is None else (self._seen_here(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state; return the one that is there then."""
        self._sight.open(self._seconds())
        found = self._inner.set_state(self._as_written(state), token)
        return None if found is None else (self._seen_here(found[0]), *found[1:])

    def _seen_here(self, data: bytes) -> bytes:
        state = pickle.loads(data)  # noqa: S301 - torch's own, of the nodes of this job
        self._sight.close(self._seconds())
        beats = state.last_heartbeats
        moments = {**beats, None: state.deadline} if state.deadline else dict(beats)
        self._seen = {key: self._look(key, moment) for key, moment in moments.items()}
        for node in beats:
            beats[node] = self._seen[node].ours
        if state.deadline:
            state.deadline = self._seen[None].ours
        return pickle.dumps(state)

    def _look(self, key: Any, moment: datetime) -> _Seen:
        before, now_seconds = self._seen.get(key), self._seconds()
        is_new = before is None or before.raw != moment
        at_seconds = now_seconds if is_new or before is None else before.at_seconds
        lasts_seconds = self._last_call_seconds if key is None else 0.0
        left_seconds = self._sight.shifted(at_seconds) + lasts_seconds - now_seconds
        ours = datetime.now(UTC) + timedelta(seconds=left_seconds)
        return _Seen(moment, at_seconds, ours)

    def _as_written(self, data: bytes) -> bytes:
        state = pickle.loads(data)  # noqa: S301 - this node's own
        for node, moment in state.last_heartbeats.items():
            state.last_heartbeats[node] = self._raw(node, moment)
        if state.deadline:
            state.deadline = self._raw(None, state.deadline)
        return pickle.dumps(state)

    def _raw(self, key: Any, moment: datetime) -> datetime:
        """Return a moment as its node wrote it; one that this node has just set stays."""
        seen = self._seen.get(key)
        return seen.raw if seen and seen.ours == moment else moment


def judge_by_sight(handler: RendezvousHandler) -> RendezvousHandler:
    """Let a node of a dynamic rendezvous believe no clock but its own; return the handler.

    A static rendezvous has no heartbeats, and is left alone.
    """
    holder = getattr(handler, "_state_holder", None)
    backend = getattr(holder, "_backend", None)
    if holder is not None and backend is not None:
        settings = holder._settings  # noqa: SLF001 - no public way
        away_seconds = _AWAY_FACTOR * settings.keep_alive_interval.total_seconds()
        holder._backend = SeenBackend(  # noqa: SLF001 - no public way
            backend, settings.timeout.last_call.total_seconds(), away_seconds=away_seconds
        )
    return handler
