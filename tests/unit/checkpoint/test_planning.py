"""Which checkpoints stay, and for which reasons; no store, no clock."""

from __future__ import annotations

import pytest

from resilient.checkpoint.retention import (
    BestOf,
    CheckpointSummary,
    Retention,
    RetentionInput,
    parse_best,
    parse_retention,
    plan_rotation,
)
from resilient.errors import ConfigError
from resilient.format.keys import CheckpointId


def ids(*steps, life=1):
    return [CheckpointId(life, step) for step in steps]


def at(moment, problem="", **metrics):
    return CheckpointSummary(f"2026-01-{moment}:00.000Z", metrics, problem)


def measured(losses):
    """Know checkpoints with a loss each, in one life, newest first."""
    line = ids(*sorted(losses, reverse=True))
    return RetentionInput(
        line, contents={one: at("01T00:00", eval_loss=losses[one.step]) for one in line}
    )


def kept_steps(plan):
    return sorted(one.step for one in plan.kept)


def test_without_a_policy_everything_stays():
    plan = plan_rotation(Retention(), RetentionInput(ids(3, 2, 1)))
    assert plan.doomed == ()
    assert plan.kept[CheckpointId(1, 1)] == ("no limit is set",)


def test_every_reason_of_every_checkpoint_is_named():
    retention = Retention(keep_last=2, keep_every=10, keep_best=(BestOf("loss"),))
    plan = plan_rotation(retention, measured({5: 0.9, 10: 0.1, 15: 0.4, 20: 0.5}))
    assert dict(plan.kept) == {
        CheckpointId(1, 20): ("the newest", "among the last 2", "its step is a multiple of 10"),
        CheckpointId(1, 15): ("among the last 2",),
        CheckpointId(1, 10): (
            "number 1 of the best 1 by loss (0.1)",
            "its step is a multiple of 10",
        ),
    }
    assert plan.doomed == (CheckpointId(1, 5),)
    assert plan.lines()[0].startswith("keep   checkpoint-20-g1: the newest; among the last 2;")
    assert plan.lines()[-1] == "delete checkpoint-5-g1"


def test_the_oldest_abandoned_goes_first_and_the_newest_of_the_line_last():
    plan = plan_rotation(Retention(keep_last=1), RetentionInput(ids(9, 8, 7), ids(6, 5)))
    assert [one.step for one in plan.doomed] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("wish", "kept"),
    [
        ("loss:2", [2, 3, 5]),
        ("eval_loss:1", [3, 5]),
        ("loss:1:max", [1, 5]),
        ("loss:max", [1, 5]),
        ("score:9", [5]),
    ],
)
def test_the_best_are_found_by_name_and_direction(wish, kept):
    known = measured({1: 0.9, 2: 0.3, 3: 0.1, 4: 0.8, 5: 0.5})
    assert kept_steps(plan_rotation(Retention(keep_best=(parse_best(wish),)), known)) == kept


def test_of_two_equal_ones_the_older_is_the_better_as_in_the_trainer():
    known = measured({1: 0.5, 2: 0.5, 3: 0.9})
    assert kept_steps(plan_rotation(Retention(keep_best=(BestOf("loss"),)), known)) == [1, 3]


def test_several_metrics_have_places_of_their_own():
    line = ids(4, 3, 2, 1)
    values = {1: (0.1, 0.1), 2: (0.5, 0.9), 3: (0.6, 0.5), 4: (0.7, 0.6)}
    contents = {
        one: at("01T00:00", eval_loss=values[one.step][0], eval_accuracy=values[one.step][1])
        for one in line
    }
    best = (BestOf("loss"), BestOf("accuracy"))
    plan = plan_rotation(Retention(keep_best=best), RetentionInput(line, contents=contents))
    assert kept_steps(plan) == [1, 2, 4]


def test_a_damaged_best_gives_its_place_to_the_next_and_is_named():
    known = measured({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9})
    contents = {**known.contents, CheckpointId(1, 1): at("01T00:00", "x is missing", eval_loss=0.1)}
    retention = Retention(keep_best=(BestOf("loss", 2),))
    plan = plan_rotation(retention, RetentionInput(known.line, contents=contents))
    assert kept_steps(plan) == [1, 2, 3, 4]
    [(one, why)] = plan.damaged.items()
    assert one.step == 1
    assert why == "would be among the best by loss, but is damaged: x is missing"
    assert plan.kept[one] == (why,)


def test_a_damaged_one_that_would_not_count_anyway_is_not_kept_for_it():
    known = measured({1: 0.8, 2: 0.2, 3: 0.3})
    contents = {**known.contents, CheckpointId(1, 1): at("01T00:00", "short", eval_loss=0.8)}
    plan = plan_rotation(
        Retention(keep_best=(BestOf("loss"),)), RetentionInput(known.line, contents=contents)
    )
    assert kept_steps(plan) == [2, 3]
    assert not plan.damaged


def test_what_cannot_be_read_stays_because_it_might_be_the_best():
    known = measured({1: 0.8, 2: 0.2, 3: 0.3})
    contents = {
        **known.contents,
        CheckpointId(1, 1): CheckpointSummary(problem="its bytes are not"),
    }
    plan = plan_rotation(
        Retention(keep_best=(BestOf("loss"),)), RetentionInput(known.line, contents=contents)
    )
    assert kept_steps(plan) == [1, 2, 3]
    assert "its content is unknown" in plan.damaged[CheckpointId(1, 1)]


def test_hours_and_days_are_those_of_the_calendar_and_count_only_where_one_was_saved():
    line = ids(7, 6, 5, 4, 3, 2, 1)
    moments = ["05T09:10", "05T09:05", "05T08:59", "03T23:30", "03T23:00", "02T12:00", "01T12:00"]
    contents = {one: at(moment) for one, moment in zip(line, moments, strict=True)}
    hourly = plan_rotation(Retention(keep_hourly=3), RetentionInput(line, contents=contents))
    assert kept_steps(hourly) == [4, 5, 7]
    daily = plan_rotation(Retention(keep_daily=3), RetentionInput(line, contents=contents))
    assert kept_steps(daily) == [2, 4, 7]
    assert daily.kept[line[3]] == ("the newest of day 2026-01-03",)
    assert hourly.kept[line[3]] == ("the newest of hour 2026-01-03 23",)


def test_weeks_months_and_years_are_those_of_the_calendar():
    line = ids(6, 5, 4, 3, 2, 1)
    moments = ("2026-02-01", "2026-01-26", "2026-01-25", "2026-01-01", "2025-12-29", "2024-12-31")
    contents = {
        one: CheckpointSummary(f"{day}T10:00:00.000Z")
        for one, day in zip(line, moments, strict=True)
    }
    known = RetentionInput(line, contents=contents)
    # A Sunday ends a week; the first of January is of the week that began in December.
    weekly = plan_rotation(Retention(keep_weekly=4), known)
    assert kept_steps(weekly) == [1, 3, 4, 6]
    assert weekly.kept[line[3]] == ("the newest of week 2026-W01",)
    assert kept_steps(plan_rotation(Retention(keep_monthly=3), known)) == [2, 5, 6]
    yearly = plan_rotation(Retention(keep_yearly=9), known)
    assert kept_steps(yearly) == [1, 2, 6]
    assert yearly.kept[line[4]] == ("the newest of year 2025",)


def test_within_is_counted_from_the_newest_of_the_line():
    line, abandoned = ids(9, 8, 7, life=2), ids(6, 5)
    moments = ("05T10:00", "05T08:00", "03T10:00", "05T09:00", "02T10:00")
    contents = {one: at(moment) for one, moment in zip((*line, *abandoned), moments, strict=True)}
    plan = plan_rotation(
        Retention(keep_within="2h"), RetentionInput(line, abandoned, contents=contents)
    )
    assert kept_steps(plan) == [6, 8, 9]
    assert plan.kept[line[1]] == ("saved within 2h of the newest",)
    # The newest of all may be one that was left.
    contents[abandoned[0]] = at("09T10:00")
    plan = plan_rotation(
        Retention(keep_within="2d"), RetentionInput(line, abandoned, contents=contents)
    )
    assert kept_steps(plan) == [6, 7, 8, 9]


@pytest.mark.parametrize("length", ["", "2", "2 fortnights", "0d", "-1d"])
def test_a_length_that_is_none_is_refused(length):
    with pytest.raises(ConfigError, match="`keep_within`"):
        parse_retention({"keep_within": length})


def test_a_time_of_another_zone_counts_in_utc():
    line = ids(3, 2, 1)
    moments = ("2026-01-02T00:30:00.000+01:00", "2026-01-01T23:00:00.000Z", "2026-01-01T22:00:00Z")
    contents = {one: CheckpointSummary(moment) for one, moment in zip(line, moments, strict=True)}
    plan = plan_rotation(Retention(keep_hourly=2), RetentionInput(line, contents=contents))
    assert kept_steps(plan) == [1, 3]


def test_an_abandoned_one_takes_no_place_of_the_line_under_any_policy():
    line, abandoned = ids(20, life=2) + ids(10), ids(40, 30, 20)
    contents = {one: at("01T10:00", eval_loss=one.step / 100) for one in line}
    contents |= {one: at("01T11:00", eval_loss=0.01) for one in abandoned}
    known = RetentionInput(line, abandoned, contents=contents)
    for retention in (
        Retention(keep_last=2),
        Retention(keep_best=(BestOf("loss", 2),)),
        Retention(keep_every=20),
        Retention(keep_hourly=1),
        Retention(keep_daily=1),
    ):
        kept = plan_rotation(retention, known).kept
        expected = {*line} if retention.keep_last or retention.keep_best else {line[0]}
        if retention.keep_every:
            expected |= {CheckpointId(1, 40)}
        assert set(kept) == expected, retention


def test_what_the_run_protects_takes_a_place_and_what_a_person_tagged_does_not():
    """As in Transformers, a limit of 3 with an older best is the best and the newest two."""
    line = ids(5, 4, 3, 2, 1)
    protected = plan_rotation(Retention(keep_last=3), RetentionInput(line, keep=[line[-1]]))
    assert kept_steps(protected) == [1, 4, 5]
    tagged = plan_rotation(
        Retention(keep_last=3), RetentionInput(line, pinned={line[-1]: ["tagged `a`"]})
    )
    assert kept_steps(tagged) == [1, 3, 4, 5]


def test_what_holds_everything_is_named_on_everything():
    plan = plan_rotation(
        Retention(keep_last=1), RetentionInput(ids(3, 2, 1), held="the newest is damaged")
    )
    assert plan.doomed == ()
    assert plan.kept[CheckpointId(1, 2)] == ("nothing is deleted: the newest is damaged",)


@pytest.mark.parametrize(
    "name", ["keep_last", "keep_every", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_a_number_below_one_is_refused_and_never_means_delete_all(name, value):
    with pytest.raises(ConfigError, match=f"`{name}`"):
        Retention(**{name: value})


@pytest.mark.parametrize("wish", ["loss:0", "loss:x", "loss:3:up", ":3", "", "loss:-1"])
def test_a_best_that_makes_no_sense_is_refused(wish):
    with pytest.raises(ConfigError):
        parse_best(wish)


def test_a_configuration_spells_a_retention():
    wishes = {
        "keep_best": ["loss:3", {"metric": "accuracy", "count": 2}],
        "keep_every": 1000,
        "verify_before_rotate": "full",
    }
    assert parse_retention(wishes, 3) == Retention(
        keep_last=3,
        keep_best=(BestOf("loss", 3), BestOf("accuracy", 2)),
        keep_every=1000,
        verify_before_rotate="full",
    )
    assert parse_retention({"keep_best": "loss:2"}).keep_best == (BestOf("loss", 2),)
    assert parse_retention({"keep_best": {"metric": "loss"}}).keep_best == (BestOf("loss"),)
    assert parse_retention({}).is_empty


@pytest.mark.parametrize(
    ("wishes", "limit", "said"),
    [
        ({"keep_lst": 3}, None, "has no option `keep_lst`"),
        ({"keep_last": 3}, 2, "mean the same"),
        ({}, 0, "keep at least 1"),
        ({"keep_best": {"metrik": "loss"}}, None, "metrik"),
        ({"verify_before_rotate": "no"}, None, "use one of written, quick, full"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wishes, limit, said):
    with pytest.raises(ConfigError, match=said):
        parse_retention(wishes, limit)
