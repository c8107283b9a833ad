"""NaN and infinite numbers that belong into a weight, and those that are damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.diff.verification import verify_folder

SOURCE = Path(__file__).parents[2] / "golden/transformers/gpt2_all/run/checkpoint-8"
NAN, INFINITE = float("nan"), float("inf")
LOSS = "finite numbers in the weights"
WEIGHTS = "model.safetensors"
TRAINED = "transformer.h.0.attn.c_attn.weight"


def changed(path, **tensors):
    """Write tensors into a file of weights; those of another step have other trained weights."""
    file = path / WEIGHTS
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


@pytest.fixture
def run(tmp_path):
    """Return step 8, and a copy that is named as step 12, with other weights."""
    path = Path(shutil.copytree(SOURCE, tmp_path / "checkpoint-8"))
    later = Path(shutil.copytree(SOURCE, tmp_path / "checkpoint-12"))
    optimizer = torch.load(later / "optimizer.pt", weights_only=False)
    for state in optimizer["state"].values():
        state["exp_avg"].mul_(2)
    torch.save(optimizer, later / "optimizer.pt")
    random = torch.load(later / "rng_state.pth", weights_only=False)
    random["cpu"][64:72] = 1
    torch.save(random, later / "rng_state.pth")
    changed(later, **{name: value * 2 for name, value in load_file(later / WEIGHTS).items()})
    return path, later


def told(path, buffers=()):
    verdict = verify_folder(str(path), buffers=buffers).verdict
    return verdict.answer, [one for one in verdict.why if "finite" in one or "NaN" in one]


MASK = torch.triu(torch.full((6, 6), -INFINITE), 1)
SPOTTED = torch.tensor([0.5, INFINITE, 0.25, 2.0, 1.0])
"""Of a shape that no weight has."""


@pytest.mark.parametrize("value", [MASK, SPOTTED, SPOTTED.nan_to_num(NAN, NAN)])
def test_infinite_mask_and_untrained_weight_lose_nothing(run, value):
    changed(run[0], extra=value)
    is_nan = bool(value.isnan().any())
    assert told(run[0])[0] == ("no" if is_nan else "yes")
    # Each tool resumes a buffer unchanged.
    answer, why = told(run[0], {"extra"})
    assert (answer, why) == (("partly", [LOSS]) if is_nan else ("yes", []))
    changed(run[1], extra=value)
    assert told(run[0]) == ("yes", [])
    changed(run[1], extra=value.flip(0))
    assert told(run[0])[0] == ("no" if is_nan else "yes")


@pytest.mark.parametrize(("number", "answer"), [(NAN, "no"), (INFINITE, "partly")])
def test_trained_weight_with_such_a_number_is_never_excused(run, number, answer):
    value = load_file(run[0] / WEIGHTS)[TRAINED]
    value[0, 0] = number
    changed(run[0], **{TRAINED: value})
    assert told(run[0])[0] == answer


def test_nan_in_a_trained_weight_of_all_steps_is_refused(run):
    for path in run:
        value = load_file(path / WEIGHTS)[TRAINED]
        value[0, 0] = NAN
        changed(path, **{TRAINED: value})
    assert told(run[0])[0] == "no"


def test_nan_without_moments_of_any_weight_is_refused(run):
    for path in run:
        changed(path, extra=SPOTTED.nan_to_num(NAN, NAN))
        optimizer = torch.load(path / "optimizer.pt", weights_only=False)
        for state in optimizer["state"].values():
            state.clear()
        torch.save(optimizer, path / "optimizer.pt")
    assert told(run[0])[0] == "no"
