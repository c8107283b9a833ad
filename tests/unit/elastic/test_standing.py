"""Which host is to blame for a hang: resilient.elastic.hang_detection."""

from dataclasses import replace
from itertools import permutations

import pytest

from resilient.distributed.heartbeat import Phase, ProgressRecord
from resilient.elastic.hang_detection import (
    HangRule,
    HostHangStatus,
    LearnedDeadlines,
    RankStatus,
    find_culprit,
    host_status_of,
    parse_host_status,
)

NOW = 1000.0
WAITING = HostHangStatus(0, 7, Phase.STEP, "S", 60.0, is_overdue=True)
NONE = (0.0,) * len(Phase)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "T"},
        {"state": "T", "is_overdue": False, "waited_seconds": 1.0},
        {"state": "T", "step": 9},
        {"step": 6},
        {"step": 6, "is_overdue": False, "waited_seconds": 1.0},
        {"is_overdue": False, "waited_seconds": 40.0},
        {"state": "D"},
        {"state": "R"},
        {"phase": Phase.LOADING},
        {"waited_seconds": 61.0},
    ],
)
def test_the_other_host_is_to_blame(change):
    other = replace(WAITING, rank=1, **change)
    assert find_culprit(WAITING, [other]) == other
    # It sees the same, and blames nobody else.
    assert find_culprit(other, [WAITING]) is None


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"state": "T", "step": 9}, {"step": 3}),
        ({"step": 3}, {"state": "R"}),
        ({"is_overdue": False}, {"state": "D"}),
        ({"state": "D"}, {"state": "R"}),
        ({"state": "R"}, {"phase": Phase.LOADING}),
        ({"phase": Phase.COMPILING}, {"waited_seconds": 99.0}),
    ],
)
def test_what_weighs_more(worse, better):
    one, other = replace(WAITING, rank=1, **worse), replace(WAITING, rank=2, **better)
    assert find_culprit(WAITING, [other, one]) == one


def test_of_many_that_are_alike_one_is_to_blame_and_all_agree():
    alike = [replace(WAITING, rank=rank) for rank in range(4)]
    for mine, *others in permutations(alike):
        culprit = find_culprit(mine, others)
        assert (culprit or mine).rank == 0


def test_nobody_else_is_no_culprit():
    assert find_culprit(WAITING, []) is None


def vital(rank, step, waited, state="S", phase=Phase.STEP):
    signs = ProgressRecord(step, phase, NOW - waited, NONE, ())
    return RankStatus(rank, signs, state, NOW - waited if state == "T" else None)


def test_a_host_stands_as_the_rank_that_holds_the_others_up():
    rule, learned = HangRule(floor_seconds=60.0), LearnedDeadlines(1.0)

    def of(*vitals):
        return host_status_of(vitals, learned, rule, NOW)

    assert of() is None
    assert of(vital(0, 5, 90, phase=Phase.OUTSIDE)) is None
    assert of(vital(0, 5, 90), vital(1, 4, 70)).rank == 1
    assert of(vital(0, 5, 90)).is_overdue
    assert not of(vital(0, 5, 30)).is_overdue
    assert of(vital(0, 4, 90), vital(1, 5, 3, "T")).rank == 1
    assert of(vital(1, 5, 3, "T", Phase.OUTSIDE)).rank == 1


def test_it_is_read_as_it_was_written():
    assert parse_host_status(WAITING.dump(4)) == (4, WAITING)
    for text in ("", "[]", "{}", '{"number": 1}', '{"number": 1, "phase": 99}'):
        with pytest.raises(ValueError, match=r"invalid rank status|Expecting|is not a valid"):
            parse_host_status(text)
