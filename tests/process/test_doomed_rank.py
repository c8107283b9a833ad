"""A rank of the doomed host dies before the save of a stop: nobody hangs, and it is resumable."""

from __future__ import annotations

import os
import signal
import time

import pytest
from endings import ending
from jobs import Job, run

from resilient.storage.open import open_store
from resilient.vault.registry.catalog import committed

pytestmark = pytest.mark.slow
GRACE_SECONDS = 12.0


@pytest.mark.parametrize("doomed", [0, 1])
def test_a_rank_that_dies_after_the_notice_costs_the_steps_since_the_last_commit(tmp_path, doomed):
    options = ("--steps", "100000", "--save-steps", "4", "--pause", "0.05")
    notice = tmp_path / "notice"
    launch = ("--notice", f"file:{notice}", "--max-restarts", "0")
    with Job(tmp_path / "run", *options, launch=launch) as job:
        pid = job.wait_for_step(10, rank=doomed)
        notice.write_text(f'{{"seconds": {GRACE_SECONDS}}}')
        os.kill(pid, signal.SIGKILL)
        told_at = time.monotonic()
        assert job.wait() != 0
        assert time.monotonic() - told_at < GRACE_SECONDS + 5, job.said()
    newest = committed(open_store(str(tmp_path / "run")))[0].step
    assert newest >= 4
    assert ending(tmp_path / "run")["step"] == newest
    code, said = run(tmp_path / "run", "--steps", str(newest + 2))
    assert code == 0, said
    assert f"resumed from checkpoint-{newest}-g1" in said
