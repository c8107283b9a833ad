"""Reach the c10d rendezvous; skewed clocks; silent members.

What torch asks this host's own name for, found out without it: in many images it has none.

The way to the node that serves the rendezvous, which may be late, and may be lost and come back.

A pod waits for a machine; so does the one that takes its place.

Heartbeats between hosts whose clocks are apart, or jump.

Torch's nodes put the time of day of their own clock into the state of the rendezvous, and each
holds the others' against its own: an hour of difference is an hour of silence. Here what counts is
when this node saw a heartbeat change, by its clock that only runs forward.

Waits of nodes that have met for a round and not started yet, where one may fall silent.

Between the meeting and the start nodes tell each other which ranks they have, and the first one
names the life. Torch waits for that in its store: it holds the connection which the heartbeats
need too, hears no signal meanwhile, and does so for a minute also where the other node is dead.
Here such waits ask again and again, and end with the member that they are for.
"""

from __future__ import annotations

import math
import pickle
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from resilient.distributed.kv_store import address_toward
from resilient.elastic.suspend_detection import SuspendDetector
from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from resilient.events import Emitter

_DEFAULT_PORT = 29400


def told_where(parameters: RendezvousParameters) -> RendezvousParameters:
    """Return these, with who serves the rendezvous and this node's address if torch would not know.

    Torch 2.13 asks where this host's own name leads, and raises where that is nowhere
    (``_matches_machine_hostname``); the others would be told that name.

    Raises:
        ValueError: of the endpoint.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if parameters.backend != "c10d" or leads_somewhere(socket.gethostname()):
        return parameters
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORT)
    told = {"is_host": str(is_here(host)).lower(), **parameters.config}
    return RendezvousParameters(
        parameters.backend,
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        local_addr=parameters.local_addr or _own_address(host, port),
        **told,
    )


def leads_somewhere(name: str) -> bool:
    """Return whether a name has an address."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def is_here(host: str) -> bool:
    """Return whether a name or an address is this host's: whether it can be listened at."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, place) for family, _, _, _, place in found)


def _is_own(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((place[0], 0, *place[2:]))
        except OSError:
            return False
    return True


def _own_address(host: str, port: int) -> str | None:
    try:
        return address_toward(host, port)
    except OSError:
        return None


_PAUSE_SECONDS = 1.0
_JOIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RendezvousRetried(Event):
    """The node that serves the rendezvous was lost while this one met the others there.

    Attributes:
        patience_seconds: how long there is for another node to serve it.
    """

    level: ClassVar[Level] = Level.WARNING
    patience_seconds: float

    def line(self) -> str:
        """Say that this node waits."""
        return (
            "the node that serves the rendezvous is gone: waiting up to "
            f"{self.patience_seconds:.0f} s for it to come back"
        )


@dataclass(frozen=True, slots=True)
class RendezvousAborted(Event):
    """A node that had met the others was gone before their life began.

    Attributes:
        reason: who, as far as that is known.
    """

    level: ClassVar[Level] = Level.WARNING
    reason: str

    def line(self) -> str:
        """Say what follows."""
        return f"meeting the other nodes once more: {self.reason}"


@dataclass(frozen=True, slots=True)
class RendezvousReconnect:
    """Lets a node meet the others again after the one that serves the rendezvous was lost.

    Without a wish for it, as by default, it leaves that to whoever starts nodes.

    Attributes:
        connect: opens a new way to whoever serves the rendezvous now.
        patience_seconds: from the first loss on; 0 not to try.
    """

    connect: Callable[[], RendezvousHandler] | None = None
    patience_seconds: float = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether a node waits rather than leaves."""
        return self.connect is not None and self.patience_seconds > 0

    def meet(self, spec: Any, join: Callable[[], None], emit: Emitter) -> None:
        """Join the others, each time through a new connection, until that was not interrupted.

        Where one of them falls silent before their life has begun the rest meet again, for as long
        as the rendezvous lets nodes wait for others. Dying inside leaves nothing behind: the
        others miss this node's heartbeats.

        Args:
            spec: torch's description of the group, whose handler is replaced.
            join: meets through that handler.
            emit: where each loss is told.

        Raises:
            RendezvousError: of the meeting itself, or nobody served it in time.
            MemberSilent: time and again somebody fell silent.
            dist.DistError: the rendezvous did not answer.
            PeerFailed: nobody answered in time.
        """
        # Here, so that a plan and the first signals need no torch.
        import torch.distributed as dist
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        began_seconds = time.monotonic()
        deadline_seconds = began_seconds + self.patience_seconds
        while True:
            try:
                return join()
            except MemberSilent as error:
                if time.monotonic() - began_seconds > _join_seconds(spec.rdzv_handler):
                    raise
                emit(RendezvousAborted(str(error)))
                continue
            except (RendezvousConnectionError, dist.DistError) as error:
                left_seconds = deadline_seconds - time.monotonic() - _PAUSE_SECONDS
                if self.connect is None or left_seconds <= 0:
                    raise
                is_gone = isinstance(error, RendezvousConnectionError)
            time.sleep(_PAUSE_SECONDS)
            # A node that had joined leaves before it joins again; one that cannot finds out so.
            if is_gone:
                emit(RendezvousRetried(left_seconds))
                spec.rdzv_handler = self.connect()


def _join_seconds(handler: Any) -> float:
    """Return how long nodes wait for others at a rendezvous."""
    settings = getattr(handler, "settings", None)
    return settings.timeout.join.total_seconds() if settings else _JOIN_SECONDS


NO_COMEBACK = RendezvousReconnect()


def connect(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return what the nodes meet through.

    Torch gives the node that serves it ``read_timeout`` to come up. Where somebody says
    ``join_timeout``, which is how long to wait for nodes, it is asked again until that is over.

    Raises:
        RendezvousError: nobody answered in time.
        ValueError: of a setting.
    """
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    patience_seconds = parameters.get_as_int("join_timeout", 0) or 0
    deadline_seconds = time.monotonic() + patience_seconds
    while True:
        try:
            handler = judge_by_sight(get_rendezvous_handler(told_where(parameters)))
            return end_waits_with_members(handler)
        except RendezvousConnectionError:
            if time.monotonic() + _PAUSE_SECONDS > deadline_seconds:
                raise
        time.sleep(_PAUSE_SECONDS)


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


class SkewTolerantBackend(RendezvousBackend):
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
        self._sight = SuspendDetector(away_seconds)
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
        holder._backend = SkewTolerantBackend(  # noqa: SLF001 - no public way
            backend, settings.timeout.last_call.total_seconds(), away_seconds=away_seconds
        )
    return handler


_MUTE_SECONDS = 60.0
"""How long a member may say nothing although its heartbeats come."""
_POLL_SECONDS = 0.01
_POLL_SECONDS_MAX = 0.2


class MemberSilent(RendezvousError):
    """A member of a round went before the life of it could start: the others meet once more."""


class RoundStore:
    """The store of one round, by whose members alone it is known whether a wait makes sense.

    What is not a wait goes to the store itself.

    Args:
        inner: the store.
        handler: has just joined the round.

    Attributes:
        members: of the round, each with its place in it.
        round: its number.

    Raises:
        MemberSilent: some of those who met are gone already, by what this node has heard.
    """

    def __init__(self, inner: Any, handler: RendezvousHandler) -> None:
        self._inner = inner
        self._handler = handler
        state = _state_of(handler)
        self.round = state.round
        self.members: Mapping[Any, int] = dict(state.participants)
        _require_whole(self.members, handler)

    def __getattr__(self, name: str) -> Any:
        """Return what the store itself has."""
        return getattr(self._inner, name)

    def get(self, key: str) -> Any:
        """Return a value once it is there.

        Raises:
            MemberSilent: nobody will put it there.
            RendezvousError: the rendezvous does not answer.
        """
        self._wait([key])
        return self._inner.get(key)

    def multi_get(self, keys: Sequence[str]) -> Any:
        """Return values once all are there; see :meth:`get`."""
        self._wait(list(keys))
        return self._inner.multi_get(list(keys))

    def _wait(self, keys: list[str]) -> None:
        deadline_seconds = time.monotonic() + _MUTE_SECONDS
        pause_seconds = _POLL_SECONDS
        while not self._inner.check(keys):
            self._require_members()
            if time.monotonic() > deadline_seconds:
                raise MemberSilent(f"no member published {keys} within {_MUTE_SECONDS:g} s")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _POLL_SECONDS_MAX)

    def _require_members(self) -> None:
        """Insist that all still hold the round, by what torch has heard within the last second."""
        self._handler.num_nodes_waiting()
        state = _state_of(self._handler)
        gone = [str(one.addr) for one in self.members if one not in state.participants]
        if gone or state.round != self.round:
            who = ", ".join(gone) or "all of them"
            raise MemberSilent(f"of those who met for a life some are gone before it began: {who}")


def _state_of(handler: Any) -> Any:
    return handler._state_holder.state  # noqa: SLF001 - no public way


def _require_whole(members: Mapping[Any, int], handler: Any) -> None:
    """Insist that nobody is missing in the places that were given out, and that enough are left.

    Torch drops a silent node from a round that is complete without counting anew: whoever looks
    then sees a world of fewer nodes than the others see, or than it may have.
    """
    nodes_min = handler.settings.min_nodes
    if sorted(members.values()) != list(range(len(members))) or len(members) < nodes_min:
        raise MemberSilent(
            f"a node fell silent while all met: {len(members)} are left, in the places "
            f"{sorted(members.values())}, and {nodes_min} are needed"
        )


def end_waits_with_members(handler: RendezvousHandler) -> RendezvousHandler:
    """Let waits for members of a round end when one is gone; return the handler.

    A static rendezvous knows no heartbeats, and is left alone.
    """
    store_of_round = getattr(handler, "_get_store", None)
    if store_of_round is not None and hasattr(handler, "_state_holder"):
        one: Any = handler
        one._get_store = lambda: RoundStore(store_of_round(), handler)  # noqa: SLF001 - see above
    return handler
