"""Zeros that no training leaves, and zeros that are there without damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from resilient.diff.foreign_verify import PAGE_BYTES
from resilient.diff.verification import verify_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
ATTENTION, BIAS = "transformer.h.0.attn.c_attn.weight", "transformer.h.{}.attn.c_attn.bias"
WORDS = "transformer.wte.weight"
STATE = "the optimizer's state"


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "run" / GOLDEN.name))


def changed(path, change):
    """Change the weights, or the optimizer's state."""
    if path.name == WEIGHTS:
        weights = safetensors.torch.load_file(path)
        change(weights)
        safetensors.torch.save_file(weights, path, {"format": "pt"})
        return
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def zero_weights(*names):
    return lambda held: held.update({name: torch.zeros_like(held[name]) for name in names})


def zero_moments(*keys, slots=("exp_avg", "exp_avg_sq")):
    def change(held):
        for key in keys or held["state"]:
            for slot in slots:
                held["state"][key][slot].zero_()

    return change


def without_state(*keys):
    def change(held):
        for key in keys:
            del held["state"][key]
            for group in held["param_groups"]:
                group["params"] = [one for one in group["params"] if one != key]

    return change


def of_shape(shape):
    """Return the keys of the parameters of a shape."""
    state = torch.load(GOLDEN / OPTIMIZER, weights_only=False)["state"]
    return [key for key, one in state.items() if tuple(one["exp_avg"].shape) == shape]


def verdict(path):
    found = verify_folder(str(path))
    return found.verdict, [one.what for one in found.contents.problems]


@pytest.mark.parametrize(
    "name",
    [ATTENTION, BIAS.format(1), "transformer.h.1.ln_1.weight", WORDS, "transformer.ln_f.bias"],
)
def test_weight_of_zeros_with_moments_is_damaged(checkpoint, name):
    changed(checkpoint / WEIGHTS, zero_weights(name))
    found, texts = verdict(checkpoint)
    assert found.answer == "no"
    assert f"numbers of `{name}` are zero, but the moments are not" in texts[0]


def rate_of(path, rate, step):
    """Give all groups a rate, and all parameters a count of updates."""

    def change(held):
        for group in held["param_groups"]:
            group.update(lr=rate, initial_lr=rate)
        for one in held["state"].values():
            one["step"].fill_(step)

    changed(path / OPTIMIZER, change)


def test_weight_of_zeros_that_was_never_updated_is_healthy(checkpoint):
    """Its update had the first rate of a warmup, or its rate is 0."""
    changed(checkpoint / WEIGHTS, zero_weights(ATTENTION))
    rate_of(checkpoint, 0.5, step=1)
    assert not any("are zero, but the moments" in text for text in verdict(checkpoint)[1])
    rate_of(checkpoint, 0.0, step=8)
    assert not any("are zero, but the moments" in text for text in verdict(checkpoint)[1])


def test_weight_of_zeros_without_a_moment_is_healthy(checkpoint):
    """A frozen weight has no state, and a weight without a gradient has moments of zeros."""
    changed(checkpoint / WEIGHTS, zero_weights(ATTENTION))
    frozen = of_shape((32, 96))[:1]
    changed(checkpoint / OPTIMIZER, zero_moments(*frozen))
    assert verdict(checkpoint)[0].answer == "yes"
    changed(checkpoint / OPTIMIZER, without_state(*frozen))
    assert verdict(checkpoint)[0].answer == "yes"


def test_role_that_is_zero_in_all_layers_is_healthy(checkpoint):
    """A script that starts an adapter again sets the same weight of each layer to zero."""
    changed(checkpoint / WEIGHTS, zero_weights(BIAS.format(0), BIAS.format(1)))
    assert verdict(checkpoint)[0].answer == "yes"


@pytest.mark.parametrize("pages", [1, 2])
def test_page_of_zeros_at_the_start_of_a_row_is_damaged(checkpoint, pages):
    """Rows that begin at a page hide the hole from a search in the weights alone."""
    path = checkpoint / WEIGHTS
    weights = safetensors.torch.load_file(path)
    for blanks in range(PAGE_BYTES):
        data = safetensors.torch.save(weights, {"format": "pt", "blanks": " " * blanks})
        at = start_of(data, WORDS)
        if at % PAGE_BYTES == 0:
            break
    path.write_bytes(data[:at] + bytes(pages * PAGE_BYTES) + data[at + pages * PAGE_BYTES :])
    found, texts = verdict(checkpoint)
    assert found.answer == "no"
    assert f"{pages * 1024} numbers of `{WORDS}` from number 0 on are zero" in texts[0]
    # Words that never occurred have moments of zeros.
    unseen = pages * PAGE_BYTES // 128

    def change(held):
        for slot in ("exp_avg", "exp_avg_sq"):
            held["state"][0][slot][:unseen] = 0

    changed(checkpoint / OPTIMIZER, change)
    assert verdict(checkpoint)[0].answer == "yes"


def start_of(data, name):
    length = int.from_bytes(data[:8], "little")
    return 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]


def test_pruned_weights_are_healthy(checkpoint):
    torch.manual_seed(0)

    def change(held):
        mask = torch.rand(held[ATTENTION].shape) > 0.5
        held[ATTENTION] = held[ATTENTION] * mask

    changed(checkpoint / WEIGHTS, change)
    assert verdict(checkpoint)[0].answer == "yes"


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (zero_moments(), STATE),
        (zero_moments(slots=("exp_avg_sq",)), f"{STATE} of 28 parameters"),
        (zero_moments(3, slots=("exp_avg_sq",)), f"{STATE} of 1 parameter"),
        (zero_moments(3, slots=("exp_avg",)), f"{STATE} of 1 parameter"),
    ],
)
def test_moments_of_zeros_are_lost(checkpoint, change, lost):
    changed(checkpoint / OPTIMIZER, change)
    found, _ = verdict(checkpoint)
    assert (found.answer, found.lost) == ("partly", (lost,))


def test_first_moment_that_was_forgotten_is_healthy(checkpoint):
    """After thousands of updates without a gradient, the first moment alone is zero."""
    changed(checkpoint / OPTIMIZER, zero_moments(3, slots=("exp_avg",)))
    rate_of(checkpoint, 0.5, step=5000)
    assert not any("is zero in all" in text for text in verdict(checkpoint)[1])


def spread(checkpoint):
    """Return the same checkpoint as an older step."""
    older = Path(shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-4")))
    state = json.loads((older / "trainer_state.json").read_text()) | {"global_step": 4}
    (older / "trainer_state.json").write_text(json.dumps(state))
    changed(older / WEIGHTS, lambda held: [one.add_(1) for one in held.values()])

    def change(held):
        for one in held["state"].values():
            one["step"].fill_(4)

    changed(older / OPTIMIZER, change)
    return older


def test_moments_of_one_parameter_are_lost_if_an_older_step_has_them(checkpoint):
    older = spread(checkpoint)
    changed(checkpoint / OPTIMIZER, zero_moments(3))
    found, texts = verdict(checkpoint)
    assert f"{STATE} of 1 parameter" in found.lost
    shutil.rmtree(older)
    found, texts = verdict(checkpoint)
    assert (found.answer, len(texts)) == ("yes", 1)
    assert "all moments of `state.3` are zero after 8 updates, but most others are not" in texts[0]


@pytest.mark.parametrize(("step", "is_lost"), [(3, True), (5, False)])
def test_count_of_updates_below_that_of_an_older_step_is_lost(checkpoint, step, is_lost):
    spread(checkpoint)
    changed(checkpoint / OPTIMIZER, lambda held: held["state"][5]["step"].fill_(step))
    found, texts = verdict(checkpoint)
    assert ("the optimizer's count of updates" in found.lost) == is_lost
    assert any(f"`state.5.step` is {step}, but most others are 8" in text for text in texts)


def test_count_of_updates_that_a_newer_step_contradicts_is_lost(checkpoint):
    older = spread(checkpoint)
    changed(older / OPTIMIZER, lambda held: held["state"][5]["step"].fill_(1))
    found, texts = verdict(older)
    assert "the optimizer's count of updates" in found.lost
    assert any("it is 8 in checkpoint-8" in text for text in texts)
