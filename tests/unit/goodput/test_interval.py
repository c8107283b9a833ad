"""How often to save: the formula, its bounds, and how often a run has failed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import ConfigError
from resilient.goodput.save_planning import SaveEvery, parse_every
from resilient.save_interval import (
    PRIOR_SECONDS,
    FailureObservations,
    IntervalBounds,
    best_seconds,
    choose_interval,
    expect,
    observe,
)

costs = st.floats(0.001, 1e5)
times = st.floats(1.0, 1e7)


@pytest.mark.parametrize(
    ("mtbf_minutes", "best_minutes"),
    [(24 * 60, 117), (6 * 60, 57), (15, 9.1)],
)
def test_the_formula_says_what_daly_published(mtbf_minutes, best_minutes):
    found = best_seconds(5 * 60, mtbf_minutes * 60) / 60
    assert found == pytest.approx(best_minutes, rel=0.006)


@given(costs, st.floats(1.0, 100.0), times)
def test_it_grows_with_the_cost_of_a_save(cost, factor, mtbf):
    assert best_seconds(cost * factor, mtbf) >= best_seconds(cost, mtbf) - 1e-6


@given(costs, times, st.floats(1.0, 100.0))
def test_it_grows_with_the_time_between_failures(cost, mtbf, factor):
    assert best_seconds(cost, mtbf * factor) >= best_seconds(cost, mtbf) - 1e-6


@given(st.floats(0.01, 1e3), st.floats(1e5, 1e7))
def test_while_a_save_is_cheap_no_other_interval_costs_less(cost, mtbf):
    best = best_seconds(cost, mtbf)
    least = expect(best, cost, mtbf, 0.0).share
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert expect(best * factor, cost, mtbf, 0.0).share > least


@given(costs, times, st.floats(0.0, 1e4))
def test_the_bounds_hold(cost, mtbf, land):
    bounds = IntervalBounds(overhead_max=0.05, seconds_max=3600.0, land_seconds=land)
    found = choose_interval(cost, mtbf, bounds)
    assert cost / (found.seconds + cost) <= 0.05 + 1e-9
    assert found.seconds >= land
    assert found.seconds <= max(3600.0, land, 19 * cost + 1e-6)
    if not found.bound:
        assert found.seconds == found.best_seconds


@pytest.mark.parametrize(
    ("cost", "mtbf", "land", "bound", "seconds"),
    [
        (1.0, 7200.0, 0.0, "", best_seconds(1.0, 7200.0)),
        (60.0, 1e6, 0.0, "longest", 3600.0),
        (60.0, 7200.0, 0.0, "overhead", 1140.0),
        (0.01, 600.0, 30.0, "landing", 30.0),
        (300.0, 1e6, 0.0, "overhead", 5700.0),
    ],
)
def test_what_bounds_an_interval_is_named(cost, mtbf, land, bound, seconds):
    found = choose_interval(cost, mtbf, IntervalBounds(land_seconds=land))
    assert (found.bound, found.seconds) == (bound, pytest.approx(seconds))


def test_a_failure_loses_half_an_interval_and_what_was_not_whole_yet():
    found = expect(100.0, 1.0, 1000.0, 5.0)
    assert found.lost_seconds == 55.0
    assert found.lost_share == pytest.approx(0.055)
    assert found.saving_share == pytest.approx(1 / 101)
    assert expect(1e9, 1.0, 1000.0, 0.0).share == 1.0


def at(hour):
    return f"2026-01-01T{hour:02d}:00:00.000Z"


def test_a_run_that_never_failed_has_the_prior():
    assert observe([]).mtbf_seconds() == PRIOR_SECONDS
    assert FailureObservations(0, 3600.0).mtbf_seconds(7200.0) == PRIOR_SECONDS + 3 * 3600
    assert observe([("start", at(0))]) == FailureObservations(0, 0.0)


def test_failures_count_and_preemptions_do_not():
    lives = [
        ("start", at(0)),
        ("failure", at(2)),
        ("membership", at(3)),
        ("start", at(9)),
        ("hang", at(10)),
        ("rollback", at(12)),
    ]
    found = observe(lives)
    assert found == FailureObservations(3, (2 + 1 + 1 + 2) * 3600.0)
    assert found.mtbf_seconds() == (6 * 3600 + PRIOR_SECONDS) / 4


def test_a_clock_that_went_back_and_a_record_without_one_count_for_nothing():
    found = observe([("start", at(5)), ("failure", at(3)), ("failure", "?"), ("failure", at(9))])
    assert found == FailureObservations(3, 0.0)


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("500steps", SaveEvery(steps=500)),
        ("1 step", SaveEvery(steps=1)),
        ("30s", SaveEvery(seconds=30)),
        ("0.5s", SaveEvery(seconds=0.5)),
        (" 5M ", SaveEvery(seconds=300)),
        ("10min", SaveEvery(seconds=600)),
        ("1.5h", SaveEvery(seconds=5400)),
        ("auto", SaveEvery()),
        ("auto, memory=1step", SaveEvery(memory_steps=1)),
        ("memory=10 steps,5m", SaveEvery(seconds=300, memory_steps=10)),
        ("memory=1step", SaveEvery(memory_steps=1, says_saves=False)),
    ],
)
def test_the_words_for_how_often(text, every):
    assert parse_every(text, "--every") == every
    assert every.is_auto == ("auto" in text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "0s", "0steps", "-5m", "5 apples", "1.5steps", "infs", "nan", "5m30s"),
        *("5m,", "5m,6m", "memory=", "memory=5m", "memory=auto", "memory=1step,memory=2steps"),
    ],
)
def test_nonsense_is_refused_with_what_would_do(text):
    with pytest.raises(ConfigError, match="500steps, 30s, 5m, 1h or auto"):
        parse_every(text, "--every")


def test_no_cost_asks_for_no_interval():
    assert best_seconds(0.0, 100.0) == 0.0
    assert math.isfinite(best_seconds(1e9, 1.0))
