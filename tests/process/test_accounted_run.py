"""A real run that is killed and preempted: its events say where each second went, and why."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise

from resilient.goodput.event_log import read_records
from resilient.goodput.report import build_report
from resilient.goodput.timeline import TimeClass
from tests.process.jobs import Job, run

OPTIONS = ("--steps", "40", "--pause", "0.05")


def live_through_it(folder):
    """Kill a rank, preempt the job, let it end; return the killed process and the seconds."""
    launch = ("--events", str(folder / "events"))
    began = time.monotonic()
    with Job(folder, *OPTIONS, launch=launch) as job:
        killed = job.wait_for_step(6, rank=1)
        os.kill(killed, signal.SIGKILL)
        job.wait_for_step(16, rank=1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.said()
        # The rank may have died between the end of a step and the line about it.
        died_after = max(one["step"] for one in job.steps(rank=1) if one["pid"] == killed)
    code, said = run(folder, *OPTIONS, launch=launch)
    assert code == 0, said
    return died_after, time.monotonic() - began


def test_the_report_of_a_killed_and_preempted_run_sums_up_and_names_the_causes(tmp_path):
    died_after, took_seconds = live_through_it(tmp_path)
    found = build_report(read_records([tmp_path]))
    spent = found.spent_ms
    assert sum(spent.values()) == found.wall_ms
    assert 0 < found.wall_ms <= 1000 * took_seconds
    assert all(one.ended_ms == later.began_ms for one, later in pairwise(found.intervals))
    some = (
        TimeClass.TRAINING,
        TimeClass.START,
        TimeClass.EVALUATION,
        TimeClass.SAVE_STALL,
        TimeClass.DOWN,
    )
    assert all(spent[kind] > 0 for kind in (*some, TimeClass.RESTORE))

    assert [one.cause for one in found.faults] == ["signal", "preemption"]
    first, second = found.faults
    assert (first.rank, first.detail) == (1, "signal 9")
    assert (second.detail, second.lost_steps) == ("SIGTERM", 0)
    lost = died_after - found.doings[1].first_step
    assert first.lost_steps in (lost, lost + 1)
    assert first.down_ms is not None
    assert second.down_ms is not None
    assert [one.life.cause for one in found.doings] == ["start", "failure", "start"]
    assert (found.now.step, found.now.exit_code, found.now.is_done) == (40, 0, True)
