"""One rank's place at the keeper: its memory, its job in flight, the verdict.

From the moment a hand-over is acknowledged the rank's death changes nothing: the seat has the
bytes, a connection of its own to the board, and a thread that persists. A rank that announced a
job and died before it handed it over has left a will on the board, so its peers fail at once.
Memory is only ever writable for the one process that it was reserved for: a stale process can
never scribble over what a newer one staged.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.events import Emitter, Level, console, json_lines
from resilient.format.signature import Signing, SigningKey
from resilient.storage.open import open_store
from resilient.vault.desk import Desk, Limits
from resilient.vault.glimpse import Glimpses
from resilient.vault.handover import Held, from_json
from resilient.vault.persist import persist
from resilient.vault.space import space_topic
from resilient.world.agreement import Failure, attempt
from resilient.world.comms import Comms
from resilient.world.sockets import Address, SocketBoard
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.format.manifest import Receipt
    from resilient.storage.store import Store
    from resilient.vault.persist import Job
    from resilient.vault.room import Room, Segment

PROTOCOL_VERSION = 2
_SLICE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Guest:
    """Who sits here, as it said when it came."""

    url: str
    store: Store
    world: World
    scope: str
    limits: Limits
    events: str
    signing: Signing


class Seat:
    """Answers one rank, request by request; used by the thread of its connection.

    Args:
        room: the memory of this host.
        vacate: called before this rank's first bytes: what past ranks held may go.
    """

    def __init__(self, room: Room, vacate: Callable[[], None]) -> None:
        self._room = room
        self._vacate = vacate
        self._guest: Guest | None = None
        self._board: SocketBoard | None = None
        self._segments: dict[str, Segment] = {}
        self._held: dict[str, Held] = {}
        self._glimpses = Glimpses()
        self._verdict: Any = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_left = False
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a job is in flight."""
        return not self._is_idle.is_set()

    @property
    def is_left(self) -> bool:
        """Whether the rank is gone."""
        return self._is_left

    @property
    def url(self) -> str:
        """The repository that this rank saves to; empty before it said so."""
        return self._guest.url if self._guest else ""

    @property
    def held(self) -> Mapping[str, Held]:
        """Files of the newest checkpoint that was committed from here and not staged over."""
        return self._held

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the rank asks and return what to send back; never raises."""
        verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "join": self._join,
            "reserve": self._reserve,
            "begin": self._begin,
            "save": self._save,
            "wait": self._wait,
        }
        verb = verbs.get(str(asked.get("verb")))
        if verb is None:
            return Failure(UsageError.code, f"no verb {asked.get('verb')!r:.40}").to_json()
        done = attempt(partial(verb, asked))
        return done.to_json() if isinstance(done, Failure) else done

    def leave(self) -> None:
        """The rank is gone: let go of what no job in flight needs."""
        with self._lock:
            self._is_left = True
            if not self.is_busy:
                self._let_go()

    def forget(self) -> None:
        """Give all memory back; only of a seat that is left and not busy."""
        with self._lock:
            self._held = {}
            self._give_back()

    def _hello(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked["version"] != PROTOCOL_VERSION:
            raise UsageError(f"version {asked['version']} and this keeper's {PROTOCOL_VERSION}")
        rank, size, local_rank = (int(one) for one in asked["world"])
        self._guest = Guest(
            url=str(asked["url"]),
            store=open_store(str(asked["url"]), storage_options=asked["storage_options"]),
            world=World(rank, size, local_rank),
            scope=str(asked["scope"]),
            limits=Limits.from_json(asked["limits"]),
            events=str(asked["events"]),
            signing=_signing(str(asked.get("signing_key", ""))),
        )
        return {}

    def _join(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._board = SocketBoard(Address.from_json(asked["board"]))
        return {}

    def _reserve(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        name, size_bytes = str(asked["name"]), int(asked["size_bytes"])
        held = self._segments.get(name)
        if held is None or held.size_bytes < size_bytes:
            if held is not None:
                self._room.give_back(self._segments.pop(name))
            held = self._segments[name] = self._room.take(size_bytes)
        return {"path": str(held.path), "size_bytes": held.size_bytes}

    def _begin(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Take note of a job to come; from here on this rank's silence is a failure."""
        self._refuse_if_busy()
        self._vacate()
        self._held = {}
        guest, comms = self._at_work()
        topic = str(asked["topic"])
        failure = Failure("RES-PEER", "it ended before its bytes were stored")
        assert self._board is not None, "joined"  # noqa: S101
        value: dict[str, Any] = failure.to_json()
        who: int | str = guest.world.rank
        if guest.world.is_coordinator:
            # Nobody would rule: so this is the ruling.
            who, value = "ruling", value | {"rank": 0}
        for agreement in (space_topic(topic), topic):
            self._board.will(comms.key(agreement, who), json.dumps(value).encode())
        return {}

    def _save(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        guest, comms = self._at_work()
        job = from_json(asked["job"], self._memory_of, guest.world.rank)
        clock = SystemClock()
        level = Level.INFO if guest.world.is_coordinator else Level.WARNING
        sinks = [console(level), *([json_lines(Path(guest.events))] if guest.events else [])]
        emit = Emitter(clock, tuple(sinks), dict(asked["context"]))
        desk = Desk(guest.store, comms, guest.limits, clock, emit, guest.signing)
        self._verdict = None
        self._is_idle.clear()
        threading.Thread(target=self._run, args=(desk, job), name="persist", daemon=True).start()
        return {}

    def _wait(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        del asked
        if not self._is_idle.wait(_SLICE_SECONDS):
            return {"is_pending": True}
        return self._verdict.to_json() if isinstance(self._verdict, Failure) else {}

    def _run(self, desk: Desk, job: Job) -> None:
        with self._room.saving(self.url):
            verdict = attempt(lambda: persist(desk, job, self._glimpses))
        with self._lock:
            if not isinstance(verdict, Failure):
                self._held = self._held_of(verdict, job)
            self._verdict = verdict
            if self._is_left:
                self._let_go()
            # Last: whoever hears of the end may ask for what is held.
            self._is_idle.set()

    def _held_of(self, receipt: Receipt, job: Job) -> dict[str, Held]:
        """Return the files that were stored as they lie here; of the others a part is missing."""
        staged = {file.name: len(file.data) for file in job.files}
        return {
            job.about.checkpoint.key(file.name): Held(
                str(self._segments[file.name].path), file.proof
            )
            for file in receipt.files
            if staged.get(file.name) == file.size_bytes
        }

    def _let_go(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
        if not self._held:
            self._give_back()

    def _give_back(self) -> None:
        while self._segments:
            self._room.give_back(self._segments.popitem()[1])

    def _memory_of(self, name: str, size_bytes: int) -> memoryview:
        segment = self._segments.get(name)
        if segment is None or not 0 <= size_bytes <= segment.size_bytes:
            raise UsageError(f"`{name}` has no {size_bytes} bytes of memory here")
        return segment.memory[:size_bytes]

    def _at_work(self) -> tuple[Guest, Comms]:
        if self._guest is None or self._board is None:
            raise UsageError("say hello and join first")
        return self._guest, Comms(self._board, self._guest.world, self._guest.scope)

    def _refuse_if_busy(self) -> None:
        if self.is_busy:
            raise UsageError("a save is in flight")


def _signing(secret: str) -> Signing:
    """Return what the rank signs with; the key came over a socket that only this user may open."""
    return Signing(SigningKey(bytes.fromhex(secret))) if secret else Signing()
