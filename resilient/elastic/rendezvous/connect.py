"""Connection to the c10d rendezvous, with tolerance for missing names, clock skew and lost nodes.

Own name: torch resolves this host's own name, but the name has no address in many container
images. This module finds the address without the name.

Late server: the node that serves the rendezvous may start late, or may be lost and come back. For
example, a Kubernetes pod or its replacement may wait for a machine.

Clock skew: nodes of torch write their own time of day into the rendezvous state. Each node compares
the times of other nodes with its own clock. One hour of difference looks like one hour of silence.
Here a heartbeat counts from the time at which this node saw it change, on the monotonic clock.

Silent members: between rendezvous and start, nodes exchange their ranks, and the first node names
the attempt. torch waits for the ranks and the name inside its store. That wait blocks the
connection that heartbeats need, ignores signals, and lasts a minute even if the other node is dead.
Here such waits poll, and end when the awaited member is gone.
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


def with_own_address(parameters: RendezvousParameters) -> RendezvousParameters:
    """Return the parameters with server role and local address, if torch cannot find them itself.

    torch 2.13 resolves this host's own name and raises if that fails
    (``_matches_machine_hostname``). The other nodes would also receive that name.

    Raises:
        ValueError: The endpoint is malformed.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if parameters.backend != "c10d" or has_address(socket.gethostname()):
        return parameters
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORT)
    config = {"is_host": str(is_own_address(host)).lower(), **parameters.config}
    return RendezvousParameters(
        parameters.backend,
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        local_addr=parameters.local_addr or _own_address(host, port),
        **config,
    )


def has_address(name: str) -> bool:
    """Return whether a name has an address."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def is_own_address(host: str) -> bool:
    """Return whether a name or address belongs to this host, so that a socket can bind to it."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, socket_address) for family, _, _, _, socket_address in addresses)


def _can_bind(family: int, socket_address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((socket_address[0], 0, *socket_address[2:]))
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
    """The node that serves the rendezvous was lost while this node joined.

    Attributes:
        patience_seconds: Time left for another node to serve the rendezvous.
    """

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "the node that serves the rendezvous is unreachable: waiting up to {patience_seconds:.0f} "
        "s for it"
    )
    patience_seconds: float


@dataclass(frozen=True, slots=True)
class RendezvousAborted(Event):
    """A node of the rendezvous left before the attempt began.

    Attributes:
        reason: Node that left, as far as known.
    """

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "joining the rendezvous again: {reason}"
    reason: str


@dataclass(frozen=True, slots=True)
class RendezvousReconnect:
    """Policy that joins the rendezvous again after the loss of the node that serves it.

    By default the node does not wait, and leaves the restart to its launcher.

    Attributes:
        connect: Function that opens a new connection to the current server.
        patience_seconds: Time for retries, from the first loss on; 0 disables them.
    """

    connect: Callable[[], RendezvousHandler] | None = None
    patience_seconds: float = 0.0

    @property
    def is_wanted(self) -> bool:
        """True if the node waits instead of leaving."""
        return self.connect is not None and self.patience_seconds > 0

    def join_with_retries(self, spec: Any, join: Callable[[], None], emit: Emitter) -> None:
        """Join the other nodes, and repeat through a new connection after an interruption.

        If a node falls silent before the attempt begins, the remaining nodes join again, within the
        time limit of the rendezvous. If this process dies meanwhile, the other nodes detect its
        missing heartbeats.

        Args:
            spec: Group description of torch, whose handler is replaced.
            join: Function that joins through the current handler.
            emit: Listener for each loss.

        Raises:
            RendezvousError: The rendezvous failed, or no node served it in time.
            MemberSilent: Nodes fell silent repeatedly.
            dist.DistError: The rendezvous did not answer.
            PeerFailed: No node answered in time.
        """
        # Import here, so that a launch plan and the first signals need no torch.
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
                is_disconnected = isinstance(error, RendezvousConnectionError)
            time.sleep(_PAUSE_SECONDS)
            # A node that already joined leaves before it joins again. A node that cannot leave
            # gets the error here.
            if is_disconnected:
                emit(RendezvousRetried(left_seconds))
                spec.rdzv_handler = self.connect()


def _join_seconds(handler: Any) -> float:
    """Return the time that nodes wait for others at a rendezvous."""
    settings = getattr(handler, "settings", None)
    return settings.timeout.join.total_seconds() if settings else _JOIN_SECONDS


NO_RECONNECT = RendezvousReconnect()


def connect(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous handler of the nodes.

    torch waits ``read_timeout`` for the serving node to start. If ``join_timeout`` (the wait for
    nodes) is set, this function retries the connection until that time is over.

    Raises:
        RendezvousError: No server answered in time.
        ValueError: A setting is invalid.
    """
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    patience_seconds = parameters.get_as_int("join_timeout", 0) or 0
    deadline_seconds = time.monotonic() + patience_seconds
    while True:
        try:
            handler = use_local_clock(get_rendezvous_handler(with_own_address(parameters)))
            return end_waits_with_members(handler)
        except RendezvousConnectionError:
            if time.monotonic() + _PAUSE_SECONDS > deadline_seconds:
                raise
        time.sleep(_PAUSE_SECONDS)


_Answer = tuple[bytes, Any]
# Factor of the heartbeat interval: a running node polls at least that often.
_AWAY_FACTOR = 1.5


@dataclass(slots=True)
class _ObservedTime:
    """Time on another node's clock.

    Attributes:
        raw: Time as written by the other node.
        at_seconds: Monotonic time at which this node first saw ``raw``.
        local: Replacement of ``raw`` in the state that was read last.
    """

    raw: datetime
    at_seconds: float
    local: datetime


class SkewTolerantBackend(RendezvousBackend):
    """Rendezvous backend that replaces foreign times with the times at which this node saw them.

    Written states keep the original times, so each node judges by its own clock. A suspended node
    saw no heartbeats meanwhile, and counts that time against no node.

    Args:
        inner: Backend with the state.
        last_call_seconds: Length of torch's last call, from the time at which this node saw it.
        seconds: Monotonic clock.
        away_seconds: Time without a query after which this node counts as suspended.
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
        self._suspend_detector = SuspendDetector(away_seconds)
        self._last_state: dict[Any, _ObservedTime] = {}

    @property
    def name(self) -> str:
        """Name of the inner backend."""
        return self._inner.name

    def get_state(self) -> _Answer | None:
        """Return the state with local times, and its version."""
        self._suspend_detector.open(self._seconds())
        state = self._inner.get_state()
        return None if state is None else (self._to_local_times(state[0]), state[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state; return the state that is stored afterwards."""
        self._suspend_detector.open(self._seconds())
        new_state = self._inner.set_state(self._encode_state(state), token)
        return None if new_state is None else (self._to_local_times(new_state[0]), *new_state[1:])

    def _to_local_times(self, data: bytes) -> bytes:
        state = pickle.loads(data)  # noqa: S301 - torch's own, of the nodes of this job
        self._suspend_detector.close(self._seconds())
        heartbeats = state.last_heartbeats
        moments = {**heartbeats, None: state.deadline} if state.deadline else dict(heartbeats)
        self._last_state = {key: self._look(key, moment) for key, moment in moments.items()}
        for node in heartbeats:
            heartbeats[node] = self._last_state[node].local
        if state.deadline:
            state.deadline = self._last_state[None].local
        return pickle.dumps(state)

    def _look(self, key: Any, moment: datetime) -> _ObservedTime:
        last_state, now_seconds = self._last_state.get(key), self._seconds()
        is_new = last_state is None or last_state.raw != moment
        at_seconds = now_seconds if is_new or last_state is None else last_state.at_seconds
        lasts_seconds = self._last_call_seconds if key is None else 0.0
        left_seconds = self._suspend_detector.shifted(at_seconds) + lasts_seconds - now_seconds
        own_time = datetime.now(UTC) + timedelta(seconds=left_seconds)
        return _ObservedTime(moment, at_seconds, own_time)

    def _encode_state(self, data: bytes) -> bytes:
        state = pickle.loads(data)  # noqa: S301 - this node's own
        for node, moment in state.last_heartbeats.items():
            state.last_heartbeats[node] = self._raw(node, moment)
        if state.deadline:
            state.deadline = self._raw(None, state.deadline)
        return pickle.dumps(state)

    def _raw(self, key: Any, moment: datetime) -> datetime:
        """Return a time as its node wrote it; a time just set by this node is unchanged."""
        last_state = self._last_state.get(key)
        return last_state.raw if last_state and last_state.local == moment else moment


def use_local_clock(handler: RendezvousHandler) -> RendezvousHandler:
    """Make a node of a dynamic rendezvous use only its own clock; return the handler.

    A static rendezvous has no heartbeats and is unchanged.
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


_PUBLISH_SECONDS_MAX = 60.0
"""Time that a member may publish nothing although its heartbeats arrive."""
_POLL_SECONDS = 0.01
_POLL_SECONDS_MAX = 0.2


class MemberSilent(RendezvousError):
    """A member of a round left before the attempt could start; the others join again."""


class RoundStore:
    """Store of one round whose waits end when a member of the round is gone.

    All other calls go to the inner store.

    Args:
        inner: Inner store.
        handler: Rendezvous handler that has just joined the round.

    Attributes:
        members: Position of each member in the round.
        round: Number of the round.

    Raises:
        MemberSilent: A member is already gone, by the state in this node's cache.
    """

    def __init__(self, inner: Any, handler: RendezvousHandler) -> None:
        self._inner = inner
        self._handler = handler
        state = _state_of(handler)
        self.round = state.round
        self.members: Mapping[Any, int] = dict(state.participants)
        _require_complete(self.members, handler)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the inner store."""
        return getattr(self._inner, name)

    def get(self, key: str) -> Any:
        """Return a value once it exists.

        Raises:
            MemberSilent: A member is gone, or no member set the value in time.
            RendezvousError: The rendezvous does not answer.
        """
        self._wait([key])
        return self._inner.get(key)

    def multi_get(self, keys: Sequence[str]) -> Any:
        """Return values once all exist; see :meth:`get`."""
        self._wait(list(keys))
        return self._inner.multi_get(list(keys))

    def _wait(self, keys: list[str]) -> None:
        deadline_seconds = time.monotonic() + _PUBLISH_SECONDS_MAX
        pause_seconds = _POLL_SECONDS
        while not self._inner.check(keys):
            self._require_members()
            if time.monotonic() > deadline_seconds:
                raise MemberSilent(f"no member published {keys} within {_PUBLISH_SECONDS_MAX:g} s")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _POLL_SECONDS_MAX)

    def _require_members(self) -> None:
        """Raise if a member left the round, by torch's state of the last second."""
        self._handler.num_nodes_waiting()
        state = _state_of(self._handler)
        lost_hosts = [
            str(member.addr) for member in self.members if member not in state.participants
        ]
        if lost_hosts or state.round != self.round:
            hosts_text = ", ".join(lost_hosts) or "all of them"
            raise MemberSilent(f"rendezvous aborted: {hosts_text} left before the workers started")


def _state_of(handler: Any) -> Any:
    return handler._state_holder.state  # noqa: SLF001 - no public way


def _require_complete(members: Mapping[Any, int], handler: Any) -> None:
    """Raise if a position of the round has no member, or too few members are left.

    torch drops a silent node from a complete round without a new count. A node that reads the state
    then sees a smaller world than the others see, or smaller than the minimum.
    """
    nodes_min = handler.settings.min_nodes
    if sorted(members.values()) != list(range(len(members))) or len(members) < nodes_min:
        raise MemberSilent(
            f"a node stopped responding during the rendezvous: {len(members)} are left, in the "
            f"places {sorted(members.values())}, and {nodes_min} are needed"
        )


def end_waits_with_members(handler: RendezvousHandler) -> RendezvousHandler:
    """Make waits for members of a round end when a member is gone; return the handler.

    A static rendezvous has no heartbeats and is unchanged.
    """
    store_of_round = getattr(handler, "_get_store", None)
    if store_of_round is not None and hasattr(handler, "_state_holder"):
        current: Any = handler
        current._get_store = lambda: RoundStore(store_of_round(), handler)  # noqa: SLF001 - see above
    return handler
