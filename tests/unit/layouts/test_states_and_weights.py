"""Optimizers, schedules and weights that are each whole, and do not fit each other.

What Transformers does with each is in docs/damage-matrix.md, where its loader is run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers.foreign_folders import alter, look, verdict, write_accelerate

HERE = Path(__file__).parents[2] / "golden" / "transformers"
OTHER_SHAPE = 1  # parameter 0 is 97 x 32, this one 16 x 32


@pytest.fixture
def single(tmp_path):
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    return Path(shutil.copytree(source, tmp_path / source.name))


def transposed(held):
    for slot in ("exp_avg", "exp_avg_sq"):
        # There are weights of that shape, but not as many.
        held["state"][4][slot] = held["state"][4][slot].t().contiguous()


def exchanged(held):
    one, other = held["state"][0], held["state"][OTHER_SHAPE]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def one_group_more(held):
    held["param_groups"].append({**held["param_groups"][0], "params": []})


def one_group_less(held):
    for one in held["param_groups"].pop()["params"]:
        del held["state"][one]


def half_of_all(held):
    for one in list(held["state"])[::2]:
        del held["state"][one]


def without(name, group=0):
    return lambda held: held["param_groups"][group].pop(name)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (transposed, "2 weights have it, and 3 moments: the optimizer belongs to another model"),
        (exchanged, "`exp_avg_sq` of [97, 32]: the first step fails"),
        (one_group_more, "it has 3 groups, but the schedule has rates of 2"),
        (one_group_less, "it has 1 groups, but the schedule has rates of 2"),
        (without("lr"), "its group 0 has no `lr`"),
        (without("eps"), "its group 0 has no `eps`"),
        (without("weight_decay", 1), "its group 1 has no `weight_decay`"),
    ],
)
def test_an_optimizer_that_stops_at_its_first_step_is_no_resume(single, of, why):
    alter(single / "optimizer.pt", of)
    found = verdict(single)
    assert found.answer == "no"
    assert why in " ".join(found.why)


@pytest.mark.parametrize("name", ["betas", "lr"])
def test_all_groups_without_what_adam_needs_stop_it(single, name):
    def of(held):
        for one in held["param_groups"]:
            del one[name]

    alter(single / "optimizer.pt", of)
    assert f"has no `{name}`" in " ".join(verdict(single).why)


def test_groups_of_two_kinds_of_optimizer_lack_nothing(single):
    def of(held):
        first, second = held["param_groups"]
        for name in ("betas", "eps"):
            del first[name]
        first["momentum"] = 0.9
        for one in (first, second):
            for name in ("amsgrad", "maximize", "capturable", "differentiable"):
                del one[name]

    alter(single / "optimizer.pt", of)
    assert verdict(single).answer == "yes"


def test_states_of_half_of_the_parameters_are_a_loss(single):
    alter(single / "optimizer.pt", half_of_all)
    found = verdict(single)
    assert (found.answer, found.why) == ("partly", ("the optimizer's state of 14 parameters",))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_schedule_of_another_number_of_groups_stops(single, more):
    def of(held):
        held["base_lrs"] = [*held["base_lrs"], 0.5] if more > 0 else held["base_lrs"][:more]

    alter(single / "scheduler.pt", of)
    found = verdict(single)
    assert found.answer == "no"
    assert f"rates of {2 + more} groups, but the optimizer has 2" in found.why[0]


def test_rates_that_only_logs_read_are_a_note(single):
    alter(single / "scheduler.pt", lambda held: held["_last_lr"].pop())
    assert verdict(single).answer == "yes"
    (problem,) = look(single).problems
    assert (problem.severity, problem.place) == ("note", "scheduler.pt")


def test_a_schedule_without_what_it_begins_from_takes_it_of_the_arguments(single):
    alter(single / "scheduler.pt", lambda held: held.pop("base_lrs"))
    found = verdict(single)
    assert (found.answer, found.why) == ("partly", ("the initial rates of the schedule",))


@pytest.mark.parametrize("name", ["trainer_state.json", "config.json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_document_that_is_no_plain_utf8_stops_its_reader(single, name, encoding):
    text = (single / name).read_text()
    (single / name).write_text(text, encoding=encoding)
    found = verdict(single)
    assert found.answer == "no"
    assert found.why[0].startswith(f"{name}: it is not complete JSON")


@pytest.mark.parametrize(
    ("names", "lost", "named"),
    [
        (["transformer.h.1.mlp.c_fc.weight"], 1, "`transformer.h.1.mlp.c_fc.weight`"),
        (["transformer.wte.weight"], 1, "one of the shape [97, 32]"),
        (
            ["transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"],
            2,
            "one of the shape [32, 128]",
        ),
    ],
)
def test_weights_that_the_optimizer_has_and_the_file_has_not_are_lost(single, names, lost, named):
    path = single / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    for one in names:
        del weights[one]
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    found = verdict(single)
    assert found.answer == "no"
    assert f"of 28 weights, but {lost} of them are not here, including {named}" in found.why[0]


def test_frozen_weights_are_not_missed(single):
    def of(held):
        one = held["param_groups"][0]["params"].pop()
        del held["state"][one]

    alter(single / "optimizer.pt", of)
    assert verdict(single).answer == "yes"


def test_a_schedule_of_accelerate_must_be_of_its_optimizer_too(tmp_path):
    write_accelerate(tmp_path)

    def of(held):
        held["base_lrs"], held["_last_lr"] = held["base_lrs"] * 2, held["_last_lr"] * 2

    alter(tmp_path / "scheduler.bin", of)
    found = verdict(tmp_path)
    assert found.answer == "no"
    assert "optimizer.bin: it has 1 groups, but the schedule has rates of 2" in found.why[0]


def test_a_weight_that_is_lost_stops_all_but_the_trainer(tmp_path):
    write_accelerate(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({"bias": weights["bias"]}, path, {"format": "pt"})
    found = verdict(tmp_path)
    assert found.answer == "no"
    assert found.why[0].startswith("model.safetensors: the optimizer has the state of 2 weights")


def test_a_state_under_a_name_must_be_of_the_shape_of_that_weight(tmp_path):
    weights = {"a.weight": torch.ones(3, 2), "b.weight": torch.ones(2, 3)}
    states = {
        name: {"exp_avg": torch.ones(other.shape), "exp_avg_sq": torch.ones(other.shape)}
        for name, other in zip(weights, reversed(weights.values()), strict=True)
    }
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "last.pt")
    whys = " ".join(verdict(tmp_path / "last.pt").why)
    assert "has the shape [2, 3], but its weight has [3, 2]" in whys
