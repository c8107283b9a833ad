"""What resume may use, and in which order."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.generations import mark_committed
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.retention import Retention
from resilient.errors import NothingToResume, RepositoryNotFound
from resilient.format.keys import CheckpointId, generation_key
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, save


@pytest.fixture
def store():
    return MemoryStore()


def ids(*pairs):
    return tuple(CheckpointId(*pair) for pair in pairs)


def life(store, steps, parent=None):
    number = begin(store, parent)
    for step in steps:
        save(store, CheckpointId(number, step), parent=parent)
    return number


def test_an_empty_repository_has_nothing_and_lost_nothing(store):
    known = lineage(store)
    assert (known.candidates, known.skipped, known.lost) == ((), (), "")


def test_the_newest_life_comes_first_then_its_parent_then_older(store):
    life(store, [10, 20])
    life(store, [21, 22], CheckpointId(1, 20))
    assert lineage(store).candidates == ids((2, 22), (2, 21), (1, 20), (1, 10))


def test_a_life_that_saved_nothing_leads_to_its_parent(store):
    life(store, [10, 20, 30])
    life(store, [], CheckpointId(1, 20))
    known = lineage(store)
    assert known.candidates == ids((1, 20), (1, 10))
    assert known.abandoned == ids((1, 30))


def test_what_a_stale_process_saved_later_is_abandoned_whatever_its_step(store):
    life(store, [10])
    late = MemoryStore()
    save(late, CheckpointId(1, 99))
    life(store, [11], CheckpointId(1, 10))
    store.objects |= late.objects  # as if its commit had passed the fence just before the claim
    assert lineage(store).candidates == ids((2, 11), (1, 10))
    assert lineage(store).abandoned == ids((1, 99))


def test_a_start_from_scratch_that_saved_stands_beside_what_was_there(store):
    life(store, [10])
    life(store, [1], None)
    known = lineage(store)
    assert known.candidates == ids((2, 1))
    assert (known.abandoned, known.separate) == ((), ids((1, 10)))


def test_a_start_from_scratch_that_saved_nothing_hides_nothing(store):
    life(store, [10, 20])
    life(store, [], None)
    life(store, [], None)
    assert lineage(store).candidates == ids((1, 20), (1, 10))


def test_rotation_leaves_another_start_alone(store):
    life(store, [10, 20])
    life(store, [1, 2, 3], None)
    assert collect_garbage(store, Retention(1), generation=2).doomed == ids((2, 1), (2, 2))
    assert committed(store) == list(ids((2, 3), (1, 20), (1, 10)))


def test_a_parent_that_is_gone_with_nothing_else_is_a_loss(store):
    life(store, [10])
    life(store, [], CheckpointId(1, 10))
    store.delete(CheckpointId(1, 10).manifest_key)
    known = lineage(store)
    assert known.candidates == ()
    assert "started from checkpoint-10-g1, which no longer exists" in known.lost


def test_a_parent_rotated_away_after_later_saves_is_no_loss(store):
    life(store, [10])
    life(store, [11, 12], CheckpointId(1, 10))
    store.delete(CheckpointId(1, 10).manifest_key)
    known = lineage(store)
    assert (known.candidates, known.lost) == (ids((2, 12), (2, 11)), "")
    assert known.skipped == ()


def test_a_life_that_committed_and_has_no_manifest_left_is_a_loss(store):
    life(store, [10])
    mark_committed(store, 1)
    store.delete(CheckpointId(1, 10).manifest_key)
    known = lineage(store)
    assert known.candidates == ()
    assert known.lost == "generation 1 committed checkpoints, and no manifest is left"


def test_folders_of_saves_that_were_cut_short_are_no_loss(store):
    life(store, [10, 20])
    for step in (10, 20):
        store.delete(CheckpointId(1, step).manifest_key)
    known = lineage(store)
    assert known.lost == ""
    assert [one.name for one in known.skipped] == ["checkpoint-20-g1", "checkpoint-10-g1"]


def test_only_traces_newer_than_the_choice_are_worth_a_word(store):
    life(store, [10, 20, 30])
    store.delete(CheckpointId(1, 10).manifest_key)
    assert lineage(store).skipped == ()
    store.delete(CheckpointId(1, 30).manifest_key)
    assert [one.name for one in lineage(store).skipped] == ["checkpoint-30-g1"]


def test_a_damaged_record_of_a_life_falls_back_to_the_next_older_checkpoint(store):
    life(store, [10, 20])
    life(store, [], CheckpointId(1, 10))
    store.objects[generation_key(2)] = b"{}\n"
    known = lineage(store)
    assert known.candidates == ids((1, 20), (1, 10))
    assert [one.name for one in known.skipped] == ["generation 2"]


def test_order_is_by_generation_then_step_numerically(store):
    life(store, [9, 100])
    life(store, [10], CheckpointId(1, 9))
    assert committed(store) == list(ids((2, 10), (1, 100), (1, 9)))


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("latest", (2, 25)),
        ("latest~1", (2, 21)),
        ("step:10", (1, 10)),
        ("20", (1, 20)),
        ("checkpoint-30-g1", (1, 30)),
        ("checkpoint-30", (1, 30)),
        ("checkpoint-25", (2, 25)),
    ],
)
def test_references(store, ref, expected):
    life(store, [10, 20, 25, 30])
    life(store, [21, 25], CheckpointId(1, 20))
    assert resolve(store, ref) == CheckpointId(*expected)


def test_a_reference_to_nothing_is_one_error_and_no_repository_another(store):
    with pytest.raises(RepositoryNotFound):
        resolve(store, "latest")
    life(store, [10])
    with pytest.raises(NothingToResume, match="no checkpoint `step:11`"):
        resolve(store, "step:11")
