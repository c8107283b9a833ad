"""Parity that was written once mends for ever: the code of a release is every later release's."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.verify import verify
from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import MemoryStore

GOLDEN = LocalStore(Path(__file__).parent / "parity-rs256")
CHECKPOINT = CheckpointId(1, 1)


def test_any_two_files_of_the_golden_repository_are_computed_back():
    whole = {entry.key: GOLDEN.get(entry.key) for entry in GOLDEN.list()}
    assert verify(GOLDEN, CHECKPOINT, "full") == []
    (group,) = read_manifest(GOLDEN, CHECKPOINT).parity
    assert len(group.shares) == 5
    for lost in combinations(group.shares, 2):
        store = MemoryStore()
        store.objects = dict(whole)
        for name in lost:
            store.delete(CHECKPOINT.key(name))
        apply_repair(store, plan_repair(store, CHECKPOINT))
        assert store.objects == whole, lost
