"""The smallest whole repository: every kind of object once, the same bytes on every machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.generations import Generation, mark_committed
from resilient.checkpoint.refs import Tag
from resilient.checkpoint.save.persist import write
from resilient.checkpoint.signing import Signature, digests_of
from resilient.distributed.launch_env import World
from resilient.format.document import seal
from resilient.format.keys import ABILITIES, CheckpointId, generation_key, tag_key
from resilient.format.signature import SigningPolicy
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, empty_manifest

CHECKPOINT = CheckpointId(1, 7)
SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of no other use
SIGNING = SigningPolicy.of_secret(SECRET, is_required=True)
OTHER = SigningPolicy.of_secret("another key of enough bytes", is_required=True)
RANKS = 2
AT = "2026-01-02T03:04:05.678Z"


def tiny_parts(rank: int) -> dict[str, Part]:
    """One part of each kind."""
    return {
        "model": Part(Values(weight=torch.arange(4.0))),
        "rng_state": Part(Values(words=torch.tensor([rank, 7]), python=[rank]), "rank"),
        "trainer_state": Part(Values(global_step=7), document="trainer_state.json"),
    }


def tiny_repository(*, is_signed: bool = True) -> MemoryStore:
    """A life, its mark, one checkpoint of two ranks, a tag, the verdict on the store."""
    store = MemoryStore()
    generation = Generation(1, "0123456789abcdef", None, "start", AT, "host", "ab" * 16)
    store.put(generation_key(1), seal(generation.to_json()))
    receipts, files = [], []
    for rank in range(RANKS):
        staging = stage(capture(7, tiny_parts(rank), rank), World(rank, RANKS), StagingBuffers())
        receipts.append(write(store, CHECKPOINT, rank, staging.files, staging.parts))
        files += staging.files
    about = replace(empty_manifest(CHECKPOINT), world={"size": RANKS, "strategy": "ddp"})
    signature = Signature(SIGNING.key, digests_of(files)) if is_signed else None
    commit(store, gather_receipts(about, receipts), signature)
    mark_committed(store, 1)
    tag = Tag("release", CHECKPOINT, AT, "host", "cd" * 16)
    store.put(tag_key("release"), seal(tag.to_json()))
    verdict = {"exclusive": True, "url": store.url, "racers": 6, "rounds": 8, "probed_at": AT}
    store.put(ABILITIES, seal({"format": "resilient-abilities", "version": 1, **verdict}))
    return store
