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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.events import Emitter, Level, console, json_lines
from resilient.storage.retrying import telling
from resilient.vault.desk import Desk
from resilient.vault.keeper.guest import Onwards, guest_of
from resilient.vault.keeper.handover import from_json
from resilient.vault.keeper.stream import Stream, is_gone, read_failure
from resilient.vault.pace import Pacer
from resilient.vault.reading.held import Held
from resilient.vault.saving.persist import Memory, persist
from resilient.vault.saving.space import space_topic
from resilient.world.agreement import Failure, attempt
from resilient.world.comms import Comms
from resilient.world.serving import Address
from resilient.world.sockets import SocketBoard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.format.manifest import Receipt
    from resilient.vault.keeper.guest import Guest
    from resilient.vault.keeper.leased import Share
    from resilient.vault.keeper.room import Room, Segment
    from resilient.vault.saving.persist import Job

_SLICE_SECONDS = 0.5


class Seat:
    """Answers one rank, request by request; used by the thread of its connection.

    Args:
        room: the memory of this host.
        vacate: called before this rank's first bytes: what past ranks held may go.

    Attributes:
        verbs: what it does for the rank.
        url: the repository that this rank saves to; empty before it said so.
        scope: of the life that the rank belongs to; empty before it said so.
        is_left: whether the rank is gone.
        held: files of the newest checkpoint that was committed from here and not staged over.
        pacer: the pace of its saves; whoever waits for one may hasten it.
    """

    def __init__(self, room: Room, vacate: Callable[[], None]) -> None:
        self._room = room
        self._vacate = vacate
        self._guest: Guest | None = None
        self.url = self.scope = ""
        self._onwards: Onwards | None = None
        self._board: SocketBoard | None = None
        self._segments: dict[str, Segment] = {}
        self.held: Mapping[str, Held] = {}
        self._known = Memory()
        self.pacer = Pacer()
        self._verdict: Any = None
        self._stream: Stream | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self.is_left = False
        self._lock = threading.Lock()
        self.verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "join": self._join,
            "reserve": self._reserve,
            "release": self._release,
            "begin": self._begin,
            "save": self._save,
            "finish": self._finish,
            "wait": self._wait,
        }

    @property
    def is_busy(self) -> bool:
        """Whether a job is in flight."""
        return not self._is_idle.is_set()

    @property
    def is_promoting(self) -> bool:
        """Whether something of its near tier is on its way to the durable one."""
        return self._onwards is not None and self._onwards.is_busy

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the rank asks and return what to send back; never raises."""
        verb = self.verbs.get(str(asked.get("verb")))
        if verb is None:
            return Failure(UsageError.code, f"no verb {asked.get('verb')!r:.40}").to_json()
        done = attempt(partial(verb, asked))
        return done.to_json() if isinstance(done, Failure) else done

    def leave(self) -> None:
        """The rank is gone: let go of what no job in flight needs."""
        with self._lock:
            self.is_left = True
            self.pacer.leave()
            if self._stream is not None:
                self._stream.fail(is_gone())
            if not self.is_busy:
                self._let_go()

    def forget(self) -> None:
        """Give all memory back; only of a seat that is left and not busy."""
        with self._lock:
            self.held = {}
            self._give_back()

    def _hello(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        guest = self._guest = guest_of(asked)
        self.url, self.scope = guest.url, guest.scope
        self._onwards = Onwards(guest, guest.near) if guest.near else None
        return self._room.share.to_json()

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

    def _release(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        for name in asked["names"]:
            held = self._segments.pop(str(name), None)
            if held is not None:
                self._room.give_back(held)
        # What was kept for the next life may be among it.
        self.held = {}
        return {}

    def _begin(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Take note of a job to come; from here on this rank's silence is a failure."""
        self._refuse_if_busy()
        self._vacate()
        self.held = {}
        _, comms = self._at_work()
        assert self._board is not None, "joined"  # noqa: S101
        leave_will(self._board, comms, str(asked["topic"]))
        return {}

    def _save(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        self._begin_to_save(asked)
        return {}

    def _begin_to_save(self, asked: Mapping[str, Any]) -> None:
        guest, comms = self._at_work()
        rank, limits = guest.world.rank, guest.limits
        job, stream = from_json(asked["job"], self._memory_of, rank, limits.within_seconds)
        job = _bounded(job, self._room.share, self._segments)
        emit = emitter_of(guest, asked["context"])
        desk = Desk(
            telling(guest.store, emit),
            comms,
            limits,
            emit.clock,
            emit,
            guest.signing,
            token=job.token,
        )
        if self._onwards:
            mine, parent = job.about.checkpoint.generation, job.about.parent
            desk = self._onwards.desk(desk, asked["tiers"], mine, parent)
        self._start(lambda: self._run(desk, job), stream)

    def _finish(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Start to bring what was committed last to the durable tier; ``wait`` tells the end."""
        self._refuse_if_busy()
        onwards, within_seconds = self._onwards, float(asked["within_seconds"])

        def work() -> None:
            self._end(attempt(lambda: onwards.finish(within_seconds) if onwards else None))

        self._start(work, Stream((), 0.0))
        return {}

    def _start(self, work: Callable[[], None], stream: Stream) -> None:
        self._verdict = None
        self._stream = stream
        self._is_idle.clear()
        threading.Thread(target=work, name="persist", daemon=True).start()

    def _wait(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Say what the verdict is, or that there is none yet and which file is to come next."""
        stream = self._stream
        if asked.get("is_urgent"):
            self.pacer.hurry()
        if stream is not None:
            if "came" in asked:
                stream.came(int(asked["came"]))
            if "failed" in asked:
                stream.fail(read_failure(asked["failed"]))
            wanted = stream.next(_SLICE_SECONDS)
            if wanted is not None:
                return {"is_pending": True, "wanted": wanted.to_json()}
        if not self._is_idle.is_set():
            return {"is_pending": True}
        if isinstance(self._verdict, Failure):
            return self._verdict.to_json()
        return {"rested_seconds": self._known.rested_seconds}

    def _run(self, desk: Desk, job: Job) -> None:
        pace = self.pacer.begin(
            job.size_bytes,
            job.began_seconds,
            0.0 if job.streamed else desk.limits.rested_seconds_max,
        )
        with self._room.saving(self.url):
            verdict = attempt(lambda: persist(desk, job, self._known, pace))
        self.pacer.end()
        if not isinstance(verdict, Failure):
            self.held = _held_of(verdict, job, self._segments)
        self._end(verdict)

    def _end(self, verdict: Any) -> None:
        with self._lock:
            self._verdict = verdict
            if self.is_left:
                self._let_go()
            # Last: whoever hears of the end may ask for what is held.
            self._is_idle.set()
            if self._stream is not None:
                self._stream.close()

    def _let_go(self) -> None:
        if self._onwards is not None:
            # A promotion may take long, and nobody here waits for it.
            threading.Thread(target=self._onwards.close, name="onwards", daemon=True).start()
        if self._board is not None:
            self._board.close()
            self._board = None
        if not self.held:
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


def emitter_of(guest: Guest, context: Mapping[str, Any]) -> Emitter:
    """Return where the events of a rank's saves go.

    Crash: nothing was stored.
    """
    level = Level.INFO if guest.world.is_coordinator else Level.WARNING
    sinks = [console(level), *([json_lines(Path(guest.events))] if guest.events else [])]
    return Emitter(SystemClock(), tuple(sinks), dict(context))


def leave_will(board: SocketBoard, comms: Comms, topic: str) -> None:
    """Let the peers hear at once if this rank dies before it hands over.

    Crash: nothing was stored.
    """
    value: dict[str, Any] = is_gone().to_json()
    who: int | str = comms.world.rank
    if comms.world.is_coordinator:
        # Nobody would rule: so this is the ruling.
        who, value = "ruling", value | {"rank": 0}
    for agreement in (space_topic(topic), topic):
        board.will(comms.key(agreement, who), json.dumps(value).encode())


def _bounded(job: Job, share: Share, segments: Mapping[str, Segment]) -> Job:
    """Return a job whose copies fit in what the rank's share has left, if it does not say more."""
    if job.copies_bytes_max is not None:
        return job
    used_bytes = sum(one.size_bytes for one in segments.values())
    return replace(job, copies_bytes_max=share.spare_bytes(used_bytes))


def _held_of(receipt: Receipt, job: Job, segments: Mapping[str, Segment]) -> dict[str, Held]:
    """Return the files that were stored as they lie here; of the others a part is missing."""
    staged = {file.name: len(file.data) for file in job.files}
    return {
        job.about.checkpoint.key(file.name): Held(str(segments[file.name].path), file.proof)
        for file in receipt.files
        if staged.get(file.name) == file.size_bytes
    }
