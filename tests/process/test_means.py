"""Ranks add the loss of a step beside what follows: nobody waits, and the bits are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.gangs import run_gang_to_end

WORKER = Path(__file__).with_name("means_worker.py")


@pytest.mark.parametrize("way", [(), ("near",)], ids=["by gloo", "through memory"])
def test_a_sum_that_was_begun_is_the_sum_and_says_that_all_ranks_began(tmp_path, way):
    run_gang_to_end(2, WORKER, tmp_path, *way)
    first, second = (
        json.loads((tmp_path / f"said-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)
    )
    assert first["means"] == second["means"]
    assert first["second"] == second["second"] == first["means"][1]
    assert first["means"] == pytest.approx([0.1 * step + 0.35 + 1 / 3 for step in (1, 2, 3)])
    assert first["was_alone"], "to begin is not to wait"
    assert first["others_were_there"], "to have the sum is to know that the other has begun"
