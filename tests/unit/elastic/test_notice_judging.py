"""What a notice means, and when it is time."""

from __future__ import annotations

import pytest

from resilient.elastic.preemption.notice import (
    LEAD_SECONDS,
    STALE_SECONDS,
    Meaning,
    Notice,
    evaluate_notice,
)

NOW, GRACE = 1_000_000.0, 25.0


def meaning(notice):
    return evaluate_notice(notice, NOW, GRACE, LEAD_SECONDS)


def due(seconds):
    return meaning(Notice("test", NOW + seconds))


def test_nothing_means_nothing():
    assert meaning(None).meaning is Meaning.NOTHING


def test_advice_stops_nothing():
    assert meaning(Notice("test", None, is_advice=True)).meaning is Meaning.ADVICE


def test_without_a_moment_the_grace_counts():
    verdict = meaning(Notice("test"))
    assert (verdict.meaning, verdict.left_seconds) == (Meaning.NOW, GRACE)


@pytest.mark.parametrize(("seconds", "left"), [(120, 118), (30, 28), (3, 1.5), (0.5, 0.25)])
def test_what_is_announced_is_used_but_for_a_margin(seconds, left):
    verdict = due(seconds)
    assert verdict.meaning is Meaning.NOW
    assert verdict.left_seconds == pytest.approx(left)


def test_a_far_end_leaves_training_going_until_it_is_time():
    verdict = due(3600)
    assert verdict.meaning is Meaning.LATER
    assert verdict.in_seconds == pytest.approx(3600 - LEAD_SECONDS)


@pytest.mark.parametrize("seconds", [0, -1, -STALE_SECONDS])
def test_a_host_that_should_be_gone_may_still_have_the_grace(seconds):
    verdict = due(seconds)
    assert (verdict.meaning, verdict.left_seconds) == (Meaning.NOW, GRACE)


def test_a_host_that_outlived_its_end_by_far_goes_on():
    assert due(-STALE_SECONDS - 1).meaning is Meaning.STALE
