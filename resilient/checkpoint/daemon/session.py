"""One rank's session in the daemon; landing of in-memory steps.

One rank's place at the keeper: its memory, its job in flight, the verdict.

From the moment a hand-over is acknowledged the rank's death changes nothing: the seat has the
bytes, a connection of its own to the board, and a thread that persists. A rank that announced a
job and died before it handed it over has left a will on the board, so its peers fail at once.
Memory is only ever writable for the one process that it was reserved for: a stale process can
never scribble over what a newer one staged.

A rank's place at the keeper for steps that only memory holds, and how the last one lands.

A held step costs a copy: nothing is written, nothing is agreed on, and the keeper does not hear of
it. Each rank has two slots and swaps them, so while one is overwritten the other is whole. When the
ranks are gone, for whatever reason, their seats read what the slots say, settle on the newest step
that all of them hold whole, and save it as the trainers would have: under the number of the life
that made it, with its segment of the ledger, behind the fence. So the next life finds a checkpoint
like any other.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.context import CheckpointContext
from resilient.checkpoint.daemon.connection import FileStream, is_gone, read_failure
from resilient.checkpoint.daemon.messages import SessionTiers, decode_job, parse_hello
from resilient.checkpoint.daemon.step_slots import SLOTS, read_step_slot, slate_name
from resilient.checkpoint.events import CachedStepCommitted, CachedStepLost
from resilient.checkpoint.restore.memory_store import StagedFileRecord
from resilient.checkpoint.save.persist import SaveHistory, persist, space_topic
from resilient.checkpoint.throttle import SessionThrottle
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup, RankFailure, agree, capture_failure
from resilient.distributed.kv_store import Address, SocketKVStore
from resilient.errors import UsageError
from resilient.events import Emitter, Level, console, json_lines
from resilient.format.keys import parse_checkpoint
from resilient.storage.retry import with_retry_events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.checkpoint.daemon.memory import MemoryQuota, SharedBuffer, SharedMemoryPool
    from resilient.checkpoint.daemon.messages import SessionInfo
    from resilient.checkpoint.daemon.step_slots import StoredStep
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.format.manifest import Receipt
    from resilient.storage.store import Store

_SLICE_SECONDS = 0.5


class RankSession:
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

    def __init__(self, room: SharedMemoryPool, vacate: Callable[[], None]) -> None:
        self._room = room
        self._vacate = vacate
        self._guest: SessionInfo | None = None
        self.url = self.scope = ""
        self._onwards: SessionTiers | None = None
        self._board: SocketKVStore | None = None
        self._segments: dict[str, SharedBuffer] = {}
        self.held: Mapping[str, StagedFileRecord] = {}
        self._known = SaveHistory()
        self.pacer = SessionThrottle()
        self._verdict: Any = None
        self._stream: FileStream | None = None
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
            return RankFailure(UsageError.code, f"no verb {asked.get('verb')!r:.40}").to_json()
        done = capture_failure(partial(verb, asked))
        return done.to_json() if isinstance(done, RankFailure) else done

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
        guest = self._guest = parse_hello(asked)
        self.url, self.scope = guest.url, guest.scope
        self._onwards = SessionTiers(guest, guest.near) if guest.near else None
        return self._room.share.to_json()

    def _join(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._board = SocketKVStore(Address.from_json(asked["board"]))
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
        register_disconnect_failure(self._board, comms, str(asked["topic"]))
        return {}

    def _save(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        self._begin_to_save(asked)
        return {}

    def _begin_to_save(self, asked: Mapping[str, Any]) -> None:
        guest, comms = self._at_work()
        rank, limits = guest.world.rank, guest.limits
        job, stream = decode_job(asked["job"], self._memory_of, rank, limits.within_seconds)
        job = _bounded(job, self._room.share, self._segments)
        emit = emitter_of(guest, asked["context"])
        desk = CheckpointContext(
            with_retry_events(guest.store, emit),
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
            self._end(capture_failure(lambda: onwards.finish(within_seconds) if onwards else None))

        self._start(work, FileStream((), 0.0))
        return {}

    def _start(self, work: Callable[[], None], stream: FileStream) -> None:
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
        if isinstance(self._verdict, RankFailure):
            return self._verdict.to_json()
        return {"rested_seconds": self._known.rested_seconds}

    def _run(self, desk: CheckpointContext, job: SaveJob) -> None:
        pace = self.pacer.begin(
            job.size_bytes,
            job.began_seconds,
            0.0 if job.streamed else desk.limits.rested_seconds_max,
        )
        with self._room.saving(self.url):
            verdict = capture_failure(lambda: persist(desk, job, self._known, pace))
        self.pacer.end()
        if not isinstance(verdict, RankFailure):
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

    def _at_work(self) -> tuple[SessionInfo, ControlGroup]:
        if self._guest is None or self._board is None:
            raise UsageError("say hello and join first")
        return self._guest, ControlGroup(self._board, self._guest.world, self._guest.scope)

    def _refuse_if_busy(self) -> None:
        if self.is_busy:
            raise UsageError("a save is in flight")


def emitter_of(guest: SessionInfo, context: Mapping[str, Any]) -> Emitter:
    """Return where the events of a rank's saves go.

    Crash: nothing was stored.
    """
    level = Level.INFO if guest.world.is_coordinator else Level.WARNING
    sinks = [console(level), *([json_lines(Path(guest.events))] if guest.events else [])]
    return Emitter(SystemClock(), tuple(sinks), dict(context))


def register_disconnect_failure(board: SocketKVStore, comms: ControlGroup, topic: str) -> None:
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


def _bounded(job: SaveJob, share: MemoryQuota, segments: Mapping[str, SharedBuffer]) -> SaveJob:
    """Return a job whose copies fit in what the rank's share has left, if it does not say more."""
    if job.copies_bytes_max is not None:
        return job
    used_bytes = sum(one.size_bytes for one in segments.values())
    return replace(job, copies_bytes_max=share.spare_bytes(used_bytes))


def _held_of(
    receipt: Receipt, job: SaveJob, segments: Mapping[str, SharedBuffer]
) -> dict[str, StagedFileRecord]:
    """Return the files that were stored as they lie here; of the others a part is missing."""
    staged = {file.name: len(file.data) for file in job.files}
    return {
        job.about.checkpoint.key(file.name): StagedFileRecord(
            str(segments[file.name].path), file.proof
        )
        for file in receipt.files
        if staged.get(file.name) == file.size_bytes
    }


LAND_SECONDS = 10.0
"""How long the keepers of other hosts may take to say what they hold: their ranks end too."""
_TOPIC = "hold/land"


class StepCacheSession(RankSession):
    """Answers one rank that holds steps; used by the thread of its connection.

    Args:
        room: the memory of this host.
        settled: returns when the ranks of a life have left this host and its saves have ended,
            or that they have not.
    """

    def __init__(self, room: SharedMemoryPool, settled: Callable[[StepCacheSession], bool]) -> None:
        super().__init__(room, lambda: None)
        self._settled = settled
        self._whole: dict[int, StoredStep] = {}
        self._is_ending = False
        self.verbs = {
            "hold_hello": self._hello,
            "join": self._join,
            "reserve": self._reserve,
            "release": self._release,
        }

    @property
    def is_holding(self) -> bool:
        """Whether the rank is there and may hold a step."""
        return not self._is_ending and not self.is_left

    def leave(self) -> None:
        """The rank is gone: let the newest step land that all ranks hold, if it is worth it."""
        self._end_it(is_gone=True)
        super().leave()

    def give_up(self) -> None:
        """Hold nothing any more: a newer life is here, and this rank may still write."""
        self._end_it(is_gone=False)

    def _end_it(self, *, is_gone: bool) -> None:
        with self._lock:
            if self._is_ending or self._board is None:
                return
            # In this order: whoever sees that nothing is held any more sees that it is saved.
            self._is_idle.clear()
            self._is_ending = True
        threading.Thread(
            target=self._land, kwargs={"is_gone": is_gone}, name="land", daemon=True
        ).start()

    def _land(self, *, is_gone: bool) -> None:
        """Agree on a step with the keepers' other seats, and save it."""
        if is_gone:
            self._whole = self._read()
        if self._whole and not self._settled(self):
            self._whole = {}
        slot = capture_failure(self._choose)
        if not isinstance(slot, int):
            self._tell_lost(slot)
            self._end(slot)
            return
        started = capture_failure(lambda: self._start_to_land(slot))
        if isinstance(started, RankFailure):
            self._tell_lost(started)
            self._end(started)

    def _read(self) -> dict[int, StoredStep]:
        """Return what the slots hold whole, now that nobody writes there any more."""
        found = {slot: read_step_slot(partial(self._slate, slot)) for slot in range(SLOTS)}
        return {slot: one for slot, one in found.items() if one is not None}

    def _slate(self, slot: int, name: str) -> memoryview:
        segment = self._segments.get(slate_name(slot, name))
        return memoryview(b"") if segment is None else segment.memory

    def _choose(self) -> int | None:
        """Return the slot of the step that all ranks hold and that is worth to land. Collective."""
        guest, comms = self._at_work()
        shown = {one.checkpoint.folder: one.after for one in self._whole.values()}
        ruling = agree(
            comms, _TOPIC, shown, lambda held: choose_step(guest.store, held), LAND_SECONDS
        )
        found = [
            slot for slot, one in self._whole.items() if one.checkpoint.folder == ruling["folder"]
        ]
        return found[0] if found else None

    def _start_to_land(self, slot: int) -> None:
        whole = self._whole[slot]
        guest, comms = self._at_work()
        job = whole.job(guest.world.rank, f"hold/{whole.checkpoint.step}")
        assert self._board is not None, "joined"  # noqa: S101
        register_disconnect_failure(self._board, comms, job["topic"])
        self._keep_only(slot)
        self._begin_to_save({"job": job, "context": whole.context, "tiers": {}})

    def _keep_only(self, slot: int) -> None:
        """Give all other memory back; files get the names that they have in a save."""
        prefix = f"{slot}/"
        for name in [one for one in self._segments if not one.startswith(prefix)]:
            self._room.give_back(self._segments.pop(name))
        self._segments = {
            name.removeprefix(prefix): segment for name, segment in self._segments.items()
        }

    def _run(self, desk: CheckpointContext, job: SaveJob) -> None:
        super()._run(desk, job)
        if not isinstance(self._verdict, RankFailure):
            desk.tell(CachedStepCommitted(job.about.checkpoint.folder))
        else:
            self._tell_lost(self._verdict)

    def _tell_lost(self, why: Any) -> None:
        """Say that what was held is lost, if it is for a failure; from the coordinator."""
        guest, held = self._guest, list(self._whole.values())
        if isinstance(why, RankFailure) and held and guest and guest.world.is_coordinator:
            newest = max(held, key=lambda one: one.checkpoint)
            emit = emitter_of(guest, newest.context)
            emit(CachedStepLost(newest.checkpoint.folder, why.message))


def choose_step(store: Store, held: list[Mapping[str, str]]) -> dict[str, Any]:
    """Return which of the held steps lands: the newest that all ranks hold and that can.

    It must be newer than what its own life has committed, no newer life may have begun to commit,
    and what its ledger goes on from must be there: a save may have failed since an older one.

    Crash: reads only.

    Args:
        store: the repository.
        held: of each rank, by folder what the step's ledger goes on from, as that rank knows.
    """
    common = set.intersection(*(set(one) for one in held))
    steps = sorted(filter(None, map(parse_checkpoint, common)), reverse=True)
    there = committed(store) if steps else []
    roots = {"", *(one.folder for one in there)}
    for one in steps:
        if held[0][one.folder] in roots and (not there or there[0] < one):
            return {"folder": one.folder}
    return {"folder": ""}
