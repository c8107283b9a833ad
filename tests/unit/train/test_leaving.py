"""Where the last save is to get to: by the time that is left, and what saves timings."""

from __future__ import annotations

import pytest

from resilient.train.saver import SaveDestination, SaveTimings, choose_tier, p95


def took(land, copy=0.2, count=20):
    saves = SaveTimings()
    saves.commit_seconds.extend([land] * count)
    saves.copy_seconds.extend([copy] * count)
    return saves


def chosen(left, saves, *, near=False, keeper=False):
    return choose_tier(left, saves, has_near=near, has_daemon=keeper)


def test_with_nothing_measured_everything_is_tried():
    assert chosen(0.5, SaveTimings()) is SaveDestination.DURABLE


@pytest.mark.parametrize(
    ("left", "near", "keeper", "tier"),
    [
        (60, False, False, SaveDestination.DURABLE),
        (60, True, True, SaveDestination.DURABLE),
        (15, True, False, SaveDestination.NEAR),
        (15, True, True, SaveDestination.NEAR),
        (15, False, False, SaveDestination.DURABLE),
        (15, False, True, SaveDestination.DURABLE),
        (5, False, True, SaveDestination.MEMORY),
        (5, True, True, SaveDestination.MEMORY),
        (5, True, False, SaveDestination.IN_FLIGHT),
        (5, False, False, SaveDestination.IN_FLIGHT),
        (1.1, False, True, SaveDestination.IN_FLIGHT),
        (-1, True, True, SaveDestination.IN_FLIGHT),
    ],
)
def test_the_safest_tier_that_is_reached_in_time(left, near, keeper, tier):
    assert chosen(left, took(10), near=near, keeper=keeper) is tier


def test_the_slow_saves_count_and_not_the_mean():
    saves = took(2, count=18)
    saves.commit_seconds.extend([30, 30])
    assert saves.commit_p95 == 30
    assert chosen(25, saves, keeper=True) is SaveDestination.MEMORY


def test_where_only_a_fast_save_would_make_it_that_is_tried():
    saves = took(2, count=18)
    saves.commit_seconds.extend([30, 30])
    assert chosen(25, saves) is SaveDestination.DURABLE
    assert chosen(25, saves, near=True) is SaveDestination.NEAR


def test_only_the_last_saves_count():
    saves = took(100, count=10)
    saves.commit_seconds.extend([1] * 64)
    assert saves.commit_p95 == 1


def test_p95_is_a_value_that_was_seen():
    assert p95([]) is None
    assert p95([3.0]) == 3.0
    assert p95(range(1, 101)) == 95


def test_of_several_ranks_the_one_that_asks_for_least_decides():
    assert max(SaveDestination.DURABLE, SaveDestination.MEMORY) is SaveDestination.MEMORY


def test_what_a_save_rested_is_no_time_that_the_last_one_needs():
    saves = SaveTimings()
    for _ in range(3):
        saves.record_commit(30.0, 28.0)
    assert saves.commit_p95 == 2.0
    assert saves.last_save_seconds == 30.0
    assert chosen(5, saves) is SaveDestination.DURABLE
    saves.record_commit(1.0, 1.5)
    assert min(saves.commit_seconds) == 0.0
