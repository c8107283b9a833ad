"""Heartbeats between hosts whose clocks are apart, or jump.

Torch's nodes put the time of day of their own clock into the state of the rendezvous, and each
holds the others' against its own: an hour of difference is an hour of silence. Here what counts is
when this node saw a heartbeat change, by its clock that only runs forward.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler

_Answer = tuple[bytes, Any]


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

    What is written has the moments as their nodes wrote them, so each node judges by itself.

    Args:
        inner: where the state is.
        last_call_seconds: how long the last call lasts, from when it is seen.
        seconds: a clock that only runs forward.
    """

    def __init__(
        self,
        inner: RendezvousBackend,
        last_call_seconds: float,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._last_call_seconds = last_call_seconds
        self._seconds = seconds
        self._seen: dict[Any, _Seen] = {}

    @property
    def name(self) -> str:
        """Return the inner one's."""
        return self._inner.name

    def get_state(self) -> _Answer | None:
        """Return the state as it was seen here, and its version."""
        found = self._inner.get_state()
        return None if found is None else (self._seen_here(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state; return the one that is there then."""
        found = self._inner.set_state(self._as_written(state), token)
        return None if found is None else (self._seen_here(found[0]), *found[1:])

    def _seen_here(self, data: bytes) -> bytes:
        state = pickle.loads(data)  # noqa: S301 - torch's own, of the nodes of this job
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
        left_seconds = at_seconds + lasts_seconds - now_seconds
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
        last_call_seconds = holder._settings.timeout.last_call.total_seconds()  # noqa: SLF001
        holder._backend = SeenBackend(backend, last_call_seconds)  # noqa: SLF001
    return handler
