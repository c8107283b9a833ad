"""What a checkpoint that stays refers to stays; when nobody needs it any more, it goes."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.garbage_collection import apply_plan, collect_garbage, scan_and_plan
from resilient.checkpoint.refs import create_tag
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.errors import Fenced
from resilient.format.keys import CheckpointId
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, frozen_parts_of, save

MODEL = "model.r00000.safetensors"
LAST = Retention(keep_last=1)


def first(step):
    return CheckpointId(1, step)


def add(store, step, life=1, base=None, **about):
    checkpoint = CheckpointId(life, step)
    bases = [base] if base else []
    return save(store, checkpoint, bases=bases, parts=frozen_parts_of(step), **about)


@pytest.fixture
def store():
    """Give five steps: what is frozen lies in the first, what is slow in the first and third."""
    store = MemoryStore()
    begin(store)
    for step in range(1, 6):
        add(store, step, base=first(step - 1) if step > 1 else None)
    return store


def files_of(store, checkpoint):
    return {key for key in store.objects if key.startswith(f"{checkpoint}/")}


def test_what_the_newest_refers_to_stays_and_nothing_else(store):
    plan = collect_garbage(store, LAST, 1, written=first(5))
    assert plan.doomed == tuple(map(first, (1, 2, 3, 4)))
    left = {step: files_of(store, first(step)) for step in (1, 2, 3, 4)}
    model = {step: {first(step).key(MODEL)} for step in (1, 3)}
    assert left == {1: model[1], 2: set(), 3: model[3], 4: set()}
    assert committed(store) == [first(5)]
    assert verify(store, first(5)) == []


def test_it_goes_when_nobody_needs_it_any_more(store):
    collect_garbage(store, LAST, 1, written=first(5))
    add(store, 6, base=first(5))
    collect_garbage(store, LAST, 1, written=first(6))
    assert files_of(store, first(3)) == set(), "what is slow changed"
    assert files_of(store, first(1)) == {first(1).key(MODEL)}
    save(store, first(7))
    collect_garbage(store, LAST, 1, written=first(7))
    assert {key for key in store.objects if key.startswith("checkpoint")} == files_of(
        store, first(7)
    )


def test_an_older_one_that_stays_keeps_what_it_needs(store):
    create_tag(store, "paper", first(2), SystemClock())
    save(store, first(6))
    collect_garbage(store, LAST, 1, written=first(6))
    assert committed(store) == [first(6), first(2)]
    read(store, first(2))
    assert files_of(store, first(3)) == set()


def test_what_another_start_from_scratch_refers_to_stays(store):
    begin(store, None)
    own = save(store, CheckpointId(2, 1))
    collect_garbage(store, LAST, 2, written=own)
    for step in range(1, 6):
        read(store, first(step))


def test_nothing_older_goes_while_nobody_can_tell_what_a_manifest_needs(store):
    save(store, first(6))
    create_tag(store, "paper", first(4), SystemClock())
    store.objects[first(4).manifest_key] += b" "
    plan = collect_garbage(store, LAST, 1, written=first(6))
    assert "the dedup references of checkpoint-4-g1 are unknown" in plan.unsure
    assert committed(store) == [first(6), first(4)]
    assert all(first(step).key(MODEL) in store.objects for step in (1, 2, 3, 4))
    assert files_of(store, first(5)) == set(), "it is newer, so that manifest cannot need it"


def test_a_dry_look_says_what_would_be_free_and_what_others_need(store):
    found = scan_and_plan(store, LAST, in_full=True)
    before = sum(map(len, store.objects.values()))
    frozen, slow = (len(store.objects[first(step).key(MODEL)]) for step in (1, 3))
    assert [found.still_needed_bytes(first(step)) for step in (1, 2, 3)] == [frozen, 0, slow]
    apply_plan(store, found, 1)
    assert found.freed_bytes == before - sum(map(len, store.objects.values()))


def test_no_file_goes_when_tags_stop_a_rotation(store):
    """What stays against the plan may need files of what went."""

    class Tagging(FaultyStore):
        def delete(self, key):
            super().delete(key)
            if key == first(3).manifest_key:
                create_tag(store, "late", first(4), SystemClock())

    save(store, first(6))
    collect_garbage(Tagging(store), LAST, 1, written=first(6))
    assert committed(store) == [first(6), first(5), first(4)]
    for one in committed(store):
        read(store, one)


def test_a_life_that_begins_before_the_files_go_keeps_them(store):
    """It has read the last doomed manifest in time; its first save may refer to it."""
    save(store, first(6))

    class Beginning(FaultyStore):
        def delete(self, key):
            if key == first(5).manifest_key:
                begin(store, first(5))
                add(store, 7, life=2, base=first(5), parent=first(5))
            super().delete(key)

    with pytest.raises(Fenced):
        collect_garbage(Beginning(store), LAST, 1, written=first(6))
    assert verify(store, CheckpointId(2, 7)) == []


def test_a_plan_that_is_carried_out_late_breaks_nothing_that_came_meanwhile(store):
    found = scan_and_plan(store, LAST, in_full=True)
    for step in (6, 7):
        add(store, step, base=first(step - 1))
    collect_garbage(store, Retention(keep_last=2), 1, written=first(7))
    apply_plan(store, found, 1)
    assert committed(store) == [first(7), first(6)]
    for one in committed(store):
        read(store, one)


def test_a_missing_file_of_another_folder_is_damage_of_the_newest(store):
    del store.objects[first(1).key(MODEL)]
    plan = collect_garbage(store, Retention(keep_last=1, verify_before_rotate="quick"), 1)
    assert plan.held.endswith("checkpoint-1-g1/model.r00000.safetensors is missing")
