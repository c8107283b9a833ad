"""When a group hangs, and who is blamed: the rules of resilient.elastic.hang_detection."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.distributed.heartbeat import Phase, ProgressRecord
from resilient.elastic.hang_detection import (
    HangRule,
    LearnedDeadlines,
    RankStatus,
    find_hang,
    parse_hang_rule,
)
from resilient.errors import ConfigError

RULE = HangRule(floor_seconds=60.0, median_factor=10.0, patience_seconds=1800.0)
NONE = (0.0,) * len(Phase)
LEARNED = LearnedDeadlines(median_seconds=1.0)
NOW = 10_000.0


def signs(step=5, phase=Phase.STEP, waited=0.0, longest=NONE, steps=()):
    return ProgressRecord(step, phase, NOW - waited, longest, steps)


def vital(rank, state="S", stopped=None, **more):
    return RankStatus(rank, signs(**more), state, None if stopped is None else NOW - stopped)


def longest(phase, seconds):
    return tuple(seconds if one is phase else 0.0 for one in Phase)


def hang_of(*vitals, learned=LEARNED, rule=RULE):
    return find_hang(vitals, learned, rule, NOW)


@pytest.mark.parametrize(
    ("phase", "learned", "expected"),
    [
        (Phase.STEP, LearnedDeadlines(1.0), 60.0),  # the floor
        (Phase.STEP, LearnedDeadlines(30.0), 300.0),  # ten times the median
        (Phase.STEP, LearnedDeadlines(1.0, longest(Phase.STEP, 100.0)), 200.0),  # twice the longest
        (Phase.STEP, LearnedDeadlines(), 1800.0),  # nothing is known yet
        (Phase.FIRST, LearnedDeadlines(1.0), 1800.0),
        (Phase.EVALUATING, LearnedDeadlines(1.0), 1800.0),
        (Phase.SAVING, LearnedDeadlines(1.0), 1800.0),
        (Phase.COMPILING, LearnedDeadlines(1.0), 1800.0),
        (Phase.LOADING, LearnedDeadlines(1.0, longest(Phase.LOADING, 1200.0)), 2400.0),
        (Phase.OUTSIDE, LearnedDeadlines(1.0), None),
    ],
)
def test_each_phase_has_its_deadline(phase, learned, expected):
    assert learned.deadline_seconds(phase, RULE) == expected


def test_a_fixed_deadline_is_that_of_steps_only():
    rule = parse_hang_rule("300", 60.0, 1800.0)
    assert LearnedDeadlines().deadline_seconds(Phase.STEP, rule) == 300.0
    assert LearnedDeadlines().deadline_seconds(Phase.EVALUATING, rule) == 1800.0


def test_learning_takes_a_few_steps_and_the_slowest_rank_counts():
    few = signs(steps=(1.0,) * 4)
    assert LearnedDeadlines().after([few]).median_seconds is None
    ranks = [signs(steps=(1.0, 1.0, 9.0, 1.0, 1.0)), signs(steps=(2.0,) * 5)]
    assert LearnedDeadlines().after(ranks).median_seconds == 2.0


def test_what_the_lives_before_have_shown_is_kept():
    known = LearnedDeadlines(3.0, longest(Phase.SAVING, 50.0))
    later = known.after([signs(longest=longest(Phase.SAVING, 10.0))])
    assert later.median_seconds == 3.0
    assert later.longest_seconds[Phase.SAVING] == 50.0


def test_a_group_whose_ranks_all_wait_too_long_hangs():
    assert hang_of(vital(0, waited=61.0), vital(1, waited=60.5)).first.rank == 0


def test_a_group_is_given_its_whole_deadline():
    assert hang_of(vital(0, waited=60.0), vital(1, waited=60.0)) is None


def test_who_is_ahead_only_waits():
    hang = hang_of(vital(0, step=6, waited=100.0), vital(1, step=5, waited=90.0))
    assert [one.rank for one in hang.culprits] == [1]


def test_nobody_hangs_while_the_rank_behind_has_time():
    slow = vital(1, step=5, phase=Phase.EVALUATING, waited=500.0)
    assert hang_of(vital(0, step=6, waited=400.0), slow) is None


def test_one_of_those_behind_that_has_time_is_waited_for():
    assert hang_of(vital(0, waited=61.0), vital(1, phase=Phase.COMPILING, waited=61.0)) is None


def test_a_stopped_rank_has_the_deadline_of_a_step_whatever_it_does():
    stopped = vital(1, "T", 61.0, step=9, phase=Phase.SAVING, waited=70.0)
    assert hang_of(vital(0, step=8, waited=1.0), stopped).first.rank == 1
    fresh = vital(1, "T", 59.0, step=9, phase=Phase.SAVING, waited=70.0)
    assert hang_of(vital(0, step=8, waited=1.0), fresh) is None


def test_a_rank_that_is_stopped_outside_of_training_is_found_too():
    assert hang_of(vital(0, "T", 61.0, phase=Phase.OUTSIDE)).first.rank == 0


def test_outside_of_training_nobody_hangs():
    assert hang_of(vital(0, phase=Phase.OUTSIDE, waited=1e6)) is None


@pytest.mark.parametrize(("state", "blamed"), [("T", 2), ("D", 2), ("R", 2), ("S", 0)])
def test_of_equals_the_stopped_the_frozen_and_the_busy_are_blamed(state, blamed):
    others = [vital(0, waited=70.0), vital(1, waited=65.0)]
    assert hang_of(*others, vital(2, state, waited=61.0)).first.rank == blamed


def test_hangs_in_a_row_are_given_longer():
    assert RULE.doubled(0) == RULE
    assert LEARNED.deadline_seconds(Phase.STEP, RULE.doubled(2)) == 240.0
    fixed = replace(RULE, fixed_seconds=5.0).doubled(1)
    assert LEARNED.deadline_seconds(Phase.STEP, fixed) == 10.0


@pytest.mark.parametrize("word", ["", "never", "-1", "0", "nan", "inf"])
def test_a_deadline_that_is_none_is_refused(word):
    with pytest.raises(ConfigError, match="not auto, off"):
        parse_hang_rule(word, 60.0, 1800.0)


def test_auto_and_off_are_words():
    assert parse_hang_rule("auto", 60.0, 1800.0) == HangRule()
    assert not parse_hang_rule("OFF", 60.0, 1800.0).is_on


ranks = st.builds(
    vital,
    st.just(0),
    st.sampled_from(["R", "S", "D"]),
    step=st.integers(0, 3),
    phase=st.sampled_from(Phase),
    waited=st.floats(0, 5000),
)


@given(st.lists(ranks, max_size=6), st.one_of(st.none(), st.floats(0.001, 500)))
def test_a_hang_blames_ranks_behind_that_are_past_their_deadline(group, median):
    group = [replace(one, rank=place) for place, one in enumerate(group)]
    learned = LearnedDeadlines(median)
    hang = find_hang(group, learned, RULE, NOW)
    training = [one for one in group if one.heartbeat.phase is not Phase.OUTSIDE]
    fewest = min((one.heartbeat.step for one in training), default=None)
    behind = [one for one in training if one.heartbeat.step == fewest]
    late = {
        one.rank
        for one in behind
        if NOW - one.heartbeat.since_seconds > learned.deadline_seconds(one.heartbeat.phase, RULE)
    }
    assert (hang is not None) == bool(behind and len(late) == len(behind))
    if hang is not None:
        assert {one.rank for one in hang.culprits} == late
        assert all(one.waited_seconds > one.deadline_seconds >= 60.0 for one in hang.culprits)
