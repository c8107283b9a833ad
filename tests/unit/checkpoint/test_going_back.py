"""Going back by hand: a life from an older checkpoint, taken back by another; nothing deleted."""

from __future__ import annotations

import pytest

from resilient.checkpoint import commit, rollback
from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.garbage_collection import apply_plan, collect_garbage, scan_and_plan
from resilient.checkpoint.generations import check_fence, claim, mark_committed
from resilient.checkpoint.reflog import Reflog, rolled_back_by_user
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.rollback import apply_rollback, plan_rollback, plan_undo
from resilient.errors import Fenced, IntegrityError, NotExclusive, NothingToResume, UsageError
from resilient.format.keys import CheckpointId, generation_key
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.cli_repositories import TickingClock, truncate_file
from tests.helpers.manifests import begin, save

CLOCK = TickingClock()
FIRST, SECOND, THIRD = (CheckpointId(1, step) for step in (1, 2, 3))


@pytest.fixture
def store():
    """Give one life that saved steps 1, 2 and 3."""
    found = MemoryStore()
    grow(found, None, 1, 2, 3)
    return found


def grow(store, parent, *steps):
    """Live on from ``parent``; return what was saved."""
    number = begin(store, parent)
    saved = [save(store, CheckpointId(number, step), parent=parent) for step in steps]
    if saved:
        mark_committed(store, number)
    return saved


def save_late(store, checkpoint, **about):
    """Save as a process of an older life that was past its look at the fence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "check_fence", lambda *_: None)
        return save(store, checkpoint, **about)


def back_to(store, target):
    return apply_rollback(store, plan_rollback(store, target), CLOCK)


def undo(store):
    return apply_rollback(store, plan_undo(store), CLOCK)


def head(store):
    return lineage(store).candidates[0]


def test_going_back_adds_one_record_and_changes_nothing_else(store):
    before = dict(store.objects)
    assert back_to(store, FIRST) == 2
    assert head(store) == FIRST
    assert lineage(store).abandoned == (THIRD, SECOND)
    new = {key: value for key, value in store.objects.items() if key not in before}
    assert set(new) == {generation_key(2)}
    assert {**before, **new} == dict(store.objects)


def test_what_was_left_is_planned_and_training_goes_on_from_the_target(store):
    assert plan_rollback(store, FIRST).left == (THIRD, SECOND)
    back_to(store, FIRST)
    [second] = grow(store, head(store), 2)
    assert head(store) == second == CheckpointId(3, 2)
    # The older life's numbers are higher, and never win.
    save_late(store, CheckpointId(1, 9))
    assert head(store) == second


def test_a_run_that_still_trains_cannot_save_any_more(store):
    back_to(store, FIRST)
    with pytest.raises(Fenced, match="generation 2"):
        check_fence(store, 1)
    # What was past the fence already is kept, and undo goes there.
    late = save_late(store, CheckpointId(1, 4))
    assert head(store) == FIRST
    undo(store)
    assert head(store) == late


def test_undo_takes_back_one_after_the_other_and_then_says_that_nothing_is_left(store):
    back_to(store, SECOND)
    back_to(store, FIRST)
    undo(store)
    assert head(store) == SECOND
    undo(store)
    assert head(store) == THIRD
    with pytest.raises(NothingToResume, match="nothing to undo"):
        plan_undo(store)


def test_undo_after_training_abandons_what_was_trained_since(store):
    back_to(store, FIRST)
    grow(store, FIRST, 2)
    plan = plan_undo(store)
    assert (plan.after, plan.left, plan.undoes) == (THIRD, (CheckpointId(3, 2),), 2)
    apply_rollback(store, plan, CLOCK)
    assert head(store) == THIRD
    # And that is not lost either.
    back_to(store, CheckpointId(3, 2))
    assert lineage(store).candidates == (CheckpointId(3, 2), FIRST)


def test_a_rollback_of_the_trainer_itself_is_not_undone(store):
    claim(store, FIRST, cause="rollback", clock=CLOCK)
    with pytest.raises(NothingToResume, match="nothing to undo"):
        plan_undo(store)


def test_to_go_where_one_is_changes_nothing(store):
    before = dict(store.objects)
    assert back_to(store, THIRD) is None
    assert dict(store.objects) == before


def test_a_damaged_target_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    grow(store, None, 1, 2)
    truncate_file(tmp_path / "checkpoint-1-g1" / "model.r00000.safetensors", 100)
    with pytest.raises(IntegrityError, match="resume would skip it"):
        plan_rollback(store, FIRST)


def test_undo_does_not_guess_over_a_damaged_record(store):
    back_to(store, FIRST)
    store.objects[generation_key(1)] = b"{}\n"
    with pytest.raises(IntegrityError, match="generation 1"):
        plan_undo(store)
    assert [move.life is None for move in Reflog(store).newest_first()] == [False, True]


def test_of_two_who_go_back_at_once_the_first_learns_that_it_has_no_effect(store, monkeypatch):
    def and_another(inner, *args, **kwargs):
        mine = claim(inner, *args, **kwargs)
        begin(inner, SECOND)
        return mine

    monkeypatch.setattr(rollback, "claim", and_another)
    with pytest.raises(Fenced, match="generation 3"):
        back_to(store, FIRST)
    assert head(store) == SECOND


def test_a_target_that_a_rotation_takes_at_the_same_moment_is_told(store, monkeypatch):
    def after_a_delete(inner, *args, **kwargs):
        inner.delete(FIRST.manifest_key)
        return claim(inner, *args, **kwargs)

    monkeypatch.setattr(rollback, "claim", after_a_delete)
    with pytest.raises(IntegrityError, match="during the rollback"):
        back_to(store, FIRST)
    undo(store)
    assert head(store) == THIRD


def test_a_store_that_cannot_fence_needs_the_promise(store):
    store.exclusive = False
    with pytest.raises(NotExclusive):
        back_to(store, FIRST)
    assert apply_rollback(store, plan_rollback(store, FIRST), CLOCK, single_writer=True) == 2


def test_a_rotation_keeps_what_a_person_left_and_not_what_a_stale_process_saved(store):
    back_to(store, FIRST)
    number = CheckpointId(3, 2)
    grow(store, FIRST, 2, 3, 4)
    stale = save_late(store, CheckpointId(2, 9), parent=FIRST)
    plan = collect_garbage(
        store, Retention(keep_last=1), number.generation, written=CheckpointId(3, 4)
    )
    assert stale in plan.doomed
    assert set(committed(store)) == {CheckpointId(3, 4), THIRD, SECOND}
    undo(store)
    assert head(store) == THIRD


def test_what_a_restart_left_before_is_not_what_a_person_left(store):
    [own] = grow(store, SECOND, 3)
    stale = save_late(store, CheckpointId(1, 4))
    back_to(store, FIRST)
    abandoned = lineage(store).abandoned
    assert set(abandoned) == {own, stale, THIRD, SECOND}
    assert rolled_back_by_user(store, abandoned) == {own, SECOND}


def test_prune_keeps_what_undo_goes_back_to_until_it_is_told_to_forget(store):
    back_to(store, FIRST)
    grow(store, FIRST, 2)

    def prune(left):
        retention = Retention(keep_last=1, verify_before_rotate="quick", rolled_back=left)
        apply_plan(store, scan_and_plan(store, retention, in_full=True), 3)
        return set(committed(store))

    assert prune("undo") == {CheckpointId(3, 2), THIRD}
    assert plan_undo(store).after == THIRD
    assert prune("none") == {CheckpointId(3, 2)}
    with pytest.raises(NothingToResume, match="the checkpoints of generation 1 were deleted"):
        plan_undo(store)


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("@{0}", CheckpointId(3, 5)),
        ("@{1}", FIRST),
        ("@{2}", THIRD),
        ("@2026-01-02T03:04:05.678", CheckpointId(3, 5)),
        ("@2026-01-02T04:04:05.678+01:00", CheckpointId(3, 5)),
        ("@2026-01-03", CheckpointId(3, 5)),
    ],
)
def test_a_life_and_a_moment_are_references(store, ref, expected):
    back_to(store, FIRST)
    grow(store, FIRST, 5)
    assert resolve(store, ref) == expected


def test_a_moment_means_what_was_there_then(store):
    number = begin(store, THIRD)
    later = save(store, CheckpointId(number, 4), created_at="2026-01-02T05:00:00.000Z")
    assert resolve(store, "@2026-01-02T04:00") == THIRD
    assert resolve(store, "@2026-01-02T05:00") == later
    with pytest.raises(NothingToResume):
        resolve(store, "@2026-01-01")


@pytest.mark.parametrize(
    ("ref", "error", "said"),
    [
        ("@{3}", NothingToResume, "no checkpoint"),
        ("@yesterday", UsageError, "is not a time such as"),
        ("@", UsageError, "is not a time such as"),
    ],
)
def test_what_means_nothing_is_refused(store, ref, error, said):
    with pytest.raises(error, match=said):
        resolve(store, ref)
