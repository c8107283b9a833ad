from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.process.gangs import finish, gang_of, run_gang_to_end

WORKER = Path(__file__).with_name("ddp_worker.py")


def results(folder, size):
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(size)]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_averaged_over_ranks_once_a_step(tmp_path, accumulation):
    together, joint, alone = tmp_path / "two", tmp_path / "one", tmp_path / "alone"
    step = ["max_steps=1", f"gradient_accumulation_steps={accumulation}"]
    run_gang_to_end(2, WORKER, "run", together, *step, "count_sent=1")
    run_gang_to_end(1, WORKER, "run", joint, *step, "per_device_train_batch_size=8")
    run_gang_to_end(1, WORKER, "run", alone, *step)
    first, second = (one["model"] for one in results(together, 2))
    # However many micro-batches a step has.
    numbers = sum(one.numel() for one in first.values())
    assert [one["sent"] for one in results(together, 2)] == [numbers] * 2
    whole, own = results(joint, 1)[0]["model"], results(alone, 1)[0]["model"]
    assert same(first, second)
    assert all(torch.allclose(first[name], whole[name], atol=1e-6) for name in first)
    assert not any(torch.allclose(first[name], own[name], atol=1e-5) for name in first)


def test_evaluation_does_not_depend_on_the_number_of_ranks(tmp_path):
    run_gang_to_end(2, WORKER, "run", tmp_path / "two", "max_steps=2", "eval_steps=1")
    first, second = results(tmp_path / "two", 2)
    assert first["history"] == second["history"]
    assert first["predictions"].tolist() == second["predictions"].tolist()
    assert len(first["predictions"]) == 21


def test_a_group_that_the_script_has_made_is_used(tmp_path):
    run_gang_to_end(2, WORKER, "run", tmp_path / "ours", "max_steps=3")
    run_gang_to_end(2, WORKER, "run", tmp_path / "theirs", "max_steps=3", "own_group=1")
    ours, theirs = results(tmp_path / "ours", 2), results(tmp_path / "theirs", 2)
    assert same(ours[1]["model"], theirs[1]["model"])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.smoke), 3])
def test_a_run_of_many_ranks_resumes_bit_for_bit(tmp_path, size):
    options = ["max_steps=7", "save_steps=2"]
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run_gang_to_end(size, WORKER, "save", unbroken, *options)
    with gang_of(size, WORKER, "save", broken, *options, "die_after=5") as gang:
        ends = finish(gang)
    assert {status for status, _, _ in ends} == {1}
    run_gang_to_end(size, WORKER, "save", broken, *options)
    for one, other in zip(results(unbroken, size), results(broken, size), strict=True):
        assert same(one["model"], other["model"])
        assert one["history"] == other["history"]
