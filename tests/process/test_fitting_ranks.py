"""A rank that runs out of memory: all go on with a smaller batch, and none waits for it."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.process.gangs import run_gang_to_end

WORKER = Path(__file__).with_name("fit_worker.py")


def test_one_rank_out_of_memory_makes_all_go_on_smaller_with_the_same_bits(tmp_path):
    run_gang_to_end(2, WORKER, tmp_path)
    results = [torch.load(tmp_path / f"result-{rank}.pt") for rank in range(2)]
    for one in results:
        found, told = one["found"], one["told"]
        assert found["batch"] == told["batch"] == 4
        assert found["history"] == told["history"]
        for name, weight in told["model"].items():
            assert torch.equal(found["model"][name], weight), name
    seen = [index for one in results for index in one["found"]["seen"]]
    assert sorted(seen) == sorted([*range(48)] * 2)
