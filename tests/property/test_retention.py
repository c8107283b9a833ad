"""Whatever the policies and the history, the plan keeps what it must and says why."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.retention import (
    BestOf,
    CheckpointSummary,
    Retention,
    RetentionInput,
    plan_rotation,
)
from resilient.format.keys import CheckpointId

IDS = st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 12))
NUMBER = st.none() | st.integers(1, 4)
BEST = st.builds(
    BestOf, st.sampled_from(("loss", "accuracy")), st.integers(1, 3), st.none() | st.booleans()
)
RETENTIONS = st.builds(
    Retention,
    keep_last=NUMBER,
    keep_best=st.lists(BEST, max_size=2).map(tuple),
    keep_every=NUMBER,
    keep_hourly=NUMBER,
    keep_daily=NUMBER,
    keep_weekly=NUMBER,
    keep_monthly=NUMBER,
    keep_within=st.none() | st.sampled_from(("30m", "1h", "1d")),
)
MOMENTS = st.builds("2026-01-0{}T0{}:30:00.000Z".format, st.integers(1, 4), st.integers(0, 3))
METRICS = st.dictionaries(
    st.sampled_from(("eval_loss", "eval_accuracy")), st.floats(-9, 9), max_size=2
)
CONTENTS = st.builds(CheckpointSummary, MOMENTS, METRICS, st.just("") | st.just("short")) | st.just(
    CheckpointSummary(problem="its bytes differ from what was committed")
)


@st.composite
def repositories(draw):
    everything = sorted(draw(st.sets(IDS, min_size=1)), reverse=True)
    is_abandoned = {one: draw(st.booleans()) for one in everything}
    line = [one for one in everything if not is_abandoned[one]]
    abandoned = [one for one in everything if is_abandoned[one]]
    return RetentionInput(
        line,
        abandoned,
        pinned={one: ["tagged `a`"] for one in draw(st.sets(IDS, max_size=2))},
        keep=draw(st.sets(IDS, max_size=2)),
        contents={one: draw(CONTENTS) for one in everything},
    )


def policies(retention):
    """Split a retention in its single policies."""
    names = ("keep_last", "keep_every", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
    given_ones = {name: getattr(retention, name) for name in names}
    single = [Retention(**{name: value}) for name, value in given_ones.items() if value]
    single += [Retention(keep_within=retention.keep_within)] * bool(retention.keep_within)
    return single + [Retention(keep_best=(one,)) for one in retention.keep_best]


@settings(max_examples=300)
@given(RETENTIONS, repositories())
def test_everything_is_kept_for_a_reason_or_goes_and_nothing_is_both(retention, known):
    plan = plan_rotation(retention, known)
    assert set(plan.kept) | set(plan.doomed) == set(known.everything)
    assert not set(plan.kept) & set(plan.doomed)
    assert all(reasons and all(reasons) for reasons in plan.kept.values())
    assert all(len(set(reasons)) == len(reasons) for reasons in plan.kept.values())


@settings(max_examples=300)
@given(RETENTIONS, repositories())
def test_what_stays_is_the_union_of_what_each_policy_alone_would_keep(retention, known):
    single = policies(retention)
    if not single:
        assert plan_rotation(retention, known).doomed == ()
        return
    kept = set().union(*(plan_rotation(one, known).kept for one in single))
    assert set(plan_rotation(retention, known).kept) == kept


@given(RETENTIONS, repositories())
def test_the_pinned_the_protected_and_the_newest_never_go(retention, known):
    doomed = set(plan_rotation(retention, known).doomed)
    assert not doomed & {*known.pinned, *known.keep, known.everything[0]}


@given(RETENTIONS, repositories())
def test_never_fewer_stay_than_the_last_n(retention, known):
    kept = plan_rotation(retention, known).kept
    assert len(kept) >= min(retention.keep_last or 1, len(known.everything))


@given(RETENTIONS, repositories())
def test_the_oldest_abandoned_goes_first(retention, known):
    doomed = plan_rotation(retention, known).doomed
    order = [*reversed(known.abandoned), *reversed(known.line)]
    assert list(doomed) == [one for one in order if one in doomed]


@given(RETENTIONS, repositories())
def test_nothing_goes_while_something_holds_it(retention, known):
    held = RetentionInput(
        known.line, known.abandoned, known.pinned, known.keep, known.contents, held="a reason"
    )
    assert plan_rotation(retention, held).doomed == ()


@given(RETENTIONS, repositories())
def test_planning_again_after_the_plan_was_carried_out_lets_nothing_more_go(retention, known):
    kept = plan_rotation(retention, known).kept
    left = RetentionInput(
        [one for one in known.line if one in kept],
        [one for one in known.abandoned if one in kept],
        known.pinned,
        [one for one in known.keep if one in kept],
        {one: content for one, content in known.contents.items() if one in kept},
    )
    assert plan_rotation(retention, left).doomed == ()
