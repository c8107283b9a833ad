"""What a prune let go: not there, and back on demand until its time is over."""

from __future__ import annotations

from contextlib import suppress

import pytest

from resilient.checkpoint.catalog import committed, folders_of, lineage, prunes_in, trash_of
from resilient.checkpoint.garbage_collection import apply_plan, collect_garbage, scan_and_plan
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.tiers.tiered_store import TieredStore, adopt_manifests
from resilient.checkpoint.trash import (
    RestoredCheckpoint,
    TrashPolicy,
    look_into_trash,
    restore_from_trash,
)
from resilient.checkpoint.verify import verify_records
from resilient.errors import NothingToResume, StoreError, StoreFull
from resilient.format.keys import (
    CheckpointId,
    TrashedManifest,
    is_file_name,
    parse_trash,
    trash_name,
)
from resilient.testing.fault_store import FaultPlan, FaultyStore, StoreFault, StoreFaultKind
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, frozen_parts_of, save

HOUR = 3600.0


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, hour: int = 0) -> None:
        self.hour = hour

    def monotonic_seconds(self) -> float:
        return 0.0

    def now_iso(self) -> str:
        return f"2026-01-02T{self.hour:02d}:00:00.000Z"

    def sleep(self, seconds: float) -> None: ...


CLOCK = Clock()


@pytest.fixture
def store():
    """Give steps 1 to 5 of one life, each referring to the ones before."""
    store = MemoryStore()
    begin(store)
    for step in range(1, 6):
        save(store, first(step), bases=committed(store)[:1], parts=frozen_parts_of(step))
    return store


def first(step):
    return CheckpointId(1, step)


def steps(store):
    return [one.step for one in committed(store)]


def prune(store, keep_last=1, hour=0, grace=TrashPolicy(CLOCK, 2 * HOUR)):  # noqa: B008 - a value
    grace = TrashPolicy(Clock(hour), grace.seconds, grace.empties)
    return apply_plan(store, scan_and_plan(store, Retention(keep_last=keep_last), grace=grace), 1)


def test_its_name_says_since_when_and_until_when():
    since, until = "2026-11-25T08:50:42.123Z", "2026-11-26T08:50:42.000Z"
    name = trash_name(since, until)
    assert name == "manifest.trashed-20261125T085042123-20261126T085042000.json"
    assert parse_trash(name) == TrashedManifest(name, since, until)
    assert is_file_name(name), "so rotations of older releases sweep it, too"
    assert parse_trash("manifest.copy.json") is parse_trash("manifest.json") is None


def test_what_goes_is_nowhere_and_comes_back_bit_for_bit(store):
    before = dict(store.objects)
    expected = {one: read(store, first(one)).files for one in (1, 2, 3)}
    assert len(prune(store, keep_last=2).doomed) == 3
    assert steps(store) == [5, 4]
    assert lineage(store).candidates == (first(5), first(4))
    assert not lineage(store).skipped
    assert set(before) - set(store.objects) == {first(one).manifest_key for one in (1, 2, 3)}
    assert look_into_trash(store).back == (first(3), first(2), first(1))
    returned = restore_from_trash(store)
    assert (returned.back, returned.left) == ((first(3), first(2), first(1)), {})
    assert store.objects == before
    assert {one: read(store, first(one)).files for one in expected} == expected
    with pytest.raises(NothingToResume, match="nothing is in the trash"):
        restore_from_trash(store)


def test_each_prune_comes_back_by_itself_the_newest_first(store):
    prune(store, keep_last=4, hour=0)
    prune(store, keep_last=2, hour=1)
    assert steps(store) == [5, 4]
    assert restore_from_trash(store).back == (first(3), first(2))
    assert restore_from_trash(store).back == (first(1),)
    assert steps(store) == [5, 4, 3, 2, 1]


def test_an_undo_that_names_its_prune_brings_back_that_one_however_often_it_is_given(store):
    whole = dict(store.objects)
    prune(store, keep_last=4, hour=0)
    prune(store, keep_last=2, hour=1)
    newer, older = prunes_in(trash_of(folders_of(store)))
    assert look_into_trash(store).prune == look_into_trash(store, newer).prune == newer
    assert restore_from_trash(store, newer) == RestoredCheckpoint(
        newer, (first(3), first(2)), {}, (older,)
    )
    for _ in range(2):
        assert restore_from_trash(store, newer) == RestoredCheckpoint(newer, (), {}, (older,))
    assert steps(store) == [5, 4, 3, 2]
    assert restore_from_trash(store).prune == older
    assert restore_from_trash(store, older) == RestoredCheckpoint(older, (), {})
    assert store.objects == whole


def test_an_older_prune_is_taken_back_before_a_newer_one(store):
    whole = dict(store.objects)
    prune(store, keep_last=4, hour=0)
    prune(store, keep_last=2, hour=1)
    newer, older = prunes_in(trash_of(folders_of(store)))
    assert restore_from_trash(store, older).back == (first(1),)
    assert steps(store) == [5, 4, 1]
    collect_garbage(store, Retention(keep_last=9), 1, written=first(5), grace=TrashPolicy(Clock(2)))
    read(store, first(1))
    assert restore_from_trash(store, newer).back == (first(3), first(2))
    assert store.objects == whole


def test_a_rotation_frees_it_once_its_time_is_over_and_not_before(store):
    prune(store, keep_last=2)
    collect_garbage(store, Retention(keep_last=2), 1, written=first(5), grace=TrashPolicy(Clock(1)))
    collect_garbage(store, Retention(keep_last=2), 1, written=first(5))
    assert set(trash_of(folders_of(store))) == {first(1), first(2), first(3)}
    collect_garbage(store, Retention(keep_last=2), 1, written=first(5), grace=TrashPolicy(Clock(2)))
    assert not trash_of(folders_of(store))
    for step in (4, 5):
        read(store, first(step))
    left = {key.split("/")[0] for key in store.objects if key.startswith("checkpoint-")}
    assert first(2).folder not in left
    with pytest.raises(NothingToResume):
        restore_from_trash(store)


def test_a_rotation_keeps_what_those_in_the_trash_refer_to(store):
    """Step 1 wrote the frozen tensor, and is gone: its file is there for the others alone."""
    prune(store, keep_last=4, grace=TrashPolicy(CLOCK))
    save(store, first(6))
    prune(store, keep_last=1)
    for retention in (Retention(keep_last=1), Retention(keep_last=2)):
        collect_garbage(store, retention, 1, written=first(6), grace=TrashPolicy(Clock(1)))
    assert steps(store) == [6]
    assert len(restore_from_trash(store).back) == 4
    for step in (2, 3, 4, 5, 6):
        read(store, first(step))


def test_with_no_grace_and_with_an_emptied_trash_all_is_freed_at_once(store):
    prune(store, keep_last=3)
    prune(store, keep_last=2, grace=TrashPolicy(CLOCK))
    assert set(trash_of(folders_of(store))) == {first(1), first(2)}
    found = scan_and_plan(store, Retention(), in_full=True, grace=TrashPolicy(CLOCK, empties=True))
    assert (found.plan.doomed, found.over) == ((), {first(1), first(2)})
    before = sum(map(len, store.objects.values()))
    apply_plan(store, found, 1)
    assert before - sum(map(len, store.objects.values())) == found.freed_bytes > 0
    assert steps(store) == [5, 4]
    assert not trash_of(folders_of(store))


def test_what_is_not_all_there_stays_in_the_trash_and_says_why(store):
    prune(store, keep_last=2)
    store.delete(first(2).key("state.json"))
    returned = restore_from_trash(store)
    assert returned.back == (first(3), first(1))
    assert returned.left == {first(2): "state.json is missing"}
    assert steps(store) == [5, 4, 3, 1]


def test_a_manifest_that_cannot_be_read_comes_back_as_it_was(store):
    key = first(2).manifest_key
    store.objects[key] = store.objects[key][:-9]
    damaged = dict(store.objects)
    found = scan_and_plan(store, Retention(keep_last=2), grace=TrashPolicy(CLOCK, 2 * HOUR))
    apply_plan(store, found, 1)
    assert (
        "the dedup references of checkpoint-2-g1 are unknown"
        in scan_and_plan(store, Retention(keep_last=1), grace=TrashPolicy(CLOCK)).plan.unsure
    )
    restore_from_trash(store)
    assert store.objects == damaged


def test_without_room_for_it_nothing_goes_and_the_way_out_is_told(store):
    found = scan_and_plan(store, Retention(keep_last=2), grace=TrashPolicy(CLOCK, 2 * HOUR))
    before = dict(store.objects)
    with pytest.raises(StoreFull, match="not enough space to put checkpoint-1-g1") as caught:
        apply_plan(
            FaultyStore(store, FaultPlan(0, (StoreFault(3, StoreFaultKind.FULL),))), found, 1
        )
    assert "--grace 0" in caught.value.hint
    assert store.objects == before


def test_verify_takes_nothing_in_the_trash_for_a_lost_manifest(store):
    begin(store, first(3))
    found = scan_and_plan(store, Retention(keep_last=1), grace=TrashPolicy(CLOCK, 2 * HOUR))
    apply_plan(store, found, 2)
    assert steps(store) == [3]
    assert verify_records(store, "quick") == []
    assert not lineage(store).skipped


def test_a_near_tier_does_not_take_back_what_was_pruned_there(store):
    peer = MemoryStore("test://peer")
    peer.objects = dict(store.objects)
    prune(store, keep_last=4)
    store.delete(first(3).manifest_key)
    durable = MemoryStore("test://durable")
    durable.objects = {key: peer.objects[key] for key in peer.objects if key.startswith("gen")}
    tiers = TieredStore(store, durable, lambda *_: None)
    tiers.peers = (peer,)
    adopt_manifests(tiers)
    assert steps(store) == [5, 4, 3, 2], "the manifest that it lacks, and not the pruned one"


LOST = (StoreFaultKind.ERROR_AFTER, StoreFaultKind.ERROR_ONCE, StoreFaultKind.BROKEN_AFTER)


def held(objects):
    store = MemoryStore()
    store.objects.update(objects)
    return store


def undo(store):
    """Bring back, and say whether an answer came."""
    try:
        return restore_from_trash(store).back
    except StoreError:
        return None


@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.name)
def test_an_undo_whose_answer_was_lost_ends_when_it_is_given_again(store, kind):
    prune(store, keep_last=3)
    prune(store, keep_last=2, hour=1)
    before = dict(store.objects)
    expected = {one: read(store, first(one)).files for one in (4, 5)}
    counted = FaultyStore(held(before))
    restore_from_trash(counted)
    for at in range(counted.operations):
        again = held(before)
        answer = undo(FaultyStore(again, FaultPlan(0, [StoreFault(at, kind)])))
        if answer is None:
            assert restore_from_trash(again).back
        else:
            assert answer == (first(3),)
        there = steps(again)
        assert there[:3] == [5, 4, 3]
        assert {one: read(again, first(one)).files for one in (4, 5)} == expected
        trashed = {one.step for one in trash_of(folders_of(again))}
        assert trashed | set(there) == {1, 2, 3, 4, 5}, "nothing is lost"
        if kind is not StoreFaultKind.BROKEN_AFTER:
            assert trashed == {1, 2}, "nothing else comes back"


@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.name)
def test_an_undo_that_names_its_prune_and_is_given_twice_brings_back_no_older_one(store, kind):
    prune(store, keep_last=3)
    prune(store, keep_last=2, hour=1)
    before = dict(store.objects)
    newer, older = prunes_in(trash_of(folders_of(store)))
    restore_from_trash(counted := FaultyStore(held(before)), newer)
    for at in range(counted.operations):
        again = held(before)
        with suppress(StoreError):
            restore_from_trash(FaultyStore(again, FaultPlan(0, [StoreFault(at, kind)])), newer)
        assert restore_from_trash(again, newer).others == (older,)
        assert steps(again) == [5, 4, 3]
        assert prunes_in(trash_of(folders_of(again))) == (older,)


def test_an_undo_is_done_though_the_answer_to_its_last_operation_was_lost(store):
    prune(store, keep_last=4)
    before = dict(store.objects)
    restore_from_trash(counted := FaultyStore(held(before)))
    again = held(before)
    fault = StoreFault(counted.operations - 1, StoreFaultKind.ERROR_AFTER)
    assert restore_from_trash(FaultyStore(again, FaultPlan(0, [fault]))).back == (first(1),)
    assert steps(again) == [5, 4, 3, 2, 1]
