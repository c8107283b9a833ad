"""Who may write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient.checkpoint.commit import commit
from resilient.checkpoint.garbage_collection import collect_garbage, discard_uncommitted
from resilient.checkpoint.generations import claim, list_numbers, read_generation, read_generations
from resilient.checkpoint.retention import Retention
from resilient.clock import SystemClock
from resilient.errors import Fenced, IntegrityError, KeyExists, NotExclusive
from resilient.format.keys import CheckpointId, generation_key
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, empty_manifest, save


@pytest.fixture
def store():
    return MemoryStore()


def test_lives_are_numbered_and_keep_the_runs_id(store):
    begin(store)
    begin(store, CheckpointId(1, 5))
    first, second = read_generations(store)
    assert (first.number, second.number) == (1, 2)
    assert first.run_id == second.run_id
    assert (first.parent, second.parent) == (None, CheckpointId(1, 5))


def test_many_lives_that_begin_at_once_get_numbers_of_their_own(store):
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: begin(store), range(16)))
    assert sorted(numbers) == list(range(1, 17)) == list_numbers(store)


def test_a_life_that_another_overtook_takes_the_next_number(store):
    """Its listing was made before the other's record came into being."""
    begin(store)
    theirs = store.objects[generation_key(1)]
    store.list = lambda prefix="": ()
    assert begin(store) == 2
    assert store.objects[generation_key(1)] == theirs


def test_a_number_exceeds_every_checkpoint_seen_even_without_records(store):
    assert claim(store, None, cause="test", clock=SystemClock(), above=7).number == 8


def test_a_store_without_exclusive_create_is_refused_unless_we_are_alone(store):
    store.exclusive = False
    with pytest.raises(NotExclusive):
        begin(store)
    life = claim(store, None, cause="test", clock=SystemClock(), single_writer=True)
    assert life.number == 1
    save(store, CheckpointId(1, 1))
    with pytest.raises(KeyExists):
        commit(store, empty_manifest(CheckpointId(1, 1)))


def test_an_older_life_may_not_commit_or_rotate(store):
    begin(store)
    for step in (1, 2, 3):
        save(store, CheckpointId(1, step))
    begin(store, CheckpointId(1, 3))
    before = dict(store.objects)
    with pytest.raises(Fenced, match="generation 2 of this run started"):
        commit(store, empty_manifest(CheckpointId(1, 4)))
    with pytest.raises(Fenced):
        collect_garbage(store, Retention(1), generation=1)
    assert store.objects == before


def test_a_step_is_committed_once(store):
    begin(store)
    save(store, CheckpointId(1, 1))
    with pytest.raises(KeyExists):
        commit(store, empty_manifest(CheckpointId(1, 1)))


def test_any_flipped_bit_of_a_record_is_found(store):
    begin(store)
    data = store.objects[generation_key(1)]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        store.objects[generation_key(1)] = bytes(damaged)
        with pytest.raises(IntegrityError):
            read_generation(store, 1)


def test_a_rotation_sweeps_leftovers_but_no_save_in_flight_and_nothing_foreign(store):
    begin(store)
    store.put("checkpoint-1-g1/model.r00000.safetensors", b"cut short")
    store.put("checkpoint-1-g1/notes.txt", b"a person's")
    for step in (2, 3):
        save(store, CheckpointId(1, step))
    store.put("checkpoint-4-g1/model.r00000.safetensors", b"in flight")
    collect_garbage(store, Retention(1), generation=1)
    folders = {key.partition("/")[0] for key in store.objects if "checkpoint" in key}
    assert folders == {"checkpoint-1-g1", "checkpoint-3-g1", "checkpoint-4-g1"}
    assert store.objects["checkpoint-1-g1/notes.txt"] == b"a person's"
    assert "checkpoint-1-g1/model.r00000.safetensors" not in store.objects


def test_rotation_deletes_the_manifest_before_what_it_names(store):
    begin(store)
    for step in (1, 2):
        save(store, CheckpointId(1, step))
    order = []
    delete = store.delete
    store.delete = lambda key: (order.append(key), delete(key))
    collect_garbage(store, Retention(1), generation=1)
    assert order[0] == "checkpoint-1-g1/manifest.json"


def test_the_best_is_kept_beyond_the_limit(store):
    begin(store)
    for step in (1, 2, 3, 4):
        save(store, CheckpointId(1, step))
    plan = collect_garbage(store, Retention(2), 1, keep=[CheckpointId(1, 1)])
    assert plan.doomed == (CheckpointId(1, 2), CheckpointId(1, 3))


def test_discarding_a_failed_save_leaves_the_rest(store):
    begin(store)
    save(store, CheckpointId(1, 1))
    before = dict(store.objects)
    store.put("checkpoint-2-g1/model.r00000.safetensors", b"half")
    discard_uncommitted(store, CheckpointId(1, 2))
    assert store.objects == before
