"""How often the durable tier takes a save when that is planned: by promotions and lost hosts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from resilient.checkpoint import events
from resilient.checkpoint.generations import claim
from resilient.checkpoint.promotion_policy import PromotionSchedule, TieringOptions
from resilient.checkpoint.retention import Retention
from resilient.checkpoint_engine import CheckpointEngine
from resilient.errors import StoreUnavailable
from resilient.save_interval import best_seconds
from resilient.testing.memory_store import MemoryStore
from resilient.train.arguments import TrainingArguments
from resilient.train.session import _tiering
from tests.helpers.tiered import desk_over, save, steps

DAY = 86400.0
HOUR = 3600.0


class Days:
    """A clock that the test moves on, and that says the time of day as well."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic_seconds(self) -> float:
        return self.seconds

    def now_iso(self) -> str:
        hours, seconds = divmod(int(self.seconds), 3600)
        return f"2026-08-22T{hours:02d}:{seconds // 60:02d}:{seconds % 60:02d}Z"

    def sleep(self, seconds) -> None:
        self.seconds += seconds


class Slow(MemoryStore):
    """Takes its time for each manifest."""

    def __init__(self, clock, seconds) -> None:
        super().__init__("test://slow")
        self._clock, self.seconds = clock, seconds

    def put_new(self, key, data) -> None:
        if key.endswith("manifest.json"):
            self._clock.sleep(self.seconds)
        super().put_new(key, data)

    def put(self, key, data) -> None:
        if key.endswith("manifest.json"):
            self._clock.sleep(self.seconds)
        super().put(key, data)


@pytest.fixture
def clock():
    return Days()


def opened(clock, durable, told=None):
    near = MemoryStore("test://near")
    tiering = TieringOptions(is_planned=True)
    desk = desk_over(near, durable, tiering=tiering, clock=clock, retention=Retention())
    checkpointer = CheckpointEngine(desk)
    checkpointer.resume({})
    return checkpointer


def train(checkpointer, clock, count, every_seconds):
    for step in range(1, count + 1):
        save(checkpointer, step)
        checkpointer._context.promoter._settle()
        clock.sleep(every_seconds)
    checkpointer._persister.close()
    checkpointer._context.close()


def test_saves_go_on_when_it_pays(clock):
    durable = Slow(clock, 10.0)
    checkpointer = opened(clock, durable)
    pace = checkpointer._context.promoter._schedule
    train(checkpointer, clock, 12, 300.0)
    best = best_seconds(10.0, DAY)
    assert 1200 < best < 1400
    assert pace.chosen(0.0).seconds == pytest.approx(best)
    # The first tells what a promotion takes; then each when 1300 seconds have passed.
    assert steps(durable) == [11, 6, 1]


def test_a_promotion_that_takes_longer_or_a_host_that_is_lost_often_moves_it(clock):
    def interval(took, losses=0):
        store = MemoryStore("test://lives")
        for cause in ("start", *["membership"] * losses):
            claim(store, None, cause=cause, clock=clock)
        pace = PromotionSchedule()
        pace.begin(SimpleNamespace(store=store, clock=clock))
        pace.note(took)
        return pace.chosen(0.0)

    assert interval(40.0).seconds > 1.8 * interval(10.0).seconds
    assert interval(10.0, losses=8).mtbf_seconds == pytest.approx(DAY / 9)
    assert interval(10.0, losses=8).seconds < interval(10.0).seconds / 2
    assert (interval(2000.0).seconds, interval(2000.0).bound) == (HOUR, "longest")
    # The way to the store is free half of the time, whatever it costs.
    assert (interval(5000.0).seconds, interval(5000.0).bound) == (5000.0, "overhead")


def test_failures_that_the_near_tier_survives_say_nothing(clock):
    store = MemoryStore("test://lives")
    for cause in ("start", "failure", "hang", "rollback", "failure"):
        claim(store, None, cause=cause, clock=clock)
    pace = PromotionSchedule()
    pace.begin(SimpleNamespace(store=store, clock=clock))
    pace.note(10.0)
    assert pace.chosen(0.0).mtbf_seconds == pytest.approx(DAY)


def test_what_is_chosen_is_told_with_its_reasons_and_not_each_time(clock):
    told = []
    desk = SimpleNamespace(store=MemoryStore("test://lives"), clock=clock, emit_once=told.append)
    pace = PromotionSchedule()
    pace.begin(desk)
    assert pace.plan(desk) == TieringOptions()
    assert told == []
    for took in (10.0, 10.0, 11.0):
        pace.note(took)
        assert pace.plan(desk).durable_every_seconds > 1200
    (one,) = told
    assert isinstance(one, events.PromotionScheduleChosen)
    assert (one.cost_seconds, one.mtbf_seconds, one.losses, one.bound) == (10.0, DAY, 0, "")
    assert "every 1.3" in one.message()
    assert "a promotion takes 10 s, 0 changes of hosts: one in 24 h" in one.message()
    pace.note(100.0)
    pace.note(100.0)
    pace.note(100.0)
    pace.note(100.0)
    pace.plan(desk)
    assert len(told) == 2


def test_a_record_that_cannot_be_read_stops_nothing(clock):
    class Down(MemoryStore):
        def list(self, prefix=""):
            raise StoreUnavailable("the line is cut", key=prefix)

    pace = PromotionSchedule()
    pace.begin(SimpleNamespace(store=Down("test://down"), clock=clock))
    pace.note(10.0)
    assert pace.chosen(0.0).mtbf_seconds == pytest.approx(DAY)


@pytest.mark.parametrize(
    ("said", "is_planned"),
    [
        ({"save_every": "auto"}, True),
        ({"save_every": "auto", "durable_every": 3}, False),
        ({"save_every": "auto", "durable_every_seconds": 60.0}, False),
        ({"save_every": "5m"}, False),
        ({}, False),
    ],
)
def test_who_plans_saves_by_their_cost_plans_promotions_too(said, is_planned, tmp_path):
    args = TrainingArguments(str(tmp_path), near_repo=str(tmp_path / "near"), **said)
    assert _tiering(args).is_planned is is_planned
    assert TieringOptions(**_tiering(args).to_json()) == _tiering(args)
