"""What is referred to stays protected: its whole group is needed, or it is written anew."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.verify import verify
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, frozen_parts_of, save

FIRST, SECOND, THIRD = (CheckpointId(1, step) for step in (1, 2, 3))


def saved(checkpoint, store, *, ranks=1, bases=(), parity=1):
    parts = frozen_parts_of(checkpoint.step)
    return save(store, checkpoint, ranks, parts=parts, bases=bases, parity=parity)


def history(ranks=1, parity=1) -> MemoryStore:
    """Return three saves, each of which may refer to the one before; the first is let go."""
    store = MemoryStore()
    begin(store)
    saved(FIRST, store, ranks=ranks, parity=parity)
    saved(SECOND, store, ranks=ranks, bases=[FIRST], parity=parity)
    saved(THIRD, store, ranks=ranks, bases=[SECOND], parity=parity)
    assert collect_garbage(store, Retention(keep_last=2), 1, written=THIRD).doomed == (FIRST,)
    return store


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_one_file_that_is_needed_is_repaired_wherever_it_lies(ranks):
    store = history(ranks)
    whole = dict(store.objects)
    manifest = read_manifest(store, THIRD)
    assert any(one.origin == FIRST for one in manifest.files), "something is referred to"
    for entry in manifest.files:
        store.delete(manifest.key(entry.name))
        expected = {"damaged"} if entry.name in manifest.needed else {"warning"}
        assert {one.severity for one in verify(store, THIRD)} == expected
        if entry.name in manifest.needed:
            assert entry.name in read(store, THIRD, reconstructs=True).reconstructed
        plan = plan_repair(store, THIRD)
        apply_repair(store, plan)
        assert store.objects == whole, entry.name


def test_a_group_is_kept_whole_and_goes_as_a_whole():
    store = history()
    (own, theirs) = sorted(read_manifest(store, THIRD).parity, key=lambda one: len(one.files[0]))
    assert all(name.startswith(f"{FIRST}/") for name in theirs.shares)
    assert not any("/" in name for name in own.shares)
    left = {key for key in store.objects if key.startswith(f"{FIRST}/")}
    assert left == set(theirs.shares), "nothing else of it stays"
    alone = CheckpointId(1, 4)
    saved(alone, store)
    collect_garbage(store, Retention(keep_last=1), 1, written=alone)
    assert committed(store) == [alone]
    assert not any(key.startswith(f"{FIRST}/") for key in store.objects)


def test_what_nothing_protects_is_written_anew_once_parity_is_wanted():
    store = MemoryStore()
    begin(store)
    saved(FIRST, store, parity=0)
    saved(SECOND, store, bases=[FIRST], parity=1)
    assert not any(one.origin for one in read_manifest(store, SECOND).files)
    saved(THIRD, store, bases=[SECOND], parity=1)
    assert any(one.origin == SECOND for one in read_manifest(store, THIRD).files)


def test_without_parity_a_group_is_not_dragged_along():
    store = MemoryStore()
    begin(store)
    saved(FIRST, store, parity=1)
    saved(SECOND, store, bases=[FIRST], parity=0)
    manifest = read_manifest(store, SECOND)
    assert manifest.parity == ()
    assert [one.name for one in manifest.files if one.origin] == [
        f"{FIRST}/model.r00000.safetensors"
    ]


@pytest.mark.parametrize("lost", ["parity-0-0.r00000.parity", "rng_state_0.safetensors"])
def test_a_group_that_is_not_all_there_is_not_relied_on(lost):
    store = MemoryStore()
    begin(store)
    saved(FIRST, store)
    store.delete(FIRST.key(lost))
    saved(SECOND, store, bases=[FIRST])
    assert not any(one.origin for one in read_manifest(store, SECOND).files)
    assert verify(store, SECOND) == []
