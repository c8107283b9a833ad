"""A run whose time of day jumps is accounted for as if it had not."""

import json

import pytest

from resilient.clock import SystemClock, boot_name
from resilient.goodput.event_log import agents, correct_clock_steps, present_ms, read_records
from resilient.goodput.report import build_report
from resilient.goodput.timeline import TimeClass
from tests.helpers.told import BEGAN, killed_run, line, record, records_of

UPTIME = 5000.0
HOUR = 3600.0


def told_at(seconds, moved=0.0, boot="one"):
    """Return what stands in each line beside the time of day, which is wrong by ``moved``."""
    return {"seconds": seconds + moved, "monotonic": UPTIME + seconds, "boot": boot}


def skewed(lines, moved, since=0.0):
    """Return lines as told on a machine whose clock is wrong by ``moved`` from a moment on."""
    found = []
    for text in lines:
        fields = json.loads(text)
        seconds = record_seconds(text)
        told = told_at(seconds, moved if seconds >= since else 0.0)
        at_seconds, event = told.pop("seconds"), fields.pop("event")
        fields.pop("at")
        found.append(line(at_seconds, event, **fields, **told))
    return found


def record_seconds(text):
    (one,) = records_of([text])
    return one.at_ms / 1000 - BEGAN


@pytest.mark.parametrize("moved", [-HOUR, HOUR, 86_400.0, -2.0])
@pytest.mark.parametrize("since", [0.0, 7.0, 11.5, 16.0, 31.0, 48.0])
def test_a_jump_changes_nothing_that_is_accounted_for(moved, since):
    true = build_report(records_of(killed_run()))
    found = build_report(records_of(skewed(killed_run(), moved, since)))
    assert found.spent_ms == true.spent_ms
    assert sum(found.spent_ms.values()) == found.wall_ms == true.wall_ms
    assert all(one.length_ms > 0 for one in found.intervals)
    assert (found.goodput, found.lost_steps) == (true.goodput, true.lost_steps)
    assert [one.cause for one in found.faults] == [one.cause for one in true.faults]
    assert found.now.step == true.now.step


def test_the_calendar_is_what_most_records_say():
    lines = [line(**_line(one, HOUR if one == 5 else 0.0)) for one in range(9)]
    moments = [one.at_ms / 1000 - BEGAN for one in correct_clock_steps(records_of(lines))]
    assert moments == list(range(9))


def _line(seconds, moved):
    told = told_at(seconds, moved)
    return {"at_seconds": told.pop("seconds"), "event": "ProgressReported", **told}


def test_each_start_of_a_machine_has_seconds_of_its_own_and_old_files_have_none():
    before = record(100, "ProgressReported", monotonic=9000.0, boot="one")
    after = record(200, "ProgressReported", monotonic=3.0, boot="two")
    old = record(150, "ProgressReported")
    torn = record(160, "ProgressReported", monotonic="soon", boot="one")
    assert correct_clock_steps([after, torn, before, old]) == [before, old, torn, after]


def test_a_launcher_that_left_has_left_though_the_clock_went_back(tmp_path):
    lines = [
        line(0, "AgentStarted", agent="a:1", monotonic=100.0, boot="one"),
        line(1, "ProgressReported", agent="a:1", monotonic=101.0, boot="one"),
        line(2 - HOUR, "RunEnded", agent="a:1", exit_code=75, monotonic=102.0, boot="one"),
    ]
    (tmp_path / "agent.jsonl").write_text("\n".join(lines) + "\n")
    (agent,) = agents(read_records([tmp_path]))
    assert agent.exit_code == 75


def test_the_present_lies_behind_what_was_told_whatever_the_clock_says():
    now_seconds = SystemClock().monotonic_seconds()
    told = [record(0, "ProgressReported", monotonic=now_seconds - 5.0, boot=boot_name())]
    assert present_ms(told, SystemClock(), 7) == pytest.approx(1000 * (BEGAN + 5), abs=2000)
    assert present_ms([record(0, "ProgressReported")], SystemClock(), 7) == 7


def test_a_run_that_goes_on_is_carried_to_the_present():
    told = records_of(skewed(killed_run()[:10], HOUR, 7.0))
    whole = build_report(told, 1000 * (BEGAN + 20))
    assert sum(whole.spent_ms.values()) == whole.wall_ms
    assert max(whole.spent_ms[one] for one in TimeClass) < 60_000
