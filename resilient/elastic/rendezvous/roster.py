"""Nodes of a round: lost, leaving, answering.

Which hosts answer, and where they are; each is asked for a moment only.

The agent's connections to the rendezvous, which torch opens and keeps to itself.

Hosts that are asked to leave while others are not: what they say, and who goes on (pure).

Each agent that is asked says so in the store of the round before its ranks are told, so that it
stands there when the ranks of the others end. Whoever was not asked reads it then.

The nodes of one life, and which of them have gone without a word.
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
# A host may have several addresses, and its name has to be resolved.
_ASKED_SECONDS = 3.0
_PROBED_AT_ONCE_MAX = 32
# tcpmux: whoever is there refuses it, or even accepts.
_PROBED_PORT = 1


def who_answers(addresses: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return which hosts are there, so only their agents have gone, and which do not answer.

    A host that a firewall hides looks like one that is gone.
    """
    answers = _asked(_answers, addresses, otherwise=lambda _: False)
    found = sorted(answers)
    return [one for one in found if answers[one]], [one for one in found if not answers[one]]


def _asked(
    question: Callable[[str], T], hosts: Iterable[str], otherwise: Callable[[str], T]
) -> dict[str, T]:
    """Ask something of hosts at once, and return what is known by the deadline of each.

    Args:
        question: may be held by a resolver that does not answer, which nothing can interrupt.
        hosts: names or addresses.
        otherwise: the answer for one of whom nothing is known in time.
    """

    def ask(host: str) -> T:
        told: list[T] = []
        thread = threading.Thread(
            target=lambda: told.append(question(host)), name="ask-host", daemon=True
        )
        thread.start()
        thread.join(_ASKED_SECONDS)
        return told[0] if told else otherwise(host)

    found = sorted(set(hosts))
    if not found:
        return {}
    with ThreadPool(min(len(found), _PROBED_AT_ONCE_MAX)) as pool:
        return dict(zip(found, pool.map(ask, found), strict=True))


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, _PROBED_PORT), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def addresses_of(hosts: Iterable[str]) -> dict[str, set[str]]:
    """Return the addresses of hosts; the name of one that none is known of."""
    return _asked(_resolved, hosts, otherwise=lambda one: {one} - {""})


def _resolved(host: str) -> set[str]:
    if not host:
        return set()
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


def limit_silence_toward(port: int, seconds: float) -> None:
    """Let calls to a store at ``port`` fail when its host vanishes without a word.

    Torch's store waits for an answer no longer than its timeout, then takes the question back
    and waits for the answer to that without end (2.13: ``TCPStore::doWait``).

    Args:
        port: of the store, on whichever host.
        seconds: of silence until the kernel ends a connection.
    """
    for connection in _open_sockets():
        with suppress(OSError):
            if connection.getpeername()[1] == port:
                limit_silence(connection, seconds)


def is_served_here(handler: Any) -> bool:
    """Say whether the store of a rendezvous ends with this process.

    Torch does not tell which of several agents on a host has come first and listens.
    """
    port = getattr(getattr(handler, "_store", None), "port", None)
    return port is not None and any(_listens_at(one, port) for one in _open_sockets())


def _listens_at(one: socket.socket, port: int) -> bool:
    with suppress(OSError):
        is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and one.getsockname()[1] == port
    return False


def _open_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each TCP socket that is open here, closed when the next one comes."""
    for one in list(Path("/proc/self/fd").iterdir()):
        # Anything may be open, and may be closed meanwhile.
        with suppress(OSError):
            copy = os.dup(int(one.name))
            try:
                found = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with found:
                if found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX:
                    yield found


class LeaveScope(Enum):
    """What a host says that was asked to leave."""

    ALONE = "alone"
    """Of this host alone is known that it goes."""
    WITH_ALL = "all"
    """The request was for the whole run."""
    WITH_RENDEZVOUS = "rendezvous"
    """It serves the rendezvous: without it nobody meets again."""


@dataclass(frozen=True, slots=True)
class HostsReleased(Event):
    """Some hosts were asked to leave and saved with all others, who go on without them.

    Attributes:
        hosts: addresses of those that leave.
        nodes_left: how many were not asked.
        nodes_min: fewest that train.
        nodes_max: most that train.
    """

    level: ClassVar[Level] = Level.WARNING
    hosts: list[str]
    nodes_left: int
    nodes_min: int
    nodes_max: int

    def line(self) -> str:
        """Say who leaves, and who goes on."""
        verb = "leaves" if len(self.hosts) == 1 else "leave"
        on = "host goes" if self.nodes_left == 1 else "hosts go"
        return (
            f"{', '.join(self.hosts)} {verb}; "
            f"{self.nodes_left} of {self.nodes_min}:{self.nodes_max} {on} on"
        )


def hosts_that_stay(asked: Collection[str], nodes: int, nodes_min: int) -> int:
    """Return how many hosts go on without those that were asked to leave, 0 if none does.

    Args:
        asked: what each of those said, a value of :class:`Asked`.
        nodes: of the life that ended; of a fixed number of hosts none may be missing.
        nodes_min: fewest that train.
    """
    # If nobody says so it may be meant for all: a rank was told, or the script stops.
    is_for_some = bool(asked) and all(how == LeaveScope.ALONE.value for how in asked)
    left = nodes - len(asked)
    return left if is_for_some and left >= nodes_min else 0


# A node that starts again is nowhere for a moment, and what the handler knows is up to 1 s old.
_NOWHERE_SECONDS = 2.5
_REGROUPING = "resilient/regrouping"
_STAYS = b"stays"
_SAYING_SECONDS = 0.5
_TOGETHER = 2


@dataclass(frozen=True, slots=True)
class NodesLost(Event):
    """Nodes of a life are gone without a word: no heartbeat came from them any more.

    Attributes:
        agents: addresses of hosts that answer, so only their agents have died.
        hosts: addresses that do not answer: the host is gone, or the network to it is cut.
        nodes_left: how many nodes of that life are left.
    """

    level: ClassVar[Level] = Level.WARNING
    agents: list[str]
    hosts: list[str]
    nodes_left: int

    def line(self) -> str:
        """Say who is gone, as far as that can be told from here."""
        agents = f"agent lost on {', '.join(self.agents)} (the host answers)" * bool(self.agents)
        hosts = f"host lost: {', '.join(self.hosts)} (no answer)" * bool(self.hosts)
        return f"{'; '.join(filter(None, (agents, hosts)))}; {self.nodes_left} left"


class Roster:
    """Who met for a life.

    Torch's rendezvous forgets a node whose heartbeats stop, and says so to nobody: its state is
    read. A static rendezvous knows no heartbeats, so its nodes are never missed.

    Args:
        handler: of the rendezvous that the nodes have just met at.
        store: of this round of it, which may know who met better than the handler does by now;
            None before the first.
        emit: where losses are told.
    """

    def __init__(self, handler: RendezvousHandler, store: Any, emit: Emitter) -> None:
        self._handler = handler
        self._store = store
        known: Any = store if isinstance(store, RoundStore) else None
        state = _state_of(handler)
        self._round = known.round if known else getattr(state, "round", 0)
        self._nodes: Mapping[Any, int] = dict(
            known.members if known else getattr(state, "participants", {})
        )
        self._missing_since_seconds: dict[Any, float] = {}
        self._emit = emit
        self._is_told = False
        self._parted: frozenset[Any] = frozenset()

    @property
    def nodes(self) -> int:
        """How many they were; 0 if the rendezvous does not say."""
        return len(self._nodes)

    def is_of(self, handler: RendezvousHandler) -> bool:
        """Whether these met through a handler; another one knows them by other names."""
        return self._handler is handler

    def lost(self, now_seconds: float) -> list[str]:
        """Return the addresses of nodes that have been nowhere for long enough.

        Raises:
            dist.DistError: the store does not answer.
        """
        missing = self._missing()
        since_seconds = {
            node: self._missing_since_seconds.get(node, now_seconds) for node in missing
        }
        self._missing_since_seconds = since_seconds
        return [
            str(node.addr)
            for node, seconds in since_seconds.items()
            if now_seconds - seconds > _NOWHERE_SECONDS and not self._said_goodbye(node)
        ]

    def left(self) -> list[int]:
        """Return the places of nodes that do not hold this round any more, by what was heard."""
        state = _state_of(self._handler)
        if state is None or state.round == self._round:
            there = self._nodes if state is None else state.participants
            return [place for node, place in self._nodes.items() if node not in there]
        return list(self._nodes.values())

    def say_regrouping(self, *, is_joined: bool) -> None:
        """Let the others know that ranks are stopped to meet again, before any of them is.

        Args:
            is_joined: whether that is for nodes that want to join.
        """
        if self.nodes > 1:
            with suppress(dist.DistError):
                self._store.set(_REGROUPING, "joined" if is_joined else "left")

    def heard_regrouping(self) -> str:
        """Return why another node meets the others again: `joined`, `left`, or empty if none does.

        One that was dropped from the round and has not said goodbye is on its way to do so.

        Raises:
            dist.DistError: the store does not answer.
        """
        if self.nodes > 1 and self._store.check([_REGROUPING]):
            return bytes(self._store.get(_REGROUPING)).decode()
        is_left = not all(self._store.check([_goodbye_key(place)]) for place in self.left())
        return "left" if is_left else ""

    def forgive(self) -> None:
        """Let nodes that were missed be missed anew: nobody looked for them for a while."""
        self._missing_since_seconds = {}

    def missing(self) -> list[str]:
        """Return the addresses of nodes that are not there now, after another rendezvous.

        Those that were asked to leave are none. The store of the round is gone with a host.
        """
        return [str(node.addr) for node in self._missing() if node not in self._parted]

    def tell_missing(self) -> list[str]:
        """Tell who is not there after another rendezvous, and return their addresses."""
        missing = self.missing()
        self.tell(missing)
        return missing

    def tell(self, addresses: list[str]) -> None:
        """Tell that these nodes of the life are gone, once, and whether their hosts answer."""
        if not addresses or self._is_told:
            return
        self._is_told = True
        agents, hosts = who_answers(addresses)
        self._emit(NodesLost(agents, hosts, self.nodes - len(addresses)))

    def tell_silence(self) -> None:
        """Tell who of the life is gone where the rendezvous itself has fallen silent, once.

        That is whoever served it, and of the others those whose hosts do not answer: what became
        of the other agents nobody can ask any more. Where none of them served it, none is accused.
        """
        own: Any = getattr(self._handler, "_this_node", None)
        others = [str(one.addr) for one in self._nodes if one != own]
        if own not in self._nodes or not others or self._is_told:
            return
        there, silent = who_answers(others)
        server = _served_at(self._handler)
        found = addresses_of({server, *others})
        agents = [one for one in there if found[server] & found[one]]
        # Where nobody answers it may be this host that is cut off.
        hosts = silent if there else [one for one in silent if found[server] & found[one]]
        if agents or hosts:
            self._is_told = True
            self._emit(NodesLost(agents, hosts, self.nodes - len(agents) - len(hosts)))

    def say_goodbye(self, node: int | None) -> None:
        """Let the others know that this node leaves because all ranks agreed to.

        They may still save, and must not be hurried as they are when a node is lost.
        """
        # If the store is gone, nobody is left to hear it.
        if node is not None and self.nodes > 1:
            with suppress(dist.DistError):
                self._store.set(_goodbye_key(node), "1")

    def say_asked(self, *, is_for_all: bool) -> None:
        """Let the others know that this node was asked to leave, before its ranks are told."""
        place = self._place
        if place is None or self.nodes < _TOGETHER:
            return
        how = LeaveScope.WITH_ALL if is_for_all else LeaveScope.ALONE
        if is_served_here(self._handler):
            how = LeaveScope.WITH_RENDEZVOUS
        # The ranks are told whatever became of whoever serves the store: it may be gone just now.
        thread = threading.Thread(
            target=self._say, args=(_asked_key(place), how.value), name="say-asked", daemon=True
        )
        thread.start()
        thread.join(_SAYING_SECONDS)

    def stay(self) -> int:
        """Return how many nodes go on without those that were asked to leave, 0 if all leave.

        Only for one that was not asked, once its ranks have ended: it says that it stays, which
        those that leave wait for. A store that does not answer tells nothing, so all leave.
        """
        settings: Any = getattr(self._handler, "settings", None)
        if self._place is None or settings is None or self.nodes < _TOGETHER:
            return 0
        with suppress(dist.DistError):
            asked = {node: self._read(_asked_key(place)) for node, place in self._nodes.items()}
            leaving = {node: how.decode() for node, how in asked.items() if how}
            left = hosts_that_stay([*leaving.values()], self.nodes, settings.min_nodes)
            if left:
                self._parted = frozenset(leaving)
                self._store.set(_goodbye_key(self._place), _STAYS)
                hosts = sorted(str(one.addr) for one in leaving)
                self._emit(HostsReleased(hosts, left, settings.min_nodes, settings.max_nodes))
            return left
        return 0

    def is_outlasted(self) -> bool:
        """Say whether others of the round go on without this node, as far as they said so."""
        others = (place for place in self._nodes.values() if place != self._place)
        with suppress(dist.DistError):
            return any(self._read(_goodbye_key(place)) == _STAYS for place in others)
        return False

    def has_spares(self) -> bool:
        """Say whether nodes wait for room in the world, by what was heard."""
        state = _state_of(self._handler)
        return bool(state and (state.wait_list or state.redundancy_list))

    def waits_for_goodbyes(self, node: int | None) -> bool:
        """Say whether any of those that hold the round with ``node`` has not said goodbye."""
        left = self.left()
        if node is None or node in left:
            return False
        others = set(self._nodes.values()) - {node, *left}
        # If the store is gone, so is whoever served it.
        with suppress(dist.DistError):
            return not all(self._store.check([_goodbye_key(one)]) for one in others)
        return False

    @property
    def _place(self) -> int | None:
        """Where this node is in the round."""
        return self._nodes.get(getattr(self._handler, "_this_node", None))

    def _say(self, key: str, word: str) -> None:
        with suppress(dist.DistError):
            self._store.set(key, word)

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _missing(self) -> list[Any]:
        state = _state_of(self._handler)
        if state is None:
            return []
        there = {*state.participants, *state.wait_list, *state.redundancy_list}
        return [node for node in self._nodes if node not in there]

    def _said_goodbye(self, node: Any) -> bool:
        return bool(self._store.check([_goodbye_key(self._nodes[node])]))


def _served_at(handler: RendezvousHandler) -> str:
    """Return the host of the rendezvous; empty where it is not one process that serves it."""
    return str(getattr(getattr(handler, "_store", None), "host", ""))


def _goodbye_key(node: int) -> str:
    return f"resilient/goodbye/{node}"


def _asked_key(node: int) -> str:
    return f"resilient/asked/{node}"


def _state_of(handler: RendezvousHandler) -> Any:
    holder: Any = getattr(handler, "_state_holder", None)
    return None if holder is None else holder.state
