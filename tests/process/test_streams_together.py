"""Several ranks train on a dataset without a length, die, and go on where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.process.gangs import finish, gang_of, run_gang_to_end

WORKER = Path(__file__).with_name("ddp_worker.py")


@pytest.mark.smoke
def test_ranks_that_read_a_stream_resume_bit_for_bit(tmp_path):
    # 30 samples are 4 rounds of 8, the last incomplete: the run dies in its second pass.
    options = ["max_steps=7", "save_steps=2", "stream=30", "dataloader_num_workers=1"]
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run_gang_to_end(2, WORKER, "save", unbroken, *options)
    with gang_of(2, WORKER, "save", broken, *options, "die_after=5") as gang:
        assert {status for status, _, _ in finish(gang)} == {1}
    run_gang_to_end(2, WORKER, "save", broken, *options)
    for rank in range(2):
        one, other = (
            torch.load(folder / f"result-{rank}.pt", weights_only=False)
            for folder in (unbroken, broken)
        )
        assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
        assert one["history"] == other["history"]
