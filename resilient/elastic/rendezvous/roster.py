"""Roster of the nodes of an attempt: lost nodes, leaving nodes, and reachable hosts.

An agent that gets a stop request publishes the request in the rendezvous store before it signals
its ranks. The ranks of the other hosts end later. The agents of these hosts can then read the
request.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch.distributed as dist

from resilient.distributed.kv_store import limit_silence
from resilient.elastic.rendezvous.connect import RoundStore
from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from resilient.events import Emitter

T = TypeVar("T")

_ANSWER_SECONDS = 1.0
# A host may have several addresses, and its name must be resolved.
_ASKED_SECONDS = 3.0
_PROBED_AT_ONCE_MAX = 32
# tcpmux: a running host refuses the connection, or even accepts it.
_PROBED_PORT = 1


def probe_hosts(addresses: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the hosts that answer, where only the agent is gone, and the hosts without an answer.

    A host behind a firewall looks like a lost host.
    """
    answers = _query_hosts(_answers, addresses, otherwise=lambda _: False)
    hosts = sorted(answers)
    return [agent for agent in hosts if answers[agent]], [
        agent for agent in hosts if not answers[agent]
    ]


def _query_hosts(
    question: Callable[[str], T], hosts: Iterable[str], otherwise: Callable[[str], T]
) -> dict[str, T]:
    """Query hosts in parallel, and return the results known by the deadline of each.

    Args:
        question: Query that a silent resolver may block; it cannot be interrupted.
        hosts: Names or addresses.
        otherwise: Result for a host without an answer in time.
    """

    def ask(host: str) -> T:
        answers: list[T] = []
        thread = threading.Thread(
            target=lambda: answers.append(question(host)), name="ask-host", daemon=True
        )
        thread.start()
        thread.join(_ASKED_SECONDS)
        return answers[0] if answers else otherwise(host)

    hosts_asked = sorted(set(hosts))
    if not hosts_asked:
        return {}
    with ThreadPool(min(len(hosts_asked), _PROBED_AT_ONCE_MAX)) as pool:
        return dict(zip(hosts_asked, pool.map(ask, hosts_asked), strict=True))


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, _PROBED_PORT), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def addresses_of(hosts: Iterable[str]) -> dict[str, set[str]]:
    """Return the addresses of hosts; a host that does not resolve maps to its name."""
    return _query_hosts(_resolved, hosts, otherwise=lambda host: {host} - {""})


def _resolved(host: str) -> set[str]:
    if not host:
        return set()
    try:
        return {str(address[4][0]) for address in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


def limit_silence_toward(port: int, seconds: float) -> None:
    """Make calls to a store at ``port`` fail when the store's host vanishes.

    torch's store waits for an answer until its timeout, and then cancels the query. The store waits
    without a limit for the answer to the cancellation (2.13: ``TCPStore::doWait``).

    Args:
        port: Port of the store, on any host.
        seconds: Time of silence after which the kernel ends a connection.
    """
    for connection in _open_sockets():
        with suppress(OSError):
            if connection.getpeername()[1] == port:
                limit_silence(connection, seconds)


def is_served_here(handler: Any) -> bool:
    """Return whether the store of a rendezvous ends with this process.

    torch does not report which of several agents on a host serves the store.
    """
    port = getattr(getattr(handler, "_store", None), "port", None)
    return port is not None and any(_listens_at(listener, port) for listener in _open_sockets())


def _listens_at(listener: socket.socket, port: int) -> bool:
    with suppress(OSError):
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and listener.getsockname()[1] == port
    return False


def _open_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each open TCP socket; the copy is closed when the next one comes."""
    for path in list(Path("/proc/self/fd").iterdir()):
        # A descriptor may be any file, and may be closed meanwhile.
        with suppress(OSError):
            copy = os.dup(int(path.name))
            try:
                duplicate = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with duplicate:
                if duplicate.type == socket.SOCK_STREAM and duplicate.family != socket.AF_UNIX:
                    yield duplicate


class LeaveScope(Enum):
    """Message of a host that got a stop request."""

    ALONE = "alone"
    """Only this host is known to leave."""
    WITH_ALL = "all"
    """The request is for the whole run."""
    WITH_RENDEZVOUS = "rendezvous"
    """The host serves the rendezvous, so no node can join again without it."""


@dataclass(frozen=True, slots=True)
class HostsReleased(Event):
    """Some hosts got a stop request. All hosts saved, and the other hosts continue without them.

    Attributes:
        hosts: Addresses of the leaving hosts.
        nodes_left: Number of hosts that were not asked.
        nodes_min: Smallest number of nodes to train with.
        nodes_max: Largest number of nodes to train with.
    """

    level: ClassVar[Level] = Level.WARNING
    hosts: list[str]
    nodes_left: int
    nodes_min: int
    nodes_max: int

    def message(self) -> str:
        """Return the message: leaving hosts and remaining hosts."""
        verb = "leaves" if len(self.hosts) == 1 else "leave"
        continue_text = "host continues" if self.nodes_left == 1 else "hosts continue"
        return (
            f"{', '.join(self.hosts)} {verb}; {self.nodes_left} {continue_text} "
            f"(--nnodes {self.nodes_min}:{self.nodes_max})"
        )


def hosts_that_stay(scopes: Collection[str], nodes: int, nodes_min: int) -> int:
    """Return the number of hosts that continue without the leaving hosts; 0 if none does.

    Args:
        scopes: Messages of the leaving hosts, values of :class:`LeaveScope`.
        nodes: Number of nodes of the ended attempt; a fixed number of hosts must be complete.
        nodes_min: Smallest number of nodes to train with.
    """
    # Without a message the stop may be for all hosts: a rank received it, or the script stops.
    is_for_some = bool(scopes) and all(scope == LeaveScope.ALONE.value for scope in scopes)
    staying_nodes = nodes - len(scopes)
    return staying_nodes if is_for_some and staying_nodes >= nodes_min else 0


# A node that starts again is in no list for a moment, and the cached state is up to 1 s old.
_ABSENT_SECONDS = 2.5
_REGROUPING = "resilient/regrouping"
_STAYS = b"stays"
_PUBLISH_SECONDS = 0.5
_TOGETHER = 2


@dataclass(frozen=True, slots=True)
class NodesLost(Event):
    """Nodes of an attempt stopped their heartbeats without a leave message.

    Attributes:
        agents: Addresses of hosts that answer, where only the agent died.
        hosts: Addresses that do not answer: the host is gone, or its network is cut.
        nodes_left: Number of remaining nodes of that attempt.
    """

    level: ClassVar[Level] = Level.WARNING
    agents: list[str]
    hosts: list[str]
    nodes_left: int

    def message(self) -> str:
        """Return the message: lost agents, lost hosts and the remaining number."""
        agents = f"agent lost on {', '.join(self.agents)} (the host answers)" * bool(self.agents)
        hosts = f"host lost: {', '.join(self.hosts)} (no answer)" * bool(self.hosts)
        return f"{'; '.join(filter(None, (agents, hosts)))}; {self.nodes_left} left"


class Roster:
    """Nodes of one attempt.

    torch's rendezvous removes a node whose heartbeats stop, without any report. The roster
    therefore reads the state of the rendezvous. A static rendezvous has no heartbeats, so its nodes
    never count as lost.

    Args:
        handler: Handler of the rendezvous that the nodes have just joined.
        store: Store of this round, whose member list may be newer than the handler's; None before
            the first round.
        emit: Listener for losses.
    """

    def __init__(self, handler: RendezvousHandler, store: Any, emit: Emitter) -> None:
        self._handler = handler
        self._store = store
        round_store: Any = store if isinstance(store, RoundStore) else None
        state = _state_of(handler)
        self._round = round_store.round if round_store else getattr(state, "round", 0)
        self._nodes: Mapping[Any, int] = dict(
            round_store.members if round_store else getattr(state, "participants", {})
        )
        self._missing_since_seconds: dict[Any, float] = {}
        self._emit = emit
        self._is_reported = False
        self._left_nodes: frozenset[Any] = frozenset()

    @property
    def nodes(self) -> int:
        """Number of nodes; 0 if the rendezvous does not report it."""
        return len(self._nodes)

    def is_of(self, handler: RendezvousHandler) -> bool:
        """Return whether the nodes joined by ``handler``; other handlers have other node ids."""
        return self._handler is handler

    def lost(self, now_seconds: float) -> list[str]:
        """Return the addresses of nodes that have been absent for more than 2.5 s.

        Raises:
            dist.DistError: The store does not answer.
        """
        missing_nodes = self._missing()
        since_seconds = {
            node: self._missing_since_seconds.get(node, now_seconds) for node in missing_nodes
        }
        self._missing_since_seconds = since_seconds
        return [
            str(node.addr)
            for node, seconds in since_seconds.items()
            if now_seconds - seconds > _ABSENT_SECONDS and not self._has_left(node)
        ]

    def left(self) -> list[int]:
        """Return the positions of nodes that have left this round, by the cached state."""
        state = _state_of(self._handler)
        if state is None or state.round == self._round:
            participants = self._nodes if state is None else state.participants
            return [place for node, place in self._nodes.items() if node not in participants]
        return list(self._nodes.values())

    def publish_regrouping(self, *, is_joined: bool) -> None:
        """Publish that ranks are stopped for a new rendezvous, before any rank is stopped.

        Args:
            is_joined: Whether the reason is nodes that want to join.
        """
        if self.nodes > 1:
            with suppress(dist.DistError):
                self._store.set(_REGROUPING, "joined" if is_joined else "left")

    def published_regrouping(self) -> str:
        """Return another node's reason for a new rendezvous: `joined`, `left`, or empty for none.

        A node that was dropped from the round without a goodbye is about to join again.

        Raises:
            dist.DistError: The store does not answer.
        """
        if self.nodes > 1 and self._store.check([_REGROUPING]):
            return bytes(self._store.get(_REGROUPING)).decode()
        is_left = not all(self._store.check([_goodbye_key(place)]) for place in self.left())
        return "left" if is_left else ""

    def reset_absence_times(self) -> None:
        """Reset all absence times, after a time in which this agent did not poll."""
        self._missing_since_seconds = {}

    def missing(self) -> list[str]:
        """Return the addresses of nodes that are absent after another rendezvous.

        Nodes that got a stop request do not count. The store of the round is gone with its host.
        """
        return [str(node.addr) for node in self._missing() if node not in self._left_nodes]

    def report_missing(self) -> list[str]:
        """Report the nodes that are absent after another rendezvous, and return their addresses."""
        missing_nodes = self.missing()
        self.report_lost(missing_nodes)
        return missing_nodes

    def report_lost(self, addresses: list[str]) -> None:
        """Report once the loss of these nodes, and which of their hosts answer."""
        if not addresses or self._is_reported:
            return
        self._is_reported = True
        agents, hosts = probe_hosts(addresses)
        self._emit(NodesLost(agents, hosts, self.nodes - len(addresses)))

    def report_silent_nodes(self) -> None:
        """Report the lost nodes once, if the rendezvous itself is silent.

        These are the node that served the rendezvous, and other nodes whose hosts do not answer.
        The state of the remaining agents is unknown. If none of the nodes served the rendezvous,
        none is reported.
        """
        own_node: Any = getattr(self._handler, "_this_node", None)
        peer_addresses = [str(node.addr) for node in self._nodes if node != own_node]
        if own_node not in self._nodes or not peer_addresses or self._is_reported:
            return
        answering_hosts, silent_hosts = probe_hosts(peer_addresses)
        server = _served_at(self._handler)
        addresses = addresses_of({server, *peer_addresses})
        agents = [agent for agent in answering_hosts if addresses[server] & addresses[agent]]
        # If no host answers, this host may be the one that is cut off.
        hosts = (
            silent_hosts
            if answering_hosts
            else [agent for agent in silent_hosts if addresses[server] & addresses[agent]]
        )
        if agents or hosts:
            self._is_reported = True
            self._emit(NodesLost(agents, hosts, self.nodes - len(agents) - len(hosts)))

    def publish_leave(self, node: int | None) -> None:
        """Publish that this node leaves because all ranks agreed to.

        The other nodes may still save, and must not be stopped as early as after the loss of a
        node.
        """
        # Without the store no node is left to read the goodbye.
        if node is not None and self.nodes > 1:
            with suppress(dist.DistError):
                self._store.set(_goodbye_key(node), "1")

    def publish_stop_request(self, *, is_for_all: bool) -> None:
        """Publish the stop request of this node, before its ranks get the request."""
        place = self._place
        if place is None or self.nodes < _TOGETHER:
            return
        scope = LeaveScope.WITH_ALL if is_for_all else LeaveScope.ALONE
        if is_served_here(self._handler):
            scope = LeaveScope.WITH_RENDEZVOUS
        # The ranks receive the request in any case: the node that serves the store may be gone.
        thread = threading.Thread(
            target=self._publish,
            args=(_leave_request_key(place), scope.value),
            name="say-asked",
            daemon=True,
        )
        thread.start()
        thread.join(_PUBLISH_SECONDS)

    def stay(self) -> int:
        """Return the number of nodes that continue without the leaving nodes; 0 if all leave.

        Only for a node without a stop request, once its ranks have ended. The node publishes that
        it stays, and the leaving nodes wait for this message. If the store does not answer, all
        nodes leave.
        """
        settings: Any = getattr(self._handler, "settings", None)
        if self._place is None or settings is None or self.nodes < _TOGETHER:
            return 0
        with suppress(dist.DistError):
            scope_by_node = {
                node: self._read(_leave_request_key(place)) for node, place in self._nodes.items()
            }
            scope_by_leaver = {
                node: scope.decode() for node, scope in scope_by_node.items() if scope
            }
            staying_nodes = hosts_that_stay(
                [*scope_by_leaver.values()], self.nodes, settings.min_nodes
            )
            if staying_nodes:
                self._left_nodes = frozenset(scope_by_leaver)
                self._store.set(_goodbye_key(self._place), _STAYS)
                hosts = sorted(str(member.addr) for member in scope_by_leaver)
                self._emit(
                    HostsReleased(hosts, staying_nodes, settings.min_nodes, settings.max_nodes)
                )
            return staying_nodes
        return 0

    def is_continued_without(self) -> bool:
        """Return whether other nodes published that they continue without this node."""
        peer_places = (place for place in self._nodes.values() if place != self._place)
        with suppress(dist.DistError):
            return any(self._read(_goodbye_key(place)) == _STAYS for place in peer_places)
        return False

    def has_waiting_nodes(self) -> bool:
        """Return whether nodes wait for a position in the world, by the cached state."""
        state = _state_of(self._handler)
        return bool(state and (state.wait_list or state.redundancy_list))

    def waits_for_leaving_nodes(self, node: int | None) -> bool:
        """Return whether another node is still in the round and has not confirmed its exit."""
        departed_places = self.left()
        if node is None or node in departed_places:
            return False
        remaining_places = set(self._nodes.values()) - {node, *departed_places}
        # Without the store, the node that served it is gone too.
        with suppress(dist.DistError):
            return not all(self._store.check([_goodbye_key(place)]) for place in remaining_places)
        return False

    @property
    def _place(self) -> int | None:
        """Position of this node in the round."""
        return self._nodes.get(getattr(self._handler, "_this_node", None))

    def _publish(self, key: str, value: str) -> None:
        with suppress(dist.DistError):
            self._store.set(key, value)

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _missing(self) -> list[Any]:
        state = _state_of(self._handler)
        if state is None:
            return []
        present_nodes = {*state.participants, *state.wait_list, *state.redundancy_list}
        return [node for node in self._nodes if node not in present_nodes]

    def _has_left(self, node: Any) -> bool:
        return bool(self._store.check([_goodbye_key(self._nodes[node])]))


def _served_at(handler: RendezvousHandler) -> str:
    """Return the host of the rendezvous; empty if no single process serves it."""
    return str(getattr(getattr(handler, "_store", None), "host", ""))


def _goodbye_key(node: int) -> str:
    return f"resilient/goodbye/{node}"


def _leave_request_key(node: int) -> str:
    return f"resilient/asked/{node}"


def _state_of(handler: RendezvousHandler) -> Any:
    holder: Any = getattr(handler, "_state_holder", None)
    return None if holder is None else holder.state
