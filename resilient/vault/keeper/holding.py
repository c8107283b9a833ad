"""A rank's place at the keeper for steps that only memory holds, and how the last one lands.

A held step costs a copy: nothing is written, nothing is agreed on, and the keeper does not hear of
it. Each rank has two slots and swaps them, so while one is overwritten the other is whole. When the
ranks are gone, for whatever reason, their seats read what the slots say, settle on the newest step
that all of them hold whole, and save it as the trainers would have: under the number of the life
that made it, with its segment of the ledger, behind the fence. So the next life finds a checkpoint
like any other.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.format.names import parse_checkpoint
from resilient.vault.facts import StepLanded, StepLost
from resilient.vault.keeper.seat import Seat, emitter_of, leave_will
from resilient.vault.keeper.slate import SLOTS, read_slate, slate_name
from resilient.vault.registry.catalog import committed
from resilient.world.agreement import Failure, agree, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.keeper.notes import Whole
    from resilient.vault.keeper.room import Room
    from resilient.vault.saving.persist import Job

LAND_SECONDS = 10.0
"""How long the keepers of other hosts may take to say what they hold: their ranks end too."""
_TOPIC = "hold/land"


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
        self._whole: dict[int, Whole] = {}
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
        slot = attempt(self._choose)
        if not isinstance(slot, int):
            self._tell_lost(slot)
            self._end(slot)
            return
        started = attempt(lambda: self._start_to_land(slot))
        if isinstance(started, Failure):
            self._tell_lost(started)
            self._end(started)

    def _read(self) -> dict[int, Whole]:
        """Return what the slots hold whole, now that nobody writes there any more."""
        found = {slot: read_slate(partial(self._slate, slot)) for slot in range(SLOTS)}
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
        leave_will(self._board, comms, job["topic"])
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
