"""Saves by time and by cost: at which step, agreed on by all, and without changing a bit."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import save_interval
from resilient.checkpoint.catalog import committed
from resilient.clock import SystemClock
from resilient.distributed.launch_env import LaunchEnv, World, read_launch, write_launch
from resilient.errors import ConfigError
from resilient.goodput.save_planning import SaveEvery
from resilient.storage.open import open_store
from resilient.train import session
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.derived import is_planned, memory_steps
from resilient.train.callbacks import save_schedule
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.callbacks.save_schedule import (
    SaveMeasurements,
    StepTimes,
    needs_report,
    plan,
    slowed_seconds,
)
from tests.unit.train.fakes import equal
from tests.unit.train.models import DieAfter, Dies, make_trainer

DAY = 86_400.0
measured = st.builds(
    SaveMeasurements, st.floats(1e-4, 1e3), st.floats(0.0, 1e3), st.floats(0.0, 1e4)
)


def steps(repository):
    return [one.step for one in sorted(repository.checkpoints)]


class OwnClock(SystemClock):
    """A clock that the test moves."""

    now_seconds = 1000.0

    def monotonic_seconds(self):
        return self.now_seconds


class Takes(TrainerCallback):
    """Steps take so many seconds each, by number, and an evaluation an hour."""

    def __init__(self, clock, seconds=lambda _: 1.0):
        self.clock = clock
        self.seconds = seconds

    def on_step_begin(self, args, state, control, /, **_):
        self.clock.now_seconds += self.seconds(state.global_step + 1)

    def on_evaluate(self, args, state, control, /, **_):
        self.clock.now_seconds += 3600.0


@pytest.fixture
def clock(monkeypatch):
    made = OwnClock()
    monkeypatch.setattr(session, "SystemClock", lambda: made)
    return made


def test_saves_are_so_many_seconds_of_steps_apart(tmp_path, repository, clock):
    make_trainer(tmp_path, max_steps=24, save_every="7s", callbacks=[Takes(clock)]).train()
    assert steps(repository) == [7, 14, 21, 24]


def test_the_time_of_an_evaluation_is_nobodys_step(tmp_path, repository, clock):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_size": 4, "max_steps": 22}
    make_trainer(tmp_path, save_every="10s", callbacks=[Takes(clock)], **options).train()
    assert steps(repository) == [10, 20, 22]


def test_steps_that_get_slower_are_planned_anew_at_each_save(tmp_path, repository, clock):
    slower = Takes(clock, lambda step: 1.0 if step <= 10 else 10.0)
    make_trainer(tmp_path, max_steps=40, save_every="10s", callbacks=[slower]).train()
    found = steps(repository)
    apart = [later - one for one, later in pairwise(found)]
    assert found[0] == 10
    assert apart[0] > apart[-2]
    assert min(apart[:-1]) >= 1


def test_an_interval_is_one_step_at_least(tmp_path, repository, clock):
    slow = Takes(clock, lambda _: 60.0)
    make_trainer(tmp_path, max_steps=8, save_every="1s", callbacks=[slow]).train()
    assert steps(repository) == [4, 5, 6, 7, 8]


def test_a_number_of_steps_is_save_steps(tmp_path, repository):
    make_trainer(tmp_path, max_steps=12, save_every="5steps").train()
    assert steps(repository) == [5, 10, 12]


def test_the_launchers_word_wins_and_reaches_the_workers(tmp_path):
    told = write_launch(LaunchEnv(World(), every="6steps"))
    assert read_launch(told).every == "6steps"
    assert read_launch({}).every == ""
    args = TrainingArguments(str(tmp_path), save_every="5m")
    session._heed(args, "6steps")
    assert (args.save_every, args.save_steps) == ("6steps", 6)
    session._heed(args, "")
    assert args.save_every == "6steps"


def test_the_launchers_word_is_refused_where_the_script_says_other_moments(tmp_path):
    args = TrainingArguments(str(tmp_path), save_strategy="epoch")
    with pytest.raises(ConfigError, match=r"--every.*`save_strategy`='epoch'"):
        session._heed(args, "5m")


def test_memory_leaves_saves_where_they_were_and_needs_a_keeper(tmp_path, capsys):
    args = TrainingArguments(str(tmp_path), save_every="memory=2steps", save_strategy="epoch")
    assert (memory_steps(args), is_planned(args), args.save_steps) == (2, False, 500)
    make_trainer(tmp_path, max_steps=12, save_every="memory=1step,5steps").train()
    assert [one.step for one in committed(open_store(str(tmp_path)))] == [12, 10, 5]
    assert capsys.readouterr().err.count("not cached in memory: this host has no saver daemon") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"save_every": "soon"}, "500steps, 30s"),
        ({"save_every": "0steps"}, "not accepted"),
        ({"save_every": "5m", "save_strategy": "epoch"}, "`save_strategy`='epoch'"),
        ({"save_every": "9steps", "save_strategy": "no"}, "`save_strategy`='no'"),
        ({"save_every": "memory=1step", "save_strategy": "no"}, "`save_strategy`='no'"),
        ({"save_every": "memory=1step", "save_only_model": True}, "`save_only_model`"),
        ({"save_every": "memory=1step", "near_repo": "near"}, "`near_repo`"),
        (
            {"save_every": "auto", "eval_strategy": "steps", "load_best_model_at_end": True},
            "`load_best_model_at_end`",
        ),
    ],
)
def test_what_contradicts_it_is_refused(tmp_path, options, why):
    with pytest.raises(ConfigError, match=why):
        TrainingArguments(str(tmp_path), **options)


@pytest.fixture
def often(monkeypatch):
    """Let runs be expected to fail every few milliseconds, whatever saves take."""
    monkeypatch.setattr(save_interval, "PRIOR_SECONDS", 0.004)
    monkeypatch.setattr(
        save_schedule, "IntervalBounds", partial(save_interval.IntervalBounds, overhead_max=0.9)
    )
    monkeypatch.setattr(save_schedule, "UNMEASURED_SECONDS", 0.001)


def trained(folder, repository, *, dies=None, **options):
    """Return all that the last checkpoint of a run holds, and which steps were saved."""
    options = {
        "max_steps": 22,
        "save_steps": 21,
        "eval_strategy": "steps",
        "eval_steps": 5,
    } | options
    if dies:
        with pytest.raises(Dies):
            make_trainer(folder, eval_size=4, callbacks=[DieAfter(dies)], **options).train()
    make_trainer(folder, eval_size=4, **options).train()
    return repository.checkpoints[max(repository.checkpoints)], steps(repository)


@pytest.mark.parametrize("dies", [None, 9, 17])
def test_what_is_saved_when_changes_no_bit_of_training(tmp_path, repository, often, dies):
    fixed, at_end = trained(tmp_path / "fixed", repository)
    # Measured intervals may come to any steps, but these are too few to be come to by chance.
    assert at_end == [21, 22]
    repository.checkpoints.clear()
    chosen, saved = trained(tmp_path / "auto", repository, save_every="auto", dies=dies)
    assert len(saved) > 2, "the test needs a run that saves"
    assert fixed.keys() == chosen.keys()
    assert not [name for name in fixed if not equal(fixed[name], chosen[name])]


def test_the_reasoning_is_told_and_told_again_when_it_changes(tmp_path, repository, clock, capsys):
    slow = Takes(clock, lambda _: 30.0)
    make_trainer(tmp_path, max_steps=12, save_every="auto", callbacks=[slow]).train()
    said = [one for one in capsys.readouterr().err.splitlines() if "saving every" in one]
    assert "until the first save is measured" in said[0]
    assert "a save costs 0 s, 0 failures: one in 24" in said[1]
    assert len(said) == 2


@given(st.lists(measured, min_size=1, max_size=8), st.floats(1.0, 1e6), st.randoms())
def test_all_ranks_come_to_one_plan_whoever_rules(shown, mtbf, random):
    for every in (SaveEvery(), SaveEvery(seconds=90.0)):
        found = plan(every, shown, mtbf)
        random.shuffle(shown)
        assert plan(every, shown, mtbf) == found
        assert found.steps >= 1


@given(st.lists(measured, min_size=1, max_size=4), measured)
def test_a_slower_rank_makes_fewer_steps_of_the_same_time(shown, other):
    every = SaveEvery(seconds=90.0)
    assert plan(every, [*shown, other], DAY).steps <= plan(every, shown, DAY).steps


def test_the_slowest_ranks_save_decides_for_auto():
    ranks = [
        SaveMeasurements(1.0, 0.1, 5.0),
        SaveMeasurements(2.0, 0.4, 3.0),
        SaveMeasurements(1.0, None, None),
    ]
    found = plan(SaveEvery(), ranks, DAY)
    assert found.chosen is not None
    assert (found.chosen.cost_seconds, found.step_seconds) == (0.4, 2.0)
    assert found.steps == round(found.seconds / 2.0)
    cheap = plan(SaveEvery(), [SaveMeasurements(1.0, 0.0, 5.0)], DAY)
    assert (cheap.seconds, cheap.chosen.bound) == (5.0, "landing")


def test_with_no_save_measured_the_first_one_comes_soon():
    assert plan(SaveEvery(), [SaveMeasurements(2.0)], DAY).steps == 30


def test_a_change_by_more_than_a_quarter_is_told():
    assert needs_report(None, 1.0)
    assert not needs_report(100.0, 125.0)
    assert needs_report(100.0, 126.0)
    assert needs_report(100.0, 74.0)


def timed(marks, stalled=None):
    times = StepTimes()
    for nth, (began, ended) in enumerate(marks):
        times.begin(began, 0.0)
        times.end(ended, (stalled or {}).get(nth, 0.0))
    return times


def test_the_first_step_is_left_out_and_the_rest_of_the_loop_is_not():
    assert timed([(0, 50)]).measured(None) is None
    assert timed([(0, 50), (51, 53), (53, 55)]).measured(None) == SaveMeasurements(2.5)


def test_waiting_for_a_save_is_no_step_and_is_what_the_save_costs():
    times = timed([(0, 1), (1, 2)])
    times.save(None)
    times.begin(2.5, 0.5)
    times.end(5.5, 2.5)
    times.record_waits(2.5)
    assert times.measured(4.0) == SaveMeasurements(1.0, 2.5, 4.0)


def test_steps_are_slowed_while_a_save_is_on_its_way():
    assert slowed_seconds([3.0, 3.0, 2.0, 2.0, 2.0], 5.0) == 2.0
    assert slowed_seconds([2.0, 2.0], 5.0) == 0.0
    assert slowed_seconds([2.0, 2.5, 2.5], 1.0) == 0.0
    assert slowed_seconds([], 1.0) == 0.0


def test_what_slows_training_down_is_part_of_the_cost():
    times = StepTimes()
    times.begin(0, 0)
    times.end(1, 0)
    times.save(None)
    now = 1.0
    for seconds in (3.0, 3.0, 2.0, 2.0):
        times.begin(now, 0.0)
        now += seconds
        times.end(now, 0.0)
    times.record_waits(0.5)
    times.save(6.0)
    found = times.measured(6.0)
    assert found is not None
    assert found.cost_seconds == 0.5 + 2.0
