"""A rank's side of held steps: two slots of the keeper's memory, swapped from step to step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from resilient.vault.keeper.conversation import Conversation
from resilient.vault.keeper.guest import introduction
from resilient.vault.keeper.leased import Leased
from resilient.vault.keeper.link import KeeperPersister
from resilient.vault.keeper.notes import context_of
from resilient.vault.keeper.slate import SLOTS, Slate, slate_name

if TYPE_CHECKING:
    from resilient.format.shard import HostFile
    from resilient.vault.desk import Desk
    from resilient.vault.keeper.guest import KeeperAddress
    from resilient.vault.saving.persist import Job
    from resilient.vault.saving.persister import Persister
    from resilient.world.serving import Address


class Holder:
    """Says which slot holds which step whole, in the keeper's memory. One thread at a time.

    The keeper is asked for memory alone: a step that is laid out as the one before costs it
    nothing, and does not wait for it.

    Args:
        address: of the keeper.
        board: where the keepers meet.
        desk: who this rank is, and where what it holds would land.

    Raises:
        ResilientError: the keeper is gone, or speaks another version.
    """

    def __init__(self, address: KeeperAddress, board: Address, desk: Desk) -> None:
        self._talk = Conversation(address.path, address.left_seconds)
        self._talk.ask("hold_hello", **introduction(address, desk))
        self._talk.ask("join", board=board.to_json())
        self._leased = Leased(self._talk.ask)
        context = context_of(desk.emit.context)
        self._slates = [Slate(partial(self._reserve, slot), context) for slot in range(SLOTS)]

    def void(self, slot: int) -> None:
        """Say that a slot holds nothing, before anything is copied there.

        Crash: the other slot is whole.

        Raises:
            ResilientError: the keeper is gone.
        """
        self._talk.require_there()
        self._slates[slot].void()

    def buffer(self, slot: int, name: str, size_bytes: int) -> memoryview:
        """Return shared memory for a file in a slot, mostly the same again.

        Raises:
            ResilientError: there is none.
        """
        return self._leased.get(f"{slot}/{name}", size_bytes)

    def hold(self, slot: int, job: Job) -> None:
        """Say that a slot holds all bytes of ``job``; nobody begins it before we are gone.

        Crash: the step is held, or the slot holds nothing.

        Raises:
            ResilientError: there is no memory for it.
        """
        for file in job.files:
            self._bring(slot, file)
        self._slates[slot].say(job)

    def drop(self) -> None:
        """Hold nothing any more.

        Crash: what is held may land.
        """
        for slate in self._slates:
            slate.void()

    def close(self) -> None:
        """Leave; what is held lands if it is newer than what is saved."""
        self._slates = []
        self._leased.forget()
        self._talk.close()

    def _bring(self, slot: int, file: HostFile) -> None:
        """Copy a file to its place if it was not staged there."""
        data = memoryview(file.data)
        memory = self.buffer(slot, file.name, len(data))
        if memory.obj is not data.obj:
            memory[:] = data

    def _reserve(self, slot: int, name: str, size_bytes: int) -> memoryview:
        return self._leased.get(slate_name(slot, name), size_bytes)


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
