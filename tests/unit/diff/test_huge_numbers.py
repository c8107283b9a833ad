"""Huge numbers in weights and moments: damage, or values that were saved on purpose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.diff.verification import verify_folder

SOURCE = Path(__file__).parents[2] / "golden/transformers/gpt2_all/run/checkpoint-8"
WEIGHTS = "model.safetensors"
MATRIX, BIAS = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias"
EMBEDDING = "transformer.wte.weight"
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def path(tmp_path):
    return Path(shutil.copytree(SOURCE, tmp_path / "checkpoint-8"))


def change(path, **tensors):
    """Write tensors into a file of weights."""
    file = path / WEIGHTS
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def beside(path, step):
    """Return another step with other moments and other trained weights."""
    other = Path(shutil.copytree(SOURCE, path.with_name(f"checkpoint-{step}")))
    change(other, **{name: value * 2 for name, value in load_file(other / WEIGHTS).items()})
    change_moments(other, lambda moments: moments["exp_avg"].mul_(2))
    state = json.loads((other / "trainer_state.json").read_text())
    (other / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}))
    random = torch.load(other / "rng_state.pth", weights_only=False)
    random["cpu"][64:72] = 1
    torch.save(random, other / "rng_state.pth")
    return other


def change_moments(path, apply):
    optimizer = torch.load(path / "optimizer.pt", weights_only=False)
    for state in optimizer["state"].values():
        apply(state)
    torch.save(optimizer, path / "optimizer.pt")


def weight(path, name, apply):
    """Change one weight in place."""
    value = load_file(path / WEIGHTS)[name].clone()
    apply(value)
    change(path, **{name: value})


def told(path, buffers=()):
    verdict = verify_folder(str(path), buffers=buffers).verdict
    return verdict.answer, " ".join(verdict.why)


def put(number, count):
    def apply(value):
        value.view(-1)[:count] = number

    return apply


@pytest.mark.parametrize("count", [1, 2, 8, 100])
@pytest.mark.parametrize("number", [1e20, -1e36])
def test_huge_numbers_in_a_weight_are_refused(path, count, number):
    weight(path, MATRIX, put(number, count))
    answer, why = told(path)
    assert answer == "no"
    assert f"`{MATRIX}` has" in why


@pytest.mark.parametrize("name", [BIAS, MATRIX])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_weight_of_huge_numbers_only_is_refused(path, name, has_optimizer):
    weight(path, name, lambda value: value.fill_(1e30))
    if not has_optimizer:
        (path / "optimizer.pt").unlink()
        (path / "scheduler.pt").unlink()
    answer, why = told(path)
    assert answer == "no"
    assert f"`{name}` has" in why


def test_all_weights_of_huge_numbers_are_refused(path):
    change(path, **{name: value * 1e30 for name, value in load_file(path / WEIGHTS).items()})
    assert told(path)[0] == "no"


def test_weight_of_one_huge_number_is_refused(path):
    optimizer = torch.load(path / "optimizer.pt", weights_only=False)
    number = max(optimizer["state"]) + 1
    optimizer["param_groups"][-1]["params"].append(number)
    optimizer["state"][number] = {
        "step": torch.tensor(8.0),
        "exp_avg": torch.ones(1),
        "exp_avg_sq": torch.ones(1),
    }
    torch.save(optimizer, path / "optimizer.pt")
    change(path, **{"transformer.scale.weight": torch.tensor([0.5])})
    assert told(path)[0] == "yes"
    change(path, **{"transformer.scale.weight": torch.tensor([1e30])})
    assert told(path)[0] == "no"


def test_huge_numbers_that_another_step_has_are_healthy(path):
    weight(path, EMBEDDING, lambda value: value[0].fill_(-1e20))
    assert told(path)[0] == "no"
    other = beside(path, 12)
    assert told(path)[0] == "no"
    weight(other, EMBEDDING, lambda value: value[0].fill_(-1e20))
    assert told(path) == ("yes", "")


@pytest.mark.parametrize(
    "value",
    [
        torch.full((5,), 1e30),
        torch.tensor([1.0, -1e30, 1.0, -1e30, -1e30]),
        torch.tensor([0.0, LOWEST, LOWEST, 0.0, 0.0]),
        torch.full((5,), torch.finfo(torch.bfloat16).min, dtype=torch.float32),
        torch.tensor([0.0, torch.finfo(torch.bfloat16).min, 0.5, 0.25, 1.0]),
        torch.full((5,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
        torch.tensor(1e30),
        torch.full((5,), float("-inf")).index_fill(0, torch.tensor([0, 1]), 0.0),
        torch.tensor([65504.0, -65504.0, 1.0, 2.0, 3.0], dtype=torch.float16),
    ],
)
def test_constants_in_a_buffer_are_healthy(path, value):
    change(path, extra=value)
    assert told(path) == ("yes", "")
    assert told(path, {"extra"}) == ("yes", "")


def test_constant_of_a_buffer_that_another_step_has_is_healthy(path):
    value = torch.tensor([0.0, 0.0, 1e20, 0.5, 0.25])
    change(path, extra=value)
    change(beside(path, 12), extra=value)
    assert told(path) == ("yes", "")


def test_huge_numbers_of_a_buffer_that_the_older_step_lacks_are_refused(path):
    change(path, extra=torch.tensor([1e36, 1e36, 1.0, 0.5, 0.25]))
    change(beside(path, 4), extra=torch.ones(5))
    assert told(path)[0] == "no"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outliers_a_few_hundred_times_the_median_are_healthy(path, dtype):
    held = {name: value.to(dtype) for name, value in load_file(path / WEIGHTS).items()}
    held[MATRIX][:, 3] = held[MATRIX].float().abs().median() * 500
    held[EMBEDDING][0] = 6e4
    change(path, **held)
    # Weights of another dtype than the moments lose precision, but not their scale.
    assert told(path)[0] == ("yes" if dtype == torch.float32 else "partly")


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize(
    ("slot", "number"), [("exp_avg", 1e20), ("exp_avg_sq", 1e36), ("exp_avg_sq", 1e24)]
)
def test_huge_numbers_in_a_moment_are_refused(path, slot, number, count):
    change_moments(path, lambda moments: put(number, count)(moments[slot]))
    answer, why = told(path)
    assert answer == "no"
    assert f".{slot}` has" in why


@pytest.mark.parametrize(
    ("slot", "number"), [("max_exp_avg_sq", 1e36), ("exp_avg_slow", 1e36), ("z", 1e20)]
)
def test_huge_numbers_in_another_state_are_refused(path, slot, number):
    def add(moments, scale=1.0):
        moments[slot] = moments["exp_avg_sq"] * scale
        put(number if scale == 1.0 else 1.0, 2)(moments[slot])

    change_moments(path, lambda moments: add(moments, 2.0))
    assert told(path)[0] == "yes"
    change_moments(path, add)
    assert told(path)[0] == "no"


def test_second_moments_of_data_without_normalization_are_healthy(path):
    def grow(moments):
        moments["exp_avg_sq"].view(-1)[:3] = 1e19
        moments["exp_avg_sq"].view(-1)[3:] += 1e3

    change_moments(path, grow)
    assert told(path) == ("yes", "")
