"""A weight that most other files contradict is the damage, and neighbours show what is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from resilient.diff.other_steps import STALE
from resilient.diff.verification import verify_folder
from resilient.layout_repair.plan import plan_layout_repair
from resilient.layouts.resumability import is_costly

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"
WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "trainer_state.json"
BIAS = "transformer.ln_f.bias"


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "run" / GOLDEN.name))


@pytest.fixture
def older(checkpoint):
    """Return the step before, of which every trained file differs."""
    path = Path(shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-4")))
    changed(path, lambda weights: {name: one + 1 for name, one in weights.items()})
    optimizer = torch.load(path / "optimizer.pt", weights_only=False)
    for one in optimizer["state"].values():
        one["step"].sub_(4)
    torch.save(optimizer, path / "optimizer.pt")
    schedule = torch.load(path / "scheduler.pt", weights_only=False)
    torch.save(schedule | {"last_epoch": 4, "_step_count": 5}, path / "scheduler.pt")
    random = torch.load(path / "rng_state.pth", weights_only=False)
    torch.manual_seed(4)
    torch.save(random | {"cpu": torch.get_rng_state()}, path / "rng_state.pth")
    state = json.loads((path / STATE).read_text())
    state |= {"global_step": 4, "epoch": state["epoch"] / 2, "log_history": []}
    state |= {"best_global_step": None, "best_model_checkpoint": None, "best_metric": None}
    (path / STATE).write_text(json.dumps(state))
    return path


def changed(path, change):
    weights = safetensors.torch.load_file(path / WEIGHTS)
    safetensors.torch.save_file(change(weights), path / WEIGHTS, {"format": "pt"})


def told(path):
    found = verify_folder(str(path))
    return found.verdict.answer, {one.place: one for one in found.contents.problems}


def narrowed(name):
    return lambda held: held | {name: held[name][:, :-1].contiguous()}


@pytest.mark.parametrize(
    "name",
    ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"],
)
@pytest.mark.parametrize("is_beside", [False, True])
def test_weight_that_config_and_optimizer_contradict_is_damaged(checkpoint, older, name, is_beside):
    if not is_beside:
        shutil.rmtree(older)
    changed(checkpoint, narrowed(name))
    answer, problems = told(checkpoint)
    assert answer == "no"
    assert f"`{name}` has the shape" in problems[WEIGHTS].what
    assert "the weight is damaged" in problems[WEIGHTS].what
    assert not {"optimizer.pt", CONFIG} & set(problems)
    plan = plan_layout_repair(str(checkpoint))
    assert "optimizer.pt" in plan.draft.list().sizes
    assert plan.is_damaged


def test_optimizer_that_weights_and_config_contradict_is_damaged(checkpoint):
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=False)
    for slot in ("exp_avg", "exp_avg_sq"):
        optimizer["state"][0][slot] = optimizer["state"][0][slot][:, :-1].contiguous()
    torch.save(optimizer, checkpoint / "optimizer.pt")
    assert "optimizer.pt" in told(checkpoint)[1]


def test_weights_of_another_dtype_than_config_and_optimizer_lose_precision(checkpoint):
    changed(checkpoint, lambda held: {name: one.half() for name, one in held.items()})
    answer, problems = told(checkpoint)
    assert (answer, problems[WEIGHTS].loses) == ("partly", "the precision of the weights")


def test_one_weight_of_another_dtype_than_the_step_before_is_told(checkpoint, older):
    changed(
        checkpoint,
        lambda held: held | {"transformer.ln_f.bias": held["transformer.ln_f.bias"].bfloat16()},
    )
    answer, problems = told(checkpoint)
    assert (answer, problems[WEIGHTS].loses) == ("partly", "the precision of the weights")


@pytest.mark.parametrize(("scale", "answer"), [(1, "yes"), (1 + 2**-40, "partly")])
def test_wider_copy_of_weights_loses_only_digits_that_a_cast_rounds(checkpoint, scale, answer):
    changed(checkpoint, lambda held: {name: one.double() * scale for name, one in held.items()})
    found = verify_folder(str(checkpoint))
    assert found.verdict.answer == answer
    assert found.verdict.lost == (() if answer == "yes" else ("the precision of the weights",))
    assert "a resume casts them to F32" in found.contents.problems[0].what


def narrow_moments(checkpoint, **options):
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=False)
    for one in optimizer["state"].values():
        one |= {slot: one[slot].bfloat16() for slot in ("exp_avg", "exp_avg_sq")}
    for group in optimizer["param_groups"]:
        group.update(options)
        group.pop("amsgrad" if options else "", None)
    torch.save(optimizer, checkpoint / "optimizer.pt")


def test_moments_of_fewer_bits_than_the_weights_lose_precision(checkpoint):
    narrow_moments(checkpoint)
    answer, problems = told(checkpoint)
    assert (answer, problems["optimizer.pt"].loses) == (
        "partly",
        "the precision of the optimizer's moments",
    )


def test_optimizer_that_keeps_its_moments_in_fewer_bits_is_healthy(checkpoint):
    narrow_moments(checkpoint, momentum_dtype="bfloat16")
    assert told(checkpoint)[0] == "yes"


def test_weight_that_only_the_step_before_has_is_lost(checkpoint, older):
    frozen = {"transformer.frozen": torch.ones(5)}
    changed(older, lambda held: held | frozen)
    answer, problems = told(checkpoint)
    assert answer == "no"
    assert "`transformer.frozen` is missing" in problems[WEIGHTS].what


def test_weight_that_only_this_step_has_is_a_note(checkpoint, older):
    changed(checkpoint, lambda held: held | {"transformer.added": torch.ones(5)})
    answer, problems = told(checkpoint)
    assert (answer, problems[WEIGHTS].severity) == ("yes", "note")
    assert "`transformer.added` is in it, but not in" in problems[WEIGHTS].what
    # A run may add weights: the step before lacks nothing.
    assert told(older)[0] == "yes"


def test_dtype_of_config_alone_is_a_note(checkpoint):
    config = json.loads((checkpoint / CONFIG).read_text())
    (checkpoint / CONFIG).write_text(json.dumps(config | {"dtype": "float16"}))
    answer, problems = told(checkpoint)
    assert (answer, problems[CONFIG].loses) == ("yes", "")


@pytest.mark.parametrize("part", ["weight", "moment"])
def test_number_beyond_the_scale_of_its_tensor_stops(checkpoint, part):
    if part == "weight":
        changed(checkpoint, spiked)
    else:
        optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=False)
        optimizer["state"][0]["exp_avg"].view(-1)[3] = 2e34
        torch.save(optimizer, checkpoint / "optimizer.pt")
    answer, problems = told(checkpoint)
    problem = problems[WEIGHTS if part == "weight" else "optimizer.pt"]
    assert (answer, problem.is_fatal) == ("no", True)
    assert "times the median of its others" in problem.what


def spiked(held):
    one = held["transformer.wte.weight"].clone()
    one.view(-1)[7] = -2e34
    return held | {"transformer.wte.weight": one}


def test_mask_of_the_lowest_number_is_healthy(checkpoint):
    mask = torch.zeros(8)
    mask[3] = torch.finfo(torch.float32).min
    changed(checkpoint, lambda held: held | {"mask": mask})
    assert told(checkpoint)[0] == "yes"


def test_whole_step_beside_a_whole_one_is_healthy(checkpoint, older):
    assert [told(one)[0] for one in (checkpoint, older)] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("name", "loses"),
    [
        (WEIGHTS, "the weights of this step"),
        ("optimizer.pt", "the optimizer's state of this step"),
        ("rng_state.pth", "the random state"),
    ],
)
def test_file_of_the_older_step_is_told(checkpoint, older, name, loses):
    shutil.copy(older / name, checkpoint / name)
    answer, problems = told(checkpoint)
    assert (answer, problems[name].loses) == ("partly", loses)
    assert problems[name].what == f"{STALE}checkpoint-4 beside it, although each step changes it"
    assert is_costly(problems.values())
    assert name in plan_layout_repair(str(checkpoint)).draft.list().sizes
    assert name not in told(older)[1]


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json", "training_args.bin"])
def test_file_that_all_steps_share_is_healthy(checkpoint, older, name):
    for one in (checkpoint, older):
        if not (one / name).exists():
            torch.save({"seed": 1}, one / name)
    assert told(checkpoint)[0] == "yes"


def test_weights_that_no_rate_moved_are_healthy(checkpoint, older):
    shutil.copy(older / WEIGHTS, checkpoint / WEIGHTS)
    for one in (checkpoint, older):
        optimizer = torch.load(one / "optimizer.pt", weights_only=False)
        schedule = torch.load(one / "scheduler.pt", weights_only=False)
        for group in optimizer["param_groups"]:
            group["lr"] = 0.0
        torch.save(optimizer, one / "optimizer.pt")
        torch.save(schedule | {"_last_lr": [0.0] * len(schedule["_last_lr"])}, one / "scheduler.pt")
    assert told(checkpoint)[0] == "yes"


def test_random_state_without_dropout_is_healthy(checkpoint, older):
    shutil.copy(older / "rng_state.pth", checkpoint / "rng_state.pth")
    config = json.loads((checkpoint / CONFIG).read_text())
    drops = {key: 0.0 for key in config if "drop" in key}
    (checkpoint / CONFIG).write_text(json.dumps(config | drops))
    assert told(checkpoint)[0] == "yes"


def test_configuration_lost_beside_a_step_that_has_one_comes_back(checkpoint, older):
    (checkpoint / CONFIG).unlink()
    answer, problems = told(checkpoint)
    assert (answer, problems[CONFIG].loses) == ("partly", "the model's configuration")
    plan = plan_layout_repair(str(checkpoint))
    assert plan.is_whole
    assert plan.draft.read(CONFIG, 0, 1 << 20) == (older / CONFIG).read_bytes()


def test_model_without_a_configuration_is_healthy(checkpoint, older):
    for one in (checkpoint, older):
        (one / CONFIG).unlink()
        (one / "generation_config.json").unlink(missing_ok=True)
    assert told(checkpoint)[0] == "yes"


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("is_empty", [False, True])
def test_best_checkpoint_that_is_gone_is_told(checkpoint, is_old, is_empty):
    best = checkpoint.with_name("checkpoint-2")
    if is_empty:
        best.mkdir()
    state = json.loads((checkpoint / STATE).read_text())
    said = {"best_model_checkpoint": str(best), "best_global_step": None if is_old else 2}
    (checkpoint / STATE).write_text(json.dumps(state | said))
    assert "best checkpoint" in told(checkpoint)[1][STATE].loses
