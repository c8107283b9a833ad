"""A killed rank is replaced by warm workers, with the bits of a run that nothing happened to."""

import json
import os
import signal
import time
from pathlib import Path

from tests.helpers.endings import differences, ending
from tests.process import forked
from tests.process.jobs import PATIENCE_SECONDS, Job, run

WARM = "resilient-warm\n"


def nursery_of(pid):
    """Return the process that workers can be forked from, 0 before there is one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    warm = [int(one) for one in children if Path(f"/proc/{one}/comm").read_text() == WARM]
    return warm[0] if warm else 0


def facts(folder, name):
    lines = (folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def test_a_job_recovers_bit_for_bit_through_warm_workers_and_again(tmp_path, monkeypatch):
    # The fork server learns from what the first workers import.
    monkeypatch.setattr(forked, "PLAIN", True)
    folder, calm = tmp_path / "struck", tmp_path / "calm"
    with Job(folder, "--pause", "0.08", launch=("--events", str(folder / "events"))) as job:
        ranks = [job.wait_for_step(5, rank) for rank in (0, 1)]
        # They stand still until the process is there; a second is enough on an idle machine.
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        while not nursery_of(job.process.pid):
            assert time.monotonic() - began < PATIENCE_SECONDS, job.said()
            time.sleep(0.05)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        os.kill(ranks[1], signal.SIGKILL)
        second = job.wait_for_step(12, rank=0)
        assert second not in ranks
        os.kill(second, signal.SIGKILL)
        assert job.wait() == 0, job.said()
    assert [one["is_warm"] for one in facts(folder, "WorkerGroupStarted")] == [False, True, True]
    code, said = run(calm)
    assert code == 0, said
    assert differences(ending(folder), ending(calm)) == []
