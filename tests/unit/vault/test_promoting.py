"""Which saves go on to the durable tier, when, and what comes of one that does not."""

from __future__ import annotations

import threading

import pytest
from tiered import checkpointer_of, desk_over, save, steps

from resilient.checkpointer import About, Checkpointer
from resilient.errors import (
    ConfigError,
    Fenced,
    SaveFailed,
    StoreUnavailable,
)
from resilient.format.names import CheckpointId
from resilient.testing.memory import MemoryStore
from resilient.train.arguments import TrainingArguments
from resilient.vault import facts
from resilient.vault.registry.generations import claim
from resilient.vault.registry.retention import Retention
from resilient.vault.saving.promoter import Tiering


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
        self.is_down = False

    def put(self, key, data) -> None:
        if self.is_down and key.startswith("checkpoint-"):
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
    save(checkpointer, 1, 2, 3, 4, 5)
    checkpointer._desk.promoter._settle()
    assert steps(durable) == [3, 1]
    checkpointer.close()
    assert steps(durable) == [5, 3, 1]
    assert steps(near) == [5, 4]


def test_what_the_run_protects_is_durable(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9, retention=Retention())
    save(checkpointer, 1, 2)
    save(checkpointer, 3, keep=[CheckpointId(1, 2)])
    checkpointer._desk.promoter._settle()
    assert steps(durable) == [2, 1]
    checkpointer.close()


def test_an_older_life_cannot_promote(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9)
    save(checkpointer, 1, 2)
    checkpointer._desk.promoter._settle()
    claim(durable, None, cause="test", clock=checkpointer._desk.clock)
    with pytest.raises(Fenced):
        checkpointer.close()
    assert steps(durable) == [1]


def test_a_failed_promotion_fails_no_save_and_is_owed_by_the_next(near):
    durable, told = Failing(), []
    checkpointer = Checkpointer(
        desk_over(near, durable, 9, told=lambda _, event: told.append(event))
    )
    checkpointer.resume({})
    durable.is_down = True
    save(checkpointer, 1)
    checkpointer._desk.promoter._settle()
    failed = [one for one in told if isinstance(one, facts.PromotionFailed)]
    assert [one.checkpoint for one in failed] == ["checkpoint-1-g1"]
    assert "near tier alone" in failed[0].line()
    durable.is_down = False
    save(checkpointer, 2)
    checkpointer._desk.promoter._settle()
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
    again = Checkpointer(desk_over(near, durable))
    assert again.resume({}).step == 1
    again.close()
    assert steps(durable) == [1], "the life that began from it owed it"


def test_what_is_on_its_way_stays_near_and_the_next_that_is_due_waits(near):
    durable = Held()
    checkpointer = checkpointer_of(near, durable, every=4)
    save(checkpointer, 1)
    assert durable.reached.wait(10)
    save(checkpointer, 2, 3)
    assert steps(near) == [3, 1], "the first is on its way, and takes a place"
    checkpointer.save(4, {}, About())
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
        (Tiering(durable_every_seconds=60), [1, 4, 6]),
        (Tiering(durable_every_seconds=1e9), [1]),
        (Tiering(2, durable_every_seconds=60), [1, 2, 4, 6]),
        (Tiering(5, durable_every_seconds=1e9), [1, 5]),
        (Tiering(), [1, 2, 3, 4, 5, 6]),
    ],
    ids=["time", "rarely", "count or time", "count", "all"],
)
def test_time_and_count_each_ask_for_what_is_durable(tiering, at, near, durable):
    clock = Hours()
    desk = desk_over(near, durable, tiering=tiering, clock=clock, retention=Retention())
    checkpointer = Checkpointer(desk)
    checkpointer.resume({})
    for step in range(1, 7):
        save(checkpointer, step)
        checkpointer._desk.promoter._settle()
        clock.sleep(29 if step < 4 else 31)
    checkpointer._persister.close()
    checkpointer._desk.close()
    assert steps(durable) == at[::-1]


def test_a_cadence_that_cannot_be_kept_is_refused(tmp_path):
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="durable_every_seconds"):
            Tiering(durable_every_seconds=seconds)
    with pytest.raises(ConfigError, match="durable_every_seconds"):
        TrainingArguments(str(tmp_path), durable_every_seconds=0.0)
