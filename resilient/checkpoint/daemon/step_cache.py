"""Client of the step cache, which copies steps of a rank to the memory of the saver daemon.

The saver daemon is a process per host that writes checkpoints in the background. The client uses
two memory slots in turn, so one slot is complete while the other is overwritten. After the ranks
have ended, the daemon commits the newest step that is complete on every rank.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.connection import DaemonConnection
from resilient.checkpoint.daemon.memory import LeasedBuffers
from resilient.checkpoint.daemon.messages import hello_message
from resilient.checkpoint.daemon.step_slots import SLOTS, StepSlot, context_of, slot_memory_name
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.daemon.messages import DaemonAddress
    from resilient.checkpoint.save.executor import SaveExecutor
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.distributed.kv_store import Address
    from resilient.format.safetensors_file import StagedFile


# No file of a slot has this name.
_PAGE = "page"


class StepCacheClient:
    """Record of the complete step in each slot of the daemon's memory. One thread at a time.

    The client sends requests to the daemon only for memory. A step with the same layout as the
    previous step needs no request, so it does not wait for the daemon.

    Args:
        address: Address of the daemon.
        kv_store: Address of the daemons' key-value store.
        commit_context: Rank, and the repository for a cached step that is committed.

    Raises:
        ResilientError: The daemon is gone, or speaks another version.
    """

    def __init__(
        self, address: DaemonAddress, kv_store: Address, commit_context: CheckpointContext
    ) -> None:
        self._connection = DaemonConnection(address.path, address.left_seconds)
        self._connection.request("hold_hello", **hello_message(address, commit_context))
        self._connection.request("join", board=kv_store.to_json())
        self._lock = threading.RLock()
        self._is_released = False
        self._buffers = LeasedBuffers(self._ask)
        context = context_of(commit_context.emit.context)
        self._slots = [StepSlot(partial(self._reserve, slot), context) for slot in range(SLOTS)]

    def invalidate(self, slot: int) -> None:
        """Mark a slot as empty, before the caller copies anything there.

        Crash: the other slot is complete.

        Raises:
            ResilientError: The daemon is gone.
        """
        with self._lock:
            self._connection.require_alive()
            self._slots[slot].invalidate()

    def buffer(self, slot: int, name: str, size_bytes: int) -> memoryview:
        """Return shared memory for a file in a slot; usually the memory of the last call.

        Raises:
            ConfigError: A save uses the available memory.
            ResilientError: There is none.
        """
        with self._lock:
            return self._buffers.get(f"{slot}/{name}", size_bytes)

    def page(self, size_bytes: int) -> tuple[Path, memoryview]:
        """Return zeroed memory that the ranks of this host may read, and its path.

        The memory stays valid for this rank even if the daemon ends, and is no part of a cached
        step.

        Raises:
            ResilientError: There is none.
        """
        with self._lock:
            memory = self._buffers.get(_PAGE, size_bytes)
            return self._buffers.path_of(_PAGE), memory

    def hold(self, slot: int, job: SaveJob) -> None:
        """Mark a slot as complete with all bytes of ``job``; persisted after the rank has ended.

        Crash: the step is cached, or the slot is empty.

        Raises:
            ResilientError: There is no memory for the step.
        """
        for file in job.files:
            self._copy_to_slot(slot, file)
        self._slots[slot].publish(job)

    def drop(self) -> None:
        """Empty all slots.

        Crash: a cached step may still be committed.
        """
        for slots in self._slots:
            slots.invalidate()

    def release(self, needed_bytes: int) -> bool:
        """Stop caching and release the memory, if it is enough for the caller's need.

        Crash: nothing is cached, or a cached step may still be committed.

        Args:
            needed_bytes: Bytes that the caller needs.

        Returns:
            Whether the memory was released now.

        Raises:
            ResilientError: The daemon is gone.
        """
        # A save may request the memory while a step is still being marked.
        with self._lock:
            if self._is_released or self._buffers.size_bytes < needed_bytes:
                return False
            self._is_released = True
            self.drop()
            self._buffers.release_all()
        return True

    def close(self) -> None:
        """Disconnect; the daemon commits a cached step that is newer than the last save."""
        self._slots = []
        self._buffers.forget()
        self._connection.close()

    def _copy_to_slot(self, slot: int, file: StagedFile) -> None:
        """Copy a file to its place if it was not staged there."""
        data = memoryview(file.data)
        memory = self.buffer(slot, file.name, len(data))
        if memory.obj is not data.obj:
            memory[:] = data

    def _ask(self, verb: str, **message: Any) -> dict[str, Any]:
        if self._is_released and verb == "reserve":
            raise ConfigError("a save needed the memory of cached steps")
        return self._connection.request(verb, **message)

    def _reserve(self, slot: int, name: str, size_bytes: int) -> memoryview:
        with self._lock:
            return self._buffers.get(slot_memory_name(slot, name), size_bytes)


def make_step_cache_client(
    persister: SaveExecutor, context: CheckpointContext
) -> StepCacheClient | str:
    """Return the step cache client of this rank, or the reason why there is none.

    Crash: nothing was stored.

    Raises:
        ResilientError: The daemon is gone.
    """
    if not isinstance(persister, DaemonSaveExecutor) or persister.kv_store_address is None:
        return "this host has no saver daemon (start with `resilient train`)"
    if persister.address.near_url:
        return "a near tier takes every save"
    client = StepCacheClient(persister.address, persister.kv_store_address, context)
    persister.leased.release_other_memory = client.release
    return client
