"""A save that has no room fails on all ranks at once, before any of them has written a byte."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.save.persist import with_margin
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.errors import SaveFailed, StoreFull
from resilient.events import Emitter, SaveAborted
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values

WEIGHT_BYTES = 4 << 20


class Sized(MemoryStore):
    """A disk of a size, in memory."""

    def __init__(self, size_bytes) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.told: list[int | None] = []

    def free_bytes(self):
        used = sum(map(len, self.objects.values()))
        return None if self.size_bytes is None else self.size_bytes - used


class Traced(FaultyStore):
    """Remembers what was asked, and tells the room of what it wraps."""

    def free_bytes(self):
        return self._store.free_bytes()


def save(store, ranks, steps, retention=None):
    """Save ``steps`` with ``ranks`` ranks; return every rank's error and what was told."""
    told = []

    def rank_main(world, board):
        emit = Emitter(SystemClock(), (lambda record, event: told.append(event),))
        limits = CheckpointOptions(retention or Retention(), within_seconds=30.0)
        desk = CheckpointContext(
            store, ControlGroup(board.another(), world, "life"), limits, SystemClock(), emit
        )
        checkpointer = CheckpointEngine(desk)
        try:
            checkpointer.resume({})
            for step in steps:
                weight = torch.full((WEIGHT_BYTES // 4,), float(step))
                checkpointer.save(step, {"model": Part(Values(weight=weight))}, CheckpointInfo())
                checkpointer.wait()
        except SaveFailed as error:
            return error
        finally:
            checkpointer.close()
        return None

    return run_ranks(ranks, rank_main), told


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bytes_of_all_ranks_count_and_nothing_is_half_written(ranks):
    store = Traced(Sized(WEIGHT_BYTES * 3 // 2))
    errors, told = save(store, ranks, (1, 2))
    assert [type(error) for error in errors] == [SaveFailed] * ranks
    assert all(isinstance(error.__cause__, StoreFull) for error in errors)
    assert [one.step for one in committed(store)] == [1]
    writes = [key for verb, key in store.trace if verb.startswith("put") and "checkpoint-2" in key]
    assert writes == []
    assert sum(isinstance(event, SaveAborted) for event in told) == 1


def test_the_numbers_are_told_with_what_rotation_could_free():
    store = Sized(WEIGHT_BYTES * 5 // 2)
    save(store, 1, (1, 2))
    [error], _ = save(store, 1, (3,), Retention(keep_last=1))
    free = store.free_bytes()
    freed = sum(len(data) for key, data in store.objects.items() if "checkpoint-1" in key)
    assert f"{free} are free, and garbage collection could free {freed}" in error.message
    assert "older checkpoints are intact" in error.message
    assert "--keep-last 1 --grace 0 --dry-run" in error.hint
    assert [one.step for one in committed(store)] == [2, 1], "and nothing was freed before a commit"


def test_what_fits_with_its_margin_is_saved_and_what_does_not_is_not():
    probe = Sized(1 << 40)
    save(probe, 1, (1,))
    files = sum(
        len(data)
        for key, data in probe.objects.items()
        if key.startswith("checkpoint") and "manifest" not in key
    )
    record = len(probe.objects["generations/g000001.json"])
    for spare, fits in ((0, True), (-1, False)):
        [error], _ = save(Sized(record + with_margin(files) + spare), 1, (1,))
        assert (error is None) == fits


def test_a_store_that_cannot_tell_refuses_nothing():
    errors, _ = save(Sized(None), 2, (1,))
    assert errors == [None, None]
