"""Who may write, and the life that shuts them out: nothing is abandoned by it."""

from __future__ import annotations

import pytest

from resilient.checkpoint import fencing
from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.fencing import find_writer, shut_out
from resilient.checkpoint.garbage_collection import scan_and_plan
from resilient.checkpoint.generations import check_fence, claim, mark_committed
from resilient.checkpoint.reflog import Reflog
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.rollback import apply_rollback, plan_rollback, plan_undo
from resilient.errors import Fenced, NotExclusive
from resilient.format.keys import CheckpointId, generation_key
from resilient.testing.memory_store import MemoryStore
from tests.helpers.cli_repositories import TickingClock
from tests.helpers.manifests import begin, save

CLOCK = TickingClock()
FIRST, SECOND, THIRD = (CheckpointId(1, step) for step in (1, 2, 3))


@pytest.fixture
def store():
    """Give one life that saved steps 1 and 2."""
    found = MemoryStore()
    begin(found)
    for one in (FIRST, SECOND):
        save(found, one)
    mark_committed(found, 1)
    return found


def test_the_newest_life_is_the_one_that_may_write(store):
    found = find_writer(store)
    assert (found.life, found.last, found.resume) == (1, SECOND, SECOND)
    assert found.committed_at == "2026-01-02T03:04:05.678Z"
    assert not found.is_nobody
    store.put(THIRD.key("model.r00000.safetensors"), b"half")
    assert find_writer(store).unfinished == (THIRD,)


def test_where_no_life_began_there_is_none():
    assert find_writer(MemoryStore()) is None


def test_a_writer_is_fenced_and_nothing_else_changes(store):
    before = dict(store.objects)
    life = shut_out(store, CLOCK)
    assert (life.number, life.parent, life.cause) == (2, SECOND, "ckpt-unlock")
    with pytest.raises(Fenced):
        save(store, THIRD)
    assert lineage(store).candidates == (SECOND, FIRST)
    assert not lineage(store).abandoned
    new = set(store.objects) - set(before) - {one for one in store.objects if "-3-" in one}
    assert new == {generation_key(2)}
    assert find_writer(store).is_nobody


def test_what_it_saved_a_moment_before_is_gone_on_from(store, monkeypatch):
    saved = []

    def after_a_save(inner, *args, **kwargs):
        if not saved:
            saved.append(save(inner, THIRD))
        return claim(inner, *args, **kwargs)

    monkeypatch.setattr(fencing, "claim", after_a_save)
    assert shut_out(store, CLOCK).parent == THIRD
    assert lineage(store).candidates == (THIRD, SECOND, FIRST)


def test_one_that_saves_at_each_attempt_is_told_of(store, monkeypatch):
    steps = iter(range(3, 99))

    def after_a_save(inner, *args, **kwargs):
        mine = claim(inner, *args, **kwargs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("resilient.checkpoint.commit.check_fence", lambda *_: None)
            save(inner, CheckpointId(1, next(steps)))
        return mine

    monkeypatch.setattr(fencing, "claim", after_a_save)
    with pytest.raises(Fenced, match="during each of 8 attempts"):
        shut_out(store, CLOCK)


def test_another_life_at_the_same_moment_is_told_of(store, monkeypatch):
    def and_another(inner, *args, **kwargs):
        mine = claim(inner, *args, **kwargs)
        begin(inner, SECOND)
        return mine

    monkeypatch.setattr(fencing, "claim", and_another)
    with pytest.raises(Fenced, match="generation 3"):
        shut_out(store, CLOCK)


def test_a_damaged_record_holds_rotation_until_somebody_unlocks(store):
    begin(store, SECOND)
    store.objects[generation_key(2)] = b"{}\n"
    retention = Retention(keep_last=1)
    assert (
        "the start of generation 2 is unknown"
        in scan_and_plan(store, retention, in_full=True).plan.held
    )
    found = find_writer(store)
    assert (found.record, found.is_nobody) == (None, False)
    assert generation_key(2) in found.problem
    shut_out(store, CLOCK)
    plan = scan_and_plan(store, retention, in_full=True).plan
    assert (plan.held, plan.doomed) == ("", (FIRST,))


def test_a_life_by_command_that_saves_all_the_same_is_somebody(store):
    shut_out(store, CLOCK)
    store.put(CheckpointId(2, 3).key("model.r00000.safetensors"), b"half")
    assert not find_writer(store).is_nobody


def test_it_is_no_rollback_for_undo(store):
    apply_rollback(store, plan_rollback(store, FIRST), CLOCK)
    shut_out(store, CLOCK)
    assert lineage(store).candidates == (FIRST,)
    assert plan_undo(store).after == SECOND
    assert [move.head.checkpoint for move in Reflog(store).newest_first()] == [FIRST, FIRST, SECOND]


def test_a_run_that_saved_nothing_yet_goes_on_from_scratch():
    store = MemoryStore()
    begin(store)
    assert shut_out(store, CLOCK).parent is None
    with pytest.raises(Fenced):
        check_fence(store, 1)


def test_a_store_that_cannot_fence_needs_the_promise(store):
    store.exclusive = False
    with pytest.raises(NotExclusive):
        shut_out(store, CLOCK)
    assert shut_out(store, CLOCK, single_writer=True).number == 2
