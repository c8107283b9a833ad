"""A rank's side of held steps: two slots of the keeper's memory, swapped from step to step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.format.manifest import Receipt
from resilient.format.names import parse_segment
from resilient.format.shard import HostFile
from resilient.vault.keeper.conversation import Conversation
from resilient.vault.keeper.guest import introduction
from resilient.vault.keeper.handover import to_json
from resilient.vault.keeper.leased import Leased
from resilient.vault.keeper.link import KeeperPersister

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.format.ledger import Place, Segment
    from resilient.format.manifest import TensorEntry
    from resilient.vault.desk import Desk
    from resilient.vault.keeper.guest import KeeperAddress
    from resilient.vault.saving.persist import Job
    from resilient.vault.saving.persister import Persister
    from resilient.world.serving import Address


class Holder:
    """Says to the keeper which slot holds which step whole. One thread at a time.

    Args:
        address: of the keeper.
        board: where the keepers meet.
        desk: who this rank is, and where what it holds would land.

    Raises:
        ResilientError: the keeper is gone, or speaks another version.
    """

    def __init__(self, address: KeeperAddress, board: Address, desk: Desk) -> None:
        self._rank = desk.world.rank
        self._context = dict(desk.emit.context)
        self._talk = Conversation(address.path, address.left_seconds)
        self._talk.ask("hold_hello", **introduction(address, desk))
        self._talk.ask("join", board=board.to_json())
        self._leased = Leased(self._talk.ask)
        self._layouts: dict[int, dict[str, tuple[TensorEntry, ...]]] = {}
        self._told: Segment | None = None

    def void(self, slot: int) -> None:
        """Have the keeper forget what a slot holds, before anything is copied there.

        What was told is in the keeper's socket: it hears of this before it hears of our end.

        Crash: the other slot is whole.

        Raises:
            ResilientError: the keeper is gone, or refused what it was told before.
        """
        self._talk.hear()
        self._talk.tell("void", slot=slot)

    def buffer(self, slot: int, name: str, size_bytes: int) -> memoryview:
        """Return shared memory for a file in a slot, mostly the same again.

        Raises:
            ResilientError: there is none.
        """
        return self._leased.get(f"{slot}/{name}", size_bytes)

    def hold(self, slot: int, job: Job) -> None:
        """Say that a slot holds all bytes of ``job``; nobody begins it before we are gone.

        Crash: the step is held if the keeper hears of it, and then it is whole.

        Raises:
            ResilientError: the keeper is gone.
        """
        files = tuple(self._with_memory(slot, file) for file in job.files)
        # What the layouts say is not said again at each step.
        bare = tuple(HostFile(file.name, file.data) for file in files)
        said = to_json(replace(job, files=bare, segment=None), self._rank)
        segment = job.segment
        before = parse_segment(segment.previous) if segment and segment.previous else None
        self._talk.tell(
            "hold",
            slot=slot,
            layouts=self._new_layouts(slot, files),
            checkpoint=job.about.checkpoint.folder,
            after=before.folder if before else "",
            job=json.dumps(said),
            ledger=self._news_of(segment) if segment else None,
            context=self._context,
        )

    def drop(self) -> None:
        """Have the keeper forget all that is held.

        Raises:
            ResilientError: the keeper is gone.
        """
        self._talk.ask("drop")

    def close(self) -> None:
        """Leave; what is held lands if it is newer than what is saved."""
        self._leased.forget()
        self._talk.close()

    def _with_memory(self, slot: int, file: HostFile) -> HostFile:
        data = memoryview(file.data)
        memory = self.buffer(slot, file.name, len(data))
        if memory.obj is not data.obj:
            memory[:] = data
        return HostFile(file.name, memory, file.tensors)

    def _new_layouts(self, slot: int, files: Iterable[HostFile]) -> dict[str, Any]:
        """Return where the tensors of files lie that are laid out otherwise than last in this slot.

        A file that has some numbers in its header is so at nearly every step; it is small, and
        the large ones stay as they are.
        """
        told = self._layouts.setdefault(slot, {})
        new = {one.name: one.tensors for one in files if told.get(one.name, ()) != one.tensors}
        told |= new
        return {
            name: Receipt(self._rank, (), tensors, ()).to_json()["tensors"]
            for name, tensors in new.items()
        }

    def _news_of(self, segment: Segment) -> dict[str, Any]:
        """Return a segment as JSON, but for the rows that the keeper knows."""
        told, self._told = self._told, segment
        known = len(told.rows) if told is not None and _goes_on(told, segment) else 0
        return {
            "run_id": segment.run_id,
            "previous": segment.previous,
            "opens": segment.opens,
            "start": _place(segment.start),
            "stop": _place(segment.stop),
            "before": segment.before,
            "head": segment.head,
            "from": known,
            "rows": segment.rows[known:],
        }


def holder_for(persister: Persister, desk: Desk) -> Holder | str:
    """Return what holds steps for this rank, or why there is nothing.

    Crash: nothing was stored.

    Raises:
        ResilientError: the keeper is gone.
    """
    if not isinstance(persister, KeeperPersister) or persister.board is None:
        return "this host has no keeper (start with `resilient train`)"
    if persister.address.near_url:
        return "a near tier takes every save"
    return Holder(persister.address, persister.board, desk)


def _goes_on(told: Segment, segment: Segment) -> bool:
    """Say whether the rows of one segment are the first of the other's."""
    count = len(told.rows)
    is_same = (told.previous, told.opens, told.start, told.before) == (
        segment.previous,
        segment.opens,
        segment.start,
        segment.before,
    )
    return is_same and count <= len(segment.rows) and told.rows[-1:] == segment.rows[:count][-1:]


def _place(place: Place) -> list[int]:
    return [place.step, place.epoch, place.samples]
