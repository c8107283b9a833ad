"""A slice of the seeds of several hosts, and what must be found in broken code."""

from __future__ import annotations

import pytest

from tests.simulation.hosts.breakages import FOUND, HOST_BREAKAGES, broken_hosts
from tests.simulation.hosts.storm import simulate_hosts

SEEDS = 60
# Seeds that found a defect of the library or of torch's rendezvous with it, now mended.
ONCE_BAD = (34, 108, 143, 2352, 5154, 5184, 5763, 6045, 7887)


def test_no_seed_of_the_slice_breaks_a_promise():
    verdicts = [simulate_hosts(seed) for seed in (*range(SEEDS), *ONCE_BAD)]
    assert {one.seed: one.violations for one in verdicts if one.violations} == {}
    # A world in which nothing happens keeps every promise.
    assert sum(len(one.strikes) - 1 for one in verdicts) > 1.5 * SEEDS
    assert sum(one.lives for one in verdicts) > 1.8 * SEEDS
    assert {code for one in verdicts for code in one.codes} >= {0, 69, 75}
    assert {size for one in verdicts for size in one.sizes} == {1, 2, 3, 4}


def test_a_seed_of_hosts_is_the_same_world_each_time():
    assert simulate_hosts(8) == simulate_hosts(8)


@pytest.mark.parametrize("name", HOST_BREAKAGES)
def test_broken_hosts_are_found(name):
    seed, sign = FOUND[name]
    with broken_hosts(name):
        found = simulate_hosts(seed).violations
    assert any(sign in one for one in found), found
