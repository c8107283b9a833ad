"""Two ranks as threads save mostly frozen state: each refers to what it wrote or has proved."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values


def model_of(step):
    """Return state that spreads over two ranks: one tensor large enough to be cut."""
    generator = torch.Generator().manual_seed(7)
    frozen = {"wte": torch.randn(400, 200, generator=generator)}
    frozen |= {f"h{number}": torch.randn(8000, generator=generator) for number in range(6)}
    return frozen | {"adapter": torch.full((500,), float(step))}


def train(store, ranks, steps):
    """Resume, save ``steps`` more, and return what the ranks resumed with."""

    def rank_main(world, board):
        comms = ControlGroup(board.another(), world, "life")
        limits = CheckpointOptions(Retention(2), within_seconds=20.0)
        one = CheckpointEngine(
            CheckpointContext(store, comms, limits, SystemClock(), Emitter(SystemClock()))
        )
        held = Values()
        resumed = one.resume({"model": Part(held)})
        start = resumed.step if resumed else 0
        for step in range(start + 1, start + steps + 1):
            own = Part(Values(seen=[world.rank, step]), "rank")
            one.save(
                step, {"model": Part(Values(**model_of(step))), "rng_state": own}, CheckpointInfo()
            )
        one.close()
        return held.state

    return run_ranks(ranks, rank_main)


def origins(store, checkpoint):
    return {one.origin for one in read_manifest(store, checkpoint).files} - {None}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_life_of_any_size_resumes_through_references_to_the_bit(ranks):
    store = MemoryStore()
    train(store, 2, 4)
    assert origins(store, CheckpointId(1, 4)) == {CheckpointId(1, 1)}
    assert CheckpointId(1, 1) not in committed(store), "rotated away, but for what is needed"
    before = sum(map(len, store.objects.values()))
    for state in train(store, ranks, 2):
        assert all(torch.equal(state[name], one) for name, one in model_of(4).items())
    for one in committed(store):
        assert verify(store, one, "deep") == []
    newest = CheckpointId(2, 6)
    if ranks == 2:
        assert origins(store, newest) == {CheckpointId(1, 1)}
        assert sum(map(len, store.objects.values())) < before * 1.1
    for state in train(store, 2, 0):
        assert all(torch.equal(state[name], one) for name, one in model_of(6).items())
