"""Who is blamed for not getting into training, or out of it: resilient.elastic.hang_detection."""

import pytest

from resilient.distributed.heartbeat import Phase, ProgressRecord
from resilient.elastic.hang_detection import (
    HangRule,
    ObservedRank,
    are_quiet,
    find_starting,
    find_stuck_end,
    find_stuck_start,
)

RULE = HangRule(patience_seconds=1800.0)
NOW = 10_000.0
BEGAN = NOW - 5000.0
NONE = (0.0,) * len(Phase)
TRAINED = tuple(1.0 if one is Phase.FIRST else 0.0 for one in Phase)


def seen(rank, phase=None, waited=4000.0, *, step=-1, longest=NONE, state="S"):
    signs = None if phase is None else ProgressRecord(step, phase, NOW - waited, longest, ())
    return ObservedRank(rank, signs, state)


def silent(rank, **more):
    return seen(rank, **more)


def started(rank, waited=4000.0):
    return seen(rank, Phase.OUTSIDE, waited)


def left(rank, waited=4000.0, step=9):
    return seen(rank, Phase.OUTSIDE, waited, step=step, longest=TRAINED)


def start_of(*ranks, rule=RULE, began=BEGAN):
    return find_stuck_start(ranks, rule, began, NOW)


def end_of(*ranks, ended=NOW - 4000.0, rule=RULE):
    return find_stuck_end(ranks, rule, ended, NOW)


def blamed(hang):
    return [one.rank for one in hang.culprits]


def test_who_is_not_heard_of_is_blamed_by_who_waits_in_its_start():
    hang = start_of(started(0), silent(1), started(2))
    assert blamed(hang) == [1]
    first = hang.first
    assert (first.activity, first.step, first.waited_seconds) == ("starting", -1, 5000.0)
    assert first.deadline_seconds == 1800.0


def test_who_is_not_in_training_is_blamed_by_who_is():
    assert blamed(start_of(seen(0, Phase.FIRST), started(1))) == [1]


def test_only_the_ranks_furthest_behind_are_blamed():
    assert blamed(start_of(seen(0, Phase.FIRST), started(1), silent(2))) == [2]


@pytest.mark.parametrize("phase", [Phase.FIRST, Phase.COMPILING, Phase.BETWEEN])
def test_nobody_is_blamed_while_another_one_shows_signs(phase):
    assert start_of(seen(0, phase, 1800.0), silent(1)) is None
    assert start_of(seen(0, phase, 1801.0), silent(1)) is not None


def test_patience_begins_with_the_ranks():
    assert start_of(seen(0, Phase.FIRST, 1800.5), silent(1), began=NOW - 1700.0) is None


@pytest.mark.parametrize(
    "ranks",
    [
        (silent(0), silent(1)),
        (started(0), started(1)),
        (seen(0, Phase.FIRST), seen(1, Phase.FIRST)),
        (silent(0),),
        (),
        (left(0), silent(1)),
    ],
)
def test_without_one_that_waits_a_slow_start_is_no_hang(ranks):
    assert find_starting(ranks) == []
    assert start_of(*ranks) is None


def test_a_step_was_done_without_those_that_show_nothing():
    assert start_of(seen(0, Phase.STEP, step=0), silent(1)) is None


def test_hangs_in_a_row_give_a_start_longer():
    assert start_of(started(0, 2000.0), silent(1), rule=RULE.doubled(1)) is None


def test_who_has_left_training_is_blamed_once_another_has_ended():
    hang = end_of(left(1))
    assert (blamed(hang), hang.first.activity, hang.first.step) == ([1], "ending", 9)
    assert end_of(left(1), ended=None) is None


def test_who_has_not_made_a_step_has_left_training_all_the_same():
    assert left(1, step=-1).stage == 3
    assert blamed(end_of(left(1, step=-1))) == [1]


def test_the_end_is_given_the_patience_from_the_last_sign_or_end():
    assert end_of(left(1), ended=NOW - 1800.0) is None
    assert end_of(left(1, 1800.0)) is None
    assert end_of(left(1), left(2, 100.0)) is None


def test_who_still_trains_is_judged_as_in_training():
    assert end_of(left(1), seen(2, Phase.SAVING, step=9)) is None


def test_who_was_never_heard_of_may_end_when_it_likes():
    assert end_of(silent(1)) is None
    assert blamed(end_of(silent(1), left(2))) == [2]


def test_the_longest_silent_is_the_first_suspect():
    assert blamed(end_of(left(1, 2000.0), left(2, 3000.0))) == [2, 1]


def test_other_hosts_are_asked_only_when_all_have_left():
    assert are_quiet([left(0)], RULE, BEGAN, NOW)
    assert not are_quiet([left(0, 100.0)], RULE, BEGAN, NOW)
    assert not are_quiet([silent(0)], RULE, BEGAN, NOW)
