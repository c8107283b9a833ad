"""A rank's side of held steps: two slots of the keeper's memory, swapped from step to step."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.connection import DaemonConnection
from resilient.checkpoint.daemon.memory import LeasedBuffers
from resilient.checkpoint.daemon.messages import hello_message
from resilient.checkpoint.daemon.step_slots import SLOTS, StepSlot, context_of, slate_name
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.daemon.messages import DaemonAddress
    from resilient.checkpoint.save.executor import SaveExecutor
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.distributed.kv_store import Address
    from resilient.format.safetensors_file import StagedFile


# No file of a slot is called so.
_PAGE = "page"


class StepCacheClient:
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

    def __init__(self, address: DaemonAddress, board: Address, desk: CheckpointContext) -> None:
        self._talk = DaemonConnection(address.path, address.left_seconds)
        self._talk.ask("hold_hello", **hello_message(address, desk))
        self._talk.ask("join", board=board.to_json())
        self._using = threading.RLock()
        self._is_released = False
        self._leased = LeasedBuffers(self._ask)
        context = context_of(desk.emit.context)
        self._slates = [StepSlot(partial(self._reserve, slot), context) for slot in range(SLOTS)]

    def void(self, slot: int) -> None:
        """Say that a slot holds nothing, before anything is copied there.

        Crash: the other slot is whole.

        Raises:
            ResilientError: the keeper is gone.
        """
        with self._using:
            self._talk.require_there()
            self._slates[slot].void()

    def buffer(self, slot: int, name: str, size_bytes: int) -> memoryview:
        """Return shared memory for a file in a slot, mostly the same again.

        Raises:
            ConfigError: a save took the memory that there was.
            ResilientError: there is none.
        """
        with self._using:
            return self._leased.get(f"{slot}/{name}", size_bytes)

    def page(self, size_bytes: int) -> tuple[Path, memoryview]:
        """Return memory of zeros that the ranks of this host may read, and where it lies.

        It stays this rank's, whatever becomes of the keeper, and is nothing that is held.

        Raises:
            ResilientError: there is none.
        """
        with self._using:
            memory = self._leased.get(_PAGE, size_bytes)
            return self._leased.path_of(_PAGE), memory

    def hold(self, slot: int, job: SaveJob) -> None:
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

    def release(self, needed_bytes: int) -> bool:
        """Hold nothing from now on, and give the memory back, if that is enough for somebody.

        Crash: nothing is held, or what is held may land.

        Args:
            needed_bytes: what somebody needs.

        Returns:
            Whether it was given back, just now.

        Raises:
            ResilientError: the keeper is gone.
        """
        # A save may want the memory while a step is still being said.
        with self._using:
            if self._is_released or self._leased.size_bytes < needed_bytes:
                return False
            self._is_released = True
            self.drop()
            self._leased.release_all()
        return True

    def close(self) -> None:
        """Leave; what is held lands if it is newer than what is saved."""
        self._slates = []
        self._leased.forget()
        self._talk.close()

    def _bring(self, slot: int, file: StagedFile) -> None:
        """Copy a file to its place if it was not staged there."""
        data = memoryview(file.data)
        memory = self.buffer(slot, file.name, len(data))
        if memory.obj is not data.obj:
            memory[:] = data

    def _ask(self, verb: str, **message: Any) -> dict[str, Any]:
        if self._is_released and verb == "reserve":
            raise ConfigError("a save needed the memory that they were held in")
        return self._talk.ask(verb, **message)

    def _reserve(self, slot: int, name: str, size_bytes: int) -> memoryview:
        with self._using:
            return self._leased.get(slate_name(slot, name), size_bytes)


def holder_for(persister: SaveExecutor, desk: CheckpointContext) -> StepCacheClient | str:
    """Return what holds steps for this rank, or why there is nothing.

    Crash: nothing was stored.

    Raises:
        ResilientError: the keeper is gone.
    """
    if not isinstance(persister, DaemonSaveExecutor) or persister.board is None:
        return "this host has no keeper (start with `resilient train`)"
    if persister.address.near_url:
        return "a near tier takes every save"
    holder = StepCacheClient(persister.address, persister.board, desk)
    persister.leased.make_room = holder.release
    return holder
