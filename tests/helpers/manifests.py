"""Small repositories for tests: committed checkpoints without a trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from resilient.clock import SystemClock
from resilient.format.manifest import Manifest
from resilient.state.arena import Arena
from resilient.state.capture import Part, capture
from resilient.state.stage import stage
from resilient.vault.commit import commit, gather_receipts
from resilient.vault.generations import claim
from resilient.vault.write import write
from resilient.world.world import World

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId


def empty_manifest(checkpoint: CheckpointId, parent: CheckpointId | None = None) -> Manifest:
    return Manifest(
        run_id="0123456789abcdef",
        checkpoint=checkpoint,
        parent=parent,
        created_at="2026-01-02T03:04:05.678Z",
        world={"size": 1, "strategy": "single"},
        files=(),
        tensors=(),
        parts=(),
        config={"learning_rate": 0.001},
        software={"torch": "2.13.0"},
        data={"epoch": 0, "samples": 64},
    )


class Values:
    """A Stateful that holds what it is given."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = dict(state)


def parts_of(step: int):
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(300, 200, generator=generator)
    return {
        "model": Part(Values(weight=weight, bias=torch.arange(5.0) + step)),
        "rng_state": Part(Values(words=torch.arange(9), python=[step]), "rank"),
        "trainer_state": Part(Values(global_step=step), document="trainer_state.json"),
    }


def save(store, checkpoint: CheckpointId, ranks: int = 1, parent=None, **about) -> CheckpointId:
    """Commit a small checkpoint as ``ranks`` ranks would; ``about`` are fields of its manifest."""
    receipts = []
    for rank in range(ranks):
        staged = stage(
            capture(checkpoint.step, parts_of(checkpoint.step), rank), World(rank, ranks), Arena()
        )
        receipts.append(write(store, checkpoint, rank, staged.files, staged.parts))
    manifest = replace(empty_manifest(checkpoint, parent), **about)
    commit(store, gather_receipts(manifest, receipts))
    return checkpoint


def begin(store, parent: CheckpointId | None = None) -> int:
    return claim(store, parent, cause="test", clock=SystemClock()).number
