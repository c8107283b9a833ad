"""Two ranks with a step in the words of Transformers, on samples grouped by length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.process.gangs import run_gang_to_end

WORKER = Path(__file__).with_name("stock_worker.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return what each rank did, by the kind of its step."""
    found = {}
    for kind in ("own", "stock"):
        out = tmp_path_factory.mktemp(kind)
        run_gang_to_end(2, WORKER, out, kind)
        found[kind] = [torch.load(out / f"result-{one}.pt", weights_only=False) for one in (0, 1)]
    return found


def test_a_step_of_theirs_makes_the_same_bits_on_all_ranks(runs):
    for own, stock in zip(runs["own"], runs["stock"], strict=True):
        assert stock["seen"] == own["seen"]
        assert all(torch.equal(one, own["model"][name]) for name, one in stock["model"].items())
    assert stock["type"] == "MULTI_CPU"


def test_ranks_gather_in_training_and_are_kept_from_it_in_evaluation(runs):
    first, second = runs["stock"]
    assert first["gathered"] == second["gathered"]
    losses = [[float.fromhex(one) for _, one in rank["seen"]] for rank in (first, second)]
    told = [one for one, _, _ in first["gathered"]]
    assert told == [list(pair) for pair in zip(*losses, strict=True)]
    assert {tuple(rows) for _, rows, _ in first["gathered"]} == {(0, 0, 1)}
    assert [last for _, _, last in first["gathered"]] == [False, True, False, True, True] * 2
    assert "one batch less" in first["refused"]


def test_ranks_whose_streams_have_come_apart_take_one_order(runs):
    first, second = (rank["seen"] for rank in runs["own"])
    for epoch in (0, 1):
        part = slice(epoch * 5, epoch * 5 + 5)
        both = [one for rank in (first, second) for indices, _ in rank[part] for one in indices]
        assert sorted(both) == list(range(40))
