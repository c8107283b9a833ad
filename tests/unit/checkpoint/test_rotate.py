"""Looking and letting go: what a rotation asks of the store, and what stops it."""

from __future__ import annotations

import pytest

from resilient import Checkpointer
from resilient.checkpoint.catalog import committed
from resilient.checkpoint.garbage_collection import collect_garbage, scan_and_plan
from resilient.checkpoint.refs import create_tag
from resilient.checkpoint.retention import BestOf, Retention
from resilient.clock import SystemClock
from resilient.errors import Fenced
from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, save

CLOCK = SystemClock()
NEWEST = CheckpointId(1, 5)


def first(step):
    return CheckpointId(1, step)


@pytest.fixture
def store():
    """Give a store with steps 1 to 5 of one life; the losses rise."""
    store = MemoryStore()
    begin(store)
    for step in range(1, 6):
        metrics = {"eval_loss": step / 10}
        save(store, first(step), metrics=metrics, created_at=f"2026-01-0{step}T00:00:00.000Z")
    return store


def steps(store):
    return sorted(one.step for one in committed(store))


def damage(store, checkpoint, name="model.r00000.safetensors", *, flip=False):
    key = checkpoint.key(name)
    data = bytearray(store.objects[key])
    data[-1] ^= 1
    store.objects[key] = bytes(data) if flip else bytes(data[:-1])


def requests(store, retention, **options):
    """Rotate and return how often each verb was asked of the store, deletes apart."""
    counting = FaultyStore(store)
    collect_garbage(counting, retention, 1, **options)
    verbs = [verb for verb, _ in counting.trace]
    return {verb: verbs.count(verb) for verb in sorted(set(verbs)) if verb != "delete"}


def test_a_rotation_that_lets_nothing_go_costs_two_listings_and_one_record(store):
    assert requests(store, Retention(keep_last=5), written=NEWEST) == {
        "stat": 1,
        "get": 1,
        "list": 2,
    }


def test_a_rotation_by_number_reads_the_manifests_of_what_stays(store):
    """Checkpoints, lives, tags; again lives and tags before a manifest, lives before each folder.

    What stays may refer to what would go, if it is newer.
    """
    asked = requests(store, Retention(keep_last=4), written=NEWEST)
    assert asked == {"stat": 5, "get": 1 + 4, "list": 3 + 2 + 1}
    asked = requests(store, Retention(keep_every=5), written=NEWEST)
    assert asked == {"stat": 2, "get": 1 + 1, "list": 3 + 3 * 3}, "three more for each that goes"


def test_a_rotation_by_content_reads_each_manifest_once(store):
    retention = Retention(keep_best=(BestOf("loss"), BestOf("loss", 2, greater_is_better=True)))
    asked = requests(store, retention, written=NEWEST)
    assert asked == {"stat": 1 + 5, "get": 1 + 5, "list": 3 + 3 * 2}
    assert steps(store) == [1, 4, 5]


def test_a_rotation_that_looks_closer_asks_no_more_of_what_it_knows(store):
    retention = Retention(keep_last=4, verify_before_rotate="quick")
    assert requests(store, retention, written=NEWEST) == {"stat": 5, "get": 1 + 4, "list": 6}


def test_without_a_policy_the_store_is_not_asked(store):
    assert requests(store, Retention()) == {}


def test_nothing_goes_while_the_newest_is_damaged(store):
    damage(store, NEWEST)
    plan = collect_garbage(store, Retention(keep_last=1), 1)
    assert plan.doomed == ()
    assert plan.held.startswith("the newest, checkpoint-5-g1, is not verified: model.r00000")
    assert steps(store) == [1, 2, 3, 4, 5]


def test_a_commit_of_this_process_is_proof_enough_unless_more_is_wanted(store):
    damage(store, NEWEST)
    quick = Retention(keep_last=2, verify_before_rotate="quick")
    assert collect_garbage(store, quick, 1, written=NEWEST).held
    assert collect_garbage(store, Retention(keep_last=2), 1, written=NEWEST).doomed == (
        first(1),
        first(2),
        first(3),
    )


def test_a_flipped_bit_in_the_newest_is_seen_by_full_and_not_by_quick(store):
    damage(store, NEWEST, flip=True)
    full = Retention(keep_last=1, verify_before_rotate="full")
    assert (
        "content is not what was committed" in collect_garbage(store, full, 1, written=NEWEST).held
    )
    assert steps(store) == [1, 2, 3, 4, 5]
    assert not collect_garbage(store, Retention(keep_last=1), 1).held


@pytest.mark.parametrize("flip", [True, False])
def test_a_damaged_best_is_told_and_the_next_best_is_kept_in_its_stead(store, flip):
    damage(store, first(1), flip=flip)
    level = "full" if flip else "written"
    retention = Retention(keep_best=(BestOf("loss"),), verify_before_rotate=level)
    plan = collect_garbage(store, retention, 1, written=NEWEST)
    assert list(plan.damaged) == [first(1)]
    assert steps(store) == [1, 2, 5]


def test_a_manifest_that_cannot_be_read_is_told_and_stays(store):
    damage(store, first(2), "manifest.json")
    plan = collect_garbage(store, Retention(keep_daily=1), 1, written=NEWEST)
    assert list(plan.damaged) == [first(2)]
    assert steps(store) == [2, 5]


def test_what_has_a_tag_stays_whatever_the_policy_says(store):
    create_tag(store, "paper", first(2), CLOCK)
    create_tag(store, "demo", first(2), CLOCK)
    plan = collect_garbage(store, Retention(keep_last=1), 1, written=NEWEST)
    assert plan.kept[first(2)] == ("tagged `demo`", "tagged `paper`")
    assert steps(store) == [2, 5]


def test_a_tag_that_cannot_be_read_holds_everything(store):
    create_tag(store, "paper", first(2), CLOCK)
    store.objects["tags/paper.json"] = b"{}"
    plan = collect_garbage(store, Retention(keep_last=1), 1, written=NEWEST)
    assert "a tag cannot be read: `tags/paper.json`" in plan.held
    assert steps(store) == [1, 2, 3, 4, 5]


def test_a_tag_that_comes_while_a_rotation_is_at_work_stops_it(store):
    class Tagging(FaultyStore):
        def delete(self, key):
            super().delete(key)
            if key == first(1).manifest_key:
                create_tag(store, "late", first(3), CLOCK)

    plan = collect_garbage(Tagging(store), Retention(keep_last=1), 1, written=NEWEST)
    assert plan.doomed == (first(1),)
    assert plan.held == "tags changed meanwhile"
    assert steps(store) == [2, 3, 4, 5]


def test_what_a_life_began_from_stays_until_that_life_has_a_commit_of_its_own(store):
    begin(store, first(2))
    kept = scan_and_plan(store, Retention(keep_last=1), in_full=True).plan.kept
    assert "generation 2 started from it and has saved nothing yet" in kept[first(2)]
    collect_garbage(store, Retention(keep_last=1), 2)
    assert first(2) in committed(store)
    own = save(store, CheckpointId(2, 3), parent=first(2))
    collect_garbage(store, Retention(keep_last=1), 2, written=own)
    assert committed(store) == [own]


def test_what_descends_from_another_start_stays_and_counts_nowhere(store):
    begin(store, None)
    for step in (1, 2, 3):
        save(store, CheckpointId(2, step), metrics={"eval_loss": 0.9})
    retention = Retention(keep_last=1, keep_best=(BestOf("loss"),))
    plan = collect_garbage(store, retention, 2, written=CheckpointId(2, 3))
    assert plan.doomed == (CheckpointId(2, 2),)
    why = ("from another start from scratch, which garbage collection does not touch",)
    assert {one.step: plan.kept[one] for one in plan.kept if one.generation == 1} == dict.fromkeys(
        range(1, 6), why
    )


def test_with_nothing_that_resume_may_use_nothing_goes(store):
    """The second life began from a step that is gone, so what the first saved later is no use."""
    begin(store, first(2))
    for step in (1, 2):
        store.delete(first(step).manifest_key)
    plan = collect_garbage(store, Retention(keep_last=1), 2)
    assert plan.doomed == ()
    assert steps(store) == [3, 4, 5]


def test_a_life_that_begins_in_the_midst_of_a_rotation_stops_it(store):
    class Beginning(FaultyStore):
        def delete(self, key):
            super().delete(key)
            if key == first(1).manifest_key:
                begin(store, first(2))

    with pytest.raises(Fenced):
        collect_garbage(Beginning(store), Retention(keep_last=1), 1, written=NEWEST)
    assert steps(store) == [2, 3, 4, 5]


def test_a_checkpoint_that_another_process_deletes_meanwhile_is_no_error(store):
    class Deleting(FaultyStore):
        def get(self, key):
            store.delete(first(2).manifest_key)
            return super().get(key)

    collect_garbage(Deleting(store), Retention(keep_best=(BestOf("loss", 2),)), 1, written=NEWEST)
    assert steps(store) == [1, 3, 5]


def test_another_process_knows_what_the_run_protects_from_the_newest_manifest(store):
    save(store, first(6), protects=(first(1),))
    plan = scan_and_plan(store, Retention(keep_last=1), in_full=True).plan
    assert plan.kept[first(1)] == ("protected by the run",)
    assert [one.step for one in plan.doomed] == [2, 3, 4, 5]


def test_without_a_policy_the_first_save_of_a_life_sweeps_what_killed_ones_left(store):
    """A run that is killed often in mid-save must not fill its bucket."""
    left = CheckpointId(1, 3).key("model.r00001.safetensors")
    del store.objects[first(3).manifest_key]
    store.objects[left] = b"half"
    under_way = CheckpointId(1, 6).key("model.r00000.safetensors")
    store.objects[under_way] = b"half"
    before = dict(store.objects)
    assert not requests(store, Retention())
    assert store.objects == before
    plan = collect_garbage(store, Retention(), 1, written=NEWEST, sweeps=True)
    assert not plan.doomed
    assert not plan.kept
    gone = {key for key in before if key.startswith("checkpoint-3-g1/")}
    assert before.keys() - store.objects.keys() == gone
    assert steps(store) == [1, 2, 4, 5]


def test_without_a_policy_the_next_life_sweeps(tmp_path):
    def save_once(step):
        with Checkpointer(tmp_path, rng=False, step=step) as checkpointer:
            checkpointer.resume()
            checkpointer.save(step)

    save_once(1)
    left = tmp_path / "checkpoint-2-g1" / "model.r00000.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half")
    save_once(3)
    assert not left.exists()
    assert steps(LocalStore(tmp_path)) == [1, 3]
