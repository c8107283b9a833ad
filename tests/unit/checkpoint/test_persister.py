"""The thread that persists works at full speed while a caller waits."""

from __future__ import annotations

import time

import torch

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values
from tests.helpers.one_rank import open_one
from tests.helpers.paces import resting, wait_until

BYTES = 24 << 20


def open_resting(store, **limits):
    checkpointer = open_one(store, pace_seconds_max=40.0, **limits)
    checkpointer._persister._throttles = resting(BYTES, 40.0)
    checkpointer.resume({})
    return checkpointer


def test_a_save_rests_until_somebody_waits_for_it():
    store = MemoryStore()
    checkpointer = open_resting(store)
    began = time.monotonic()
    parts = {"model": Part(Values(weight=torch.ones(BYTES // 4)))}
    checkpointer.save(1, parts, CheckpointInfo())
    wait_until(lambda: checkpointer._persister._throttle._done_bytes >= 2 * (4 << 20))
    assert checkpointer.committed() == []
    checkpointer.wait()
    assert len(checkpointer.committed()) == 1
    took = time.monotonic() - began
    assert took < 20.0
    persister = checkpointer._persister
    assert 0.0 < persister.rested_seconds < persister.took_seconds <= took
    checkpointer.close()


def test_the_next_save_does_not_wait_for_the_rests_of_this_one():
    store = MemoryStore()
    checkpointer = open_resting(store)
    began = time.monotonic()
    for step in (1, 2):
        parts = {"model": Part(Values(weight=torch.full((BYTES // 4,), float(step))))}
        checkpointer.save(step, parts, CheckpointInfo())
    assert len(checkpointer.committed()) == 1
    checkpointer.close()
    assert len(checkpointer.committed()) == 2
    assert time.monotonic() - began < 20.0


def test_no_rank_rests_until_its_peers_give_it_up():
    checkpointer = open_resting(MemoryStore(), within_seconds=8.0)
    checkpointer.save(1, {"model": Part(Values(weight=torch.ones(BYTES // 4)))}, CheckpointInfo())
    assert checkpointer._persister._throttle._within_seconds == 2.0
    checkpointer.close()
