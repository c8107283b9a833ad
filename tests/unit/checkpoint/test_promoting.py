"""Which saves go on to the durable tier, when, and what comes of one that does not."""

from __future__ import annotations

import threading

import pytest

from resilient.checkpoint import events
from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.generations import claim
from resilient.checkpoint.promotion import promote
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.errors import ConfigError, Fenced, SaveFailed, StoreUnavailable
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from resilient.train.arguments import TrainingArguments
from tests.helpers.tiered import checkpointer_of, desk_over, save, steps


@pytest.fixture
def near():
    return MemoryStore("test://near")


@pytest.fixture
def durable():
    return MemoryStore("test://durable")


class Failing(MemoryStore):
    """Refuses to put files of checkpoints while it is told to."""

    def __init__(self, url="test://failing") -> None:
        super().__init__(url)
        self.is_down, self.refused = False, "checkpoint-"

    def put(self, key, data) -> None:
        if self.is_down and key.startswith(self.refused):
            raise StoreUnavailable("the line is cut", key=key)
        super().put(key, data)


class Held(MemoryStore):
    """Holds puts of checkpoints' files back until they are let go."""

    def __init__(self) -> None:
        super().__init__("test://held")
        self.reached, self.go_on = threading.Event(), threading.Event()

    def put(self, key, data) -> None:
        if key.startswith("checkpoint-"):
            self.reached.set()
            assert self.go_on.wait(20)
        super().put(key, data)


def test_the_first_every_nth_and_the_last_save_are_durable(near, durable):
    checkpointer = checkpointer_of(near, durable, every=3, retention=Retention())
    save(checkpointer, 1, 2, 3, 4)
    checkpointer._context.promoter._settle()
    save(checkpointer, 5)
    assert steps(durable) == [3, 1]
    checkpointer.close()
    assert steps(durable) == [5, 3, 1]
    assert steps(near) == [5, 4]


def test_what_the_run_protects_is_durable(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9, retention=Retention())
    save(checkpointer, 1, 2)
    save(checkpointer, 3, keep=[CheckpointId(1, 2)])
    checkpointer._context.promoter._settle()
    assert steps(durable) == [2, 1]
    checkpointer.close()


def test_an_older_life_cannot_promote(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9)
    save(checkpointer, 1, 2)
    checkpointer._context.promoter._settle()
    claim(durable, None, cause="test", clock=checkpointer._context.clock)
    with pytest.raises(Fenced):
        checkpointer.close()
    assert steps(durable) == [1]


def test_a_failed_promotion_fails_no_save_and_is_owed_by_the_next(near):
    durable, told = Failing(), []
    checkpointer = CheckpointEngine(
        desk_over(near, durable, 9, on_event=lambda _, event: told.append(event))
    )
    checkpointer.resume({})
    durable.is_down = True
    save(checkpointer, 1)
    checkpointer._context.promoter._settle()
    failed = [one for one in told if isinstance(one, events.PromotionFailed)]
    assert [one.checkpoint for one in failed] == ["checkpoint-1-g1"]
    assert "only in the near tier" in failed[0].message()
    durable.is_down = False
    save(checkpointer, 2)
    checkpointer._context.promoter._settle()
    assert steps(durable) == [2]
    checkpointer.close()


def test_a_run_whose_last_save_is_near_alone_does_not_end_well(near):
    durable = Failing()
    checkpointer = checkpointer_of(near, durable, every=1)
    durable.is_down = True
    save(checkpointer, 1)
    with pytest.raises(SaveFailed, match="near tier"):
        checkpointer.close()
    durable.is_down = False
    again = CheckpointEngine(desk_over(near, durable))
    assert again.resume({}).step == 1
    again.close()
    assert steps(durable) == [1], "the life that began from it owed it"


def failing_at(durable, *cut, every=9):
    """Save four times, and protect the second from then on; ``cut``: saves with the line down."""
    told = []
    desk = desk_over(
        MemoryStore("test://near"), durable, every, on_event=lambda _, event: told.append(event)
    )
    checkpointer = CheckpointEngine(desk)
    checkpointer.resume({})
    for step in range(1, 5):
        durable.is_down = step in cut
        save(checkpointer, step, keep=[CheckpointId(1, 2)] if step >= 2 else [])
        checkpointer._context.promoter._settle()
    return checkpointer, told


def test_the_best_that_no_promotion_brought_is_brought_when_the_run_ends():
    durable = Failing()
    checkpointer, _ = failing_at(durable, 2, 3, 4)
    assert steps(durable) == [1]
    durable.is_down = False
    checkpointer.close()
    assert steps(durable) == [4, 2]


def test_a_run_whose_best_is_near_alone_does_not_end_well():
    durable = Failing()
    checkpointer, _ = failing_at(durable, 2, 3, 4)
    durable.refused, durable.is_down = "checkpoint-2-", True
    with pytest.raises(
        SaveFailed, match="checkpoint-2-g1, checkpoint-4-g1 is saved only in the near"
    ):
        checkpointer.close()
    assert steps(durable) == [1]


def test_one_that_is_damaged_near_holds_up_no_other_and_is_told_and_stays():
    durable = Failing()
    checkpointer, told = failing_at(durable, 2, 3, 4)
    promoter = checkpointer._context.promoter
    near, best = promoter._tiers.near, CheckpointId(1, 2)
    key = best.key(read_manifest(near, best).files[0].name)
    whole = near.objects[key]
    near.objects[key] = whole[:-1] + bytes([whole[-1] ^ 1])
    durable.is_down = False
    told.clear()
    for step in range(5, 11):
        save(checkpointer, step, keep=[best])
        promoter._settle()
    promoted = [one for one in told if isinstance(one, events.CheckpointPromoted)]
    assert [one.checkpoint for one in promoted] == ["checkpoint-5-g1", "checkpoint-9-g1"], (
        "in place of what failed, and the ninth; not each time that the best is damaged"
    )
    failed = [one for one in told if isinstance(one, events.PromotionFailed)]
    assert [one.checkpoint for one in failed] == ["checkpoint-2-g1"] * 2
    assert 2 in steps(near), "or nobody could mend it any more"
    with pytest.raises(SaveFailed, match="checkpoint-2-g1 is saved only in the near tier"):
        checkpointer.close()
    assert steps(durable) == [10, 9]
    near.objects[key] = whole
    assert promote(promoter._tiers, best, 1)
    assert 2 in steps(durable)


def test_what_is_on_its_way_stays_near_and_the_next_that_is_due_waits(near):
    durable = Held()
    checkpointer = checkpointer_of(near, durable, every=4)
    save(checkpointer, 1)
    assert durable.reached.wait(10)
    save(checkpointer, 2, 3)
    assert steps(near) == [3, 1], "the first is on its way, and takes a place"
    checkpointer.save(4, {}, CheckpointInfo())
    waiter = threading.Thread(target=checkpointer.wait)
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive(), "a save that is due waits for the promotion before it"
    durable.go_on.set()
    waiter.join(20)
    checkpointer.close()
    assert steps(durable) == [4, 1]


class Hours:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic_seconds(self) -> float:
        return self.seconds

    def now_iso(self) -> str:
        return "2026-08-22T12:00:00Z"

    def sleep(self, seconds) -> None:
        self.seconds += seconds


@pytest.mark.parametrize(
    ("tiering", "at"),
    [
        (TieringOptions(durable_every_seconds=60), [1, 4, 6]),
        (TieringOptions(durable_every_seconds=1e9), [1]),
        (TieringOptions(2, durable_every_seconds=60), [1, 2, 4, 6]),
        (TieringOptions(5, durable_every_seconds=1e9), [1, 5]),
        (TieringOptions(), [1, 2, 3, 4, 5, 6]),
    ],
    ids=["time", "rarely", "count or time", "count", "all"],
)
def test_time_and_count_each_ask_for_what_is_durable(tiering, at, near, durable):
    clock = Hours()
    desk = desk_over(near, durable, tiering=tiering, clock=clock, retention=Retention())
    checkpointer = CheckpointEngine(desk)
    checkpointer.resume({})
    for step in range(1, 7):
        save(checkpointer, step)
        checkpointer._context.promoter._settle()
        clock.sleep(29 if step < 4 else 31)
    checkpointer._persister.close()
    checkpointer._context.close()
    assert steps(durable) == at[::-1]


def test_a_cadence_that_cannot_be_kept_is_refused(tmp_path):
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="durable_every_seconds"):
            TieringOptions(durable_every_seconds=seconds)
    with pytest.raises(ConfigError, match="durable_every_seconds"):
        TrainingArguments(str(tmp_path), durable_every_seconds=0.0)
