"""The loss of a step is one mean over the tokens of all its ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.process.gangs import run_gang_to_end
from tests.process.loss_worker import train
from tests.unit.train.token_models import LENGTH

WORKER = Path(__file__).with_name("loss_worker.py")


def test_two_ranks_that_accumulate_equal_one_with_a_big_batch(tmp_path, monkeypatch):
    """20 rows: five rounds of 2 x 2, in windows of 2, 2 and 1; alone batches of 8, 8 and 4."""
    (tmp_path / "two").mkdir()
    run_gang_to_end(2, WORKER, tmp_path / "two")
    first, second = (torch.load(tmp_path / "two" / f"result-{rank}.pt") for rank in range(2))
    assert first["on each rank"]["tokens"] == second["on each rank"]["tokens"] == 2 * 20 * LENGTH
    for way in ("over ranks", "smoothed"):
        alone = train(tmp_path / "one", way, 8, 1)
        assert len(alone["losses"]) == 6
        for here in (first[way], second[way]):
            assert here["losses"] == pytest.approx(alone["losses"], abs=1e-12)
            for name, weight in alone["model"].items():
                assert torch.allclose(here["model"][name], weight, rtol=0, atol=1e-12)
        if way == "over ranks":
            other = first["on each rank"]["losses"]
            assert other != pytest.approx(alone["losses"], abs=1e-4)
