"""Parity that was written once mends for ever: the code of a release is every later release's."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from resilient.format.names import CheckpointId
from resilient.storage.local import LocalStore
from resilient.testing.memory import MemoryStore
from resilient.vault.health.repair import carry_out_repair, plan_repair
from resilient.vault.health.verify import verify
from resilient.vault.registry.catalog import read_manifest

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
        carry_out_repair(store, plan_repair(store, CHECKPOINT))
        assert store.objects == whole, lost
