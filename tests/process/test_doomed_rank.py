"""A rank of the doomed host dies before the save of a stop: nobody hangs, and it is resumable."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store
from tests.helpers.endings import ending
from tests.process.jobs import Job, run

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
        # Who waits for the dead rank has nothing to save; what is committed is what goes on.
        assert job.wait() == 75, job.said()
        assert time.monotonic() - told_at < GRACE_SECONDS + 5, job.said()
        said = job.said()
    assert f"rank {doomed} failed first in attempt 1: SIGKILL" in said
    newest = committed(open_store(str(tmp_path / "run")))[0].step
    assert ending(tmp_path / "run")["step"] == newest
    # What was staged before may land after that was said.
    told = re.search(r"at most the work since checkpoint-(\d+)-g1 is lost", said)
    assert told, said
    assert 4 <= int(told[1]) <= newest
    code, said = run(tmp_path / "run", "--steps", str(newest + 2))
    assert code == 0, said
    assert f"resumed from checkpoint-{newest}-g1" in said
