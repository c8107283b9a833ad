"""A rank's place at the keeper for steps that only memory holds, and how the last one lands.

A held step costs a copy and a line: nothing is written, nothing is agreed on. Each rank has two
slots and swaps them, so while one is overwritten the other is whole. When the ranks are gone, for
whatever reason, the keepers settle on the newest step that all of them hold whole, and save it as
the trainers would have: under the number of the life that made it, with its segment of the ledger,
behind the fence. So the next life finds a checkpoint like any other.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import UsageError
from resilient.format.ledger import Place, Segment, encode_segment
from resilient.format.names import CheckpointId, parse_checkpoint
from resilient.vault.facts import StepLanded, StepLost
from resilient.vault.keeper.seat import Seat, emitter_of, leave_will
from resilient.vault.registry.catalog import committed
from resilient.world.agreement import Failure, agree, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.keeper.room import Room
    from resilient.vault.saving.persist import Job

SLOTS = 2
"""One is whole while the other is overwritten."""
LAND_SECONDS = 10.0
"""How long the keepers of other hosts may take to say what they hold: their ranks end too."""
_TOPIC = "hold/land"


@dataclass(frozen=True, slots=True)
class _Whole:
    """A step that a slot holds whole.

    Attributes:
        checkpoint: what it becomes if it lands.
        after: the folder of the checkpoint that its ledger goes on from; empty if it begins one.
        job: as ``handover.to_json`` describes it, as text; without tensors and segment.
        ledger: what its segment is besides rows; None where another rank keeps the ledger.
        rows: of the ledger, among them those of later steps.
        count: how many of them are its own.
        context: of its events.
    """

    checkpoint: CheckpointId
    after: str
    job: str
    ledger: Mapping[str, Any] | None
    rows: list[str]
    count: int
    context: Mapping[str, Any]


class HoldSeat(Seat):
    """Answers one rank that holds steps; used by the thread of its connection.

    Args:
        room: the memory of this host.
        settled: returns when the ranks of a life have left this host and its saves have ended,
            or that they have not.
    """

    def __init__(self, room: Room, settled: Callable[[HoldSeat], bool]) -> None:
        super().__init__(room, lambda: None)
        self._settled = settled
        self._whole: dict[int, _Whole] = {}
        self._layouts: dict[int, dict[str, list[Any]]] = {}
        self._rows: list[str] = []
        self._is_ending = False
        self.verbs = {
            "hold_hello": self._hello,
            "join": self._join,
            "reserve": self._reserve,
            "void": self._void,
            "hold": self._hold,
            "drop": self._drop,
        }

    @property
    def is_holding(self) -> bool:
        """Whether the rank is there and may hold a step."""
        return not self._is_ending and not self.is_left

    def leave(self) -> None:
        """The rank is gone: let the newest step land that all ranks hold, if it is worth it."""
        self._end_it()
        super().leave()

    def give_up(self) -> None:
        """Hold nothing any more: a newer life is here, and this rank may still write."""
        with self._lock:
            if not self.is_left:
                self._whole.clear()
        self._end_it()

    def _void(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Forget what a slot holds: it is about to be overwritten."""
        with self._lock:
            self._whole.pop(_slot(asked), None)
        return {}

    def _hold(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Note that a slot holds a step whole."""
        checkpoint = parse_checkpoint(str(asked["checkpoint"]))
        if checkpoint is None:
            raise UsageError(f"{asked['checkpoint']!r} is no checkpoint")
        ledger = asked["ledger"]
        if ledger is not None:
            # Earlier steps may go on to read the list before.
            if not ledger["from"]:
                self._rows = []
            del self._rows[ledger["from"] :]
            self._rows += map(str, ledger["rows"])
        # Those of files that are laid out as they were last in this slot are not said again.
        self._layouts.setdefault(_slot(asked), {}).update(asked["layouts"])
        whole = _Whole(
            checkpoint,
            str(asked["after"]),
            str(asked["job"]),
            ledger,
            self._rows,
            len(self._rows),
            dict(asked["context"]),
        )
        with self._lock:
            if not self._is_ending:
                self._whole[_slot(asked)] = whole
        return {}

    def _drop(self, _asked: Mapping[str, Any]) -> dict[str, Any]:
        """Forget everything: the rank goes on from something older, on purpose."""
        with self._lock:
            self._whole.clear()
        return {}

    def _end_it(self) -> None:
        with self._lock:
            if self._is_ending or self._board is None:
                return
            self._is_ending = True
            self._is_idle.clear()
        threading.Thread(target=self._land, name="land", daemon=True).start()

    def _land(self) -> None:
        """Agree on a step with the keepers' other seats, and save it."""
        if self._whole and not self._settled(self):
            self._whole.clear()
        slot = attempt(self._choose)
        if not isinstance(slot, int):
            self._tell_lost(slot)
            self._end(slot)
            return
        started = attempt(lambda: self._start_to_land(slot))
        if isinstance(started, Failure):
            self._tell_lost(started)
            self._end(started)

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
        _, comms = self._at_work()
        job = {**json.loads(whole.job), "topic": f"hold/{whole.checkpoint.step}"}
        layouts = self._layouts[slot]
        job["receipt"]["tensors"] = [
            tensor for name, _ in job["files"] for tensor in layouts.get(name, ())
        ]
        job["segment"] = _segment_text(whole)
        assert self._board is not None, "joined"  # noqa: S101
        leave_will(self._board, comms, job["topic"])
        self._keep_only(slot)
        self._begin_to_save({"job": job, "context": whole.context, "tiers": {}})

    def _keep_only(self, slot: int) -> None:
        """Give the memory of the other slot back; files get the names that they have in a save."""
        prefix = f"{slot}/"
        for name in [one for one in self._segments if not one.startswith(prefix)]:
            self._room.give_back(self._segments.pop(name))
        self._segments = {
            name.removeprefix(prefix): segment for name, segment in self._segments.items()
        }

    def _run(self, desk: Desk, job: Job) -> None:
        super()._run(desk, job)
        if not isinstance(self._verdict, Failure):
            desk.tell(StepLanded(job.about.checkpoint.folder))
        else:
            self._tell_lost(self._verdict)

    def _tell_lost(self, why: Any) -> None:
        """Say that what was held is lost, if it is for a failure; from the coordinator."""
        guest, held = self._guest, list(self._whole.values())
        if isinstance(why, Failure) and held and guest and guest.world.is_coordinator:
            newest = max(held, key=lambda one: one.checkpoint)
            emit = emitter_of(guest, newest.context)
            emit(StepLost(newest.checkpoint.folder, why.message))


def choose_step(store: Store, held: list[Mapping[str, str]]) -> dict[str, Any]:
    """Return which of the held steps lands: the newest that all ranks hold, if the store has none.

    It must be newer than what its own life has committed, no newer life may have begun to commit,
    and the ledger that it goes on from must be there.

    Crash: reads only.

    Args:
        store: the repository.
        held: of each rank, by folder what the step's ledger goes on from, as that rank knows.
    """
    common = set.intersection(*(set(one) for one in held))
    steps = sorted(filter(None, map(parse_checkpoint, common)))
    if not steps:
        return {"folder": ""}
    newest, there = steps[-1], committed(store)
    after = held[0][newest.folder]
    is_rooted = not after or any(one.folder == after for one in there)
    is_newest = not there or there[0] < newest
    return {"folder": newest.folder if is_rooted and is_newest else ""}


def _slot(asked: Mapping[str, Any]) -> int:
    slot = int(asked["slot"])
    if not 0 <= slot < SLOTS:
        raise UsageError(f"there is no slot {slot}")
    return slot


def _segment_text(whole: _Whole) -> str | None:
    """Return the segment of the ledger that belongs to a step.

    Raises:
        UsageError: its chain does not end where the manifest says.
    """
    said = whole.ledger
    if said is None:
        return None
    start, stop = (Place(*map(int, said[end])) for end in ("start", "stop"))
    segment = Segment(
        str(said["run_id"]),
        whole.checkpoint,
        str(said["previous"]),
        str(said["opens"]),
        start,
        stop,
        int(said["before"]),
        tuple(whole.rows[: whole.count]),
    ).closed()
    if segment.head != said["head"]:
        raise UsageError(f"the ledger of {whole.checkpoint} does not end where its manifest says")
    return encode_segment(segment).decode()
