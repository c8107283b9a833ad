"""Small repositories for tests: committed checkpoints without a trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from resilient.checkpoint.commit import commit, copy_manifest, gather_receipts
from resilient.checkpoint.generations import claim
from resilient.checkpoint.save.dedup import DedupBase, deduplicate
from resilient.checkpoint.save.persist import write
from resilient.clock import SystemClock
from resilient.distributed.launch_env import World
from resilient.format.manifest import Manifest
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage

if TYPE_CHECKING:
    from resilient.format.keys import CheckpointId


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


def frozen_parts_of(step: int):
    """Return a model of which most stays as it is, a part changes now and then, a little always."""
    model = Values(
        frozen=torch.arange(8192.0),
        slow=torch.full((8192,), float(step // 3)),
        trained=torch.full((100,), float(step)),
        nothing=torch.empty(0, 3),
    )
    return {**parts_of(step), "model": Part(model)}


def save(  # noqa: PLR0913 - what a small checkpoint may be made of
    store,
    checkpoint: CheckpointId,
    ranks: int = 1,
    parent=None,
    *,
    bases=(),
    parts=None,
    parity: int = 0,
    **about,
) -> CheckpointId:
    """Commit a small checkpoint as ``ranks`` ranks would.

    Args:
        store: where.
        checkpoint: which.
        ranks: how many.
        parent: where its life began.
        bases: what it may refer to: checkpoints of its life, or Bases.
        parts: what to save; small and all new by default.
        parity: how many files of each rank may be lost.
        about: fields of its manifest.
    """
    receipts = []
    bases = [base if isinstance(base, DedupBase) else DedupBase(base) for base in bases]
    for rank in range(ranks):
        own_parts = parts or parts_of(checkpoint.step)
        staging = stage(
            capture(checkpoint.step, own_parts, rank), World(rank, ranks), StagingBuffers()
        )
        division = deduplicate(
            store, checkpoint, staging.files, staging.parts, bases, parity=parity
        )
        files = write(store, checkpoint, rank, division.files, staging.parts, parity)
        receipts.append(division.complete(files))
    manifest = replace(empty_manifest(checkpoint, parent), **about)
    commit(store, gather_receipts(manifest, receipts))
    if parity:
        copy_manifest(store, checkpoint)
    return checkpoint


def begin(store, parent: CheckpointId | None = None) -> int:
    return claim(store, parent, cause="test", clock=SystemClock()).number
