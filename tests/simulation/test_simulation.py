"""A slice of the simulator's seeds, and what it must find in broken code."""

from __future__ import annotations

import pytest

from tests.simulation.breakages import BREAKAGES, SIGNS, broken
from tests.simulation.storm import simulate

SEEDS = 100
# Seeds that found a defect once, of the library or of what is held against it.
ONCE_BAD = (12, 42, 77, 163, 402, 2473, 4550, 5335, 6379, 7428, 9089)
# The first seed that finds each defect, counted from 0.
FOUND = {"fence": 0, "vote": 351, "silence": 1140, "commit": 28, "number": 2, "stop": 262}


def test_no_seed_of_the_slice_breaks_a_promise():
    verdicts = [simulate(seed) for seed in (*range(SEEDS), *ONCE_BAD)]
    assert {one.seed: one.violations for one in verdicts if one.violations} == {}
    # A world in which nothing happens keeps every promise.
    assert sum(one.commits for one in verdicts) > 2 * SEEDS
    assert {code for one in verdicts for code in one.codes} >= {0, 75, 80}
    assert sum(one.lives for one in verdicts) > 2.2 * SEEDS


@pytest.mark.smoke
def test_a_seed_is_the_same_world_each_time():
    assert simulate(7) == simulate(7)


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_code_is_found(name):
    first = max(FOUND[name] - 2, 0)
    with broken(name):
        found = [one for seed in range(first, first + 8) for one in simulate(seed).violations]
    assert any(SIGNS[name] in one for one in found), found
