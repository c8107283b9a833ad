"""A real run whose rank is killed: what Prometheus sees of it, and what the file says after."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request

import pytest

from tests.helpers.exposition import figures, scrape
from tests.process.jobs import PATIENCE_SECONDS, Job

OPTIONS = ("--steps", "60", "--pause", "0.05")
KILLED = 'resilient_restarts_total{cause="signal"}'
ADDRESS = re.compile(r"metrics at (http://127\.0\.0\.1:\d+/metrics)")


def until(job, url, is_so):
    """Scrape until figures are as they should be; return them."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        assert job.process.poll() is None, job.said()
        found = scrape(url)
        if is_so(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{found}\n{job.said()}")


@pytest.mark.smoke
def test_a_killed_rank_is_counted_by_its_cause_and_steps_go_on(tmp_path):
    file = tmp_path / "run.prom"
    launch = ("--metrics-port", "auto", "--metrics-file", str(file), "--metrics-interval", "1")
    with Job(tmp_path / "run", *OPTIONS, launch=launch) as job:
        killed = job.wait_for_step(4, rank=1)
        url = ADDRESS.search(job.said())[1]
        before = until(job, url, lambda found: found.get("resilient_step", 0) >= 4)
        assert (before[KILLED], before["resilient_lives_total"]) == (0, 1)
        well = url.replace("/metrics", "/healthz")
        with urllib.request.urlopen(well, timeout=10) as answer:  # noqa: S310 - our own
            assert answer.read() == b"ok\n"
        os.kill(killed, signal.SIGKILL)
        after = until(job, url, lambda found: found[KILLED] == 1)
        assert after['resilient_failures_total{cause="signal"}'] == 1
        until(job, url, lambda found: found["resilient_lives_total"] == 2)
        assert job.wait() == 0, job.said()
    last = figures(file.read_text())
    assert last["resilient_step"] == 60
    assert 'resilient_rank_step{local_rank="1"}' in last
    assert (last["resilient_agent_exit_code"], last["resilient_lives_total"]) == (0, 2)
    assert (last["resilient_generation"], last["resilient_world_size"]) == (2, 2)
    assert last["resilient_checkpoint_step"] == 60
    assert last["resilient_checkpoint_commit_seconds_count"] == last["resilient_checkpoints_total"]
    assert last["resilient_checkpoints_total"] > 1
    assert last["resilient_steps_at_risk"] == 0
    assert last["resilient_metrics_errors_total"] == 0
    spent = [value for name, value in last.items() if name.startswith("resilient_spent_seconds")]
    useful = last['resilient_spent_seconds{class="training"}'] / sum(spent)
    assert abs(useful - last["resilient_goodput_ratio"]) < 1e-3
    assert 0 < last["resilient_goodput_ratio"] < 1
