"""Fields of an impossible type or value: every tool loads them, and no step can use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from resilient.diff.verification import verify_folder
from resilient.layouts.field_types import number_fault, schedule_fault, state_fault
from resilient.train.state import TrainerState
from tests.helpers.foreign_folders import alter, verdict, write_accelerate

CORRECTED = ("_history", "stateful_callbacks", "epoch", "train_batch_size")
"""Fields that the importer corrects, or that the judge of the layout checks by itself."""
HERE = Path(__file__).parents[2] / "golden" / "transformers"


@pytest.fixture
def single(tmp_path):
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    return Path(shutil.copytree(source, tmp_path / source.name))


def steps(value):
    def of(held):
        for one in held["state"].values():
            one["step"] = value

    return of


def option(name, value):
    def of(held):
        held["param_groups"][1][name] = value

    return of


def with_largest(held):
    for one in held["state"].values():
        one["max_exp_avg_sq"] = one["exp_avg_sq"].clone()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.tensor(-1.0), "-1"),
        (-1, "-1"),
        (torch.tensor(7.5), "7.5"),
        (float("nan"), "nan"),
        ("8", "'8'"),
        (torch.full((2,), 8.0), "a tensor of the shape [2]"),
    ],
)
def test_a_step_that_counts_no_updates_is_no_resume(single, tmp_path, value, shown):
    other = tmp_path / "state"
    write_accelerate(other)
    for folder, name in ((single, "optimizer.pt"), (other, "optimizer.bin")):
        alter(folder / name, steps(value))
        found = verdict(folder)
        assert found.answer == "no"
        assert f"is {shown}, which is no count of updates" in " ".join(found.why)


def test_a_negative_step_of_one_parameter_is_found_in_the_bytes(single):
    alter(single / "optimizer.pt", lambda held: held["state"][3]["step"].fill_(-1))
    found = verify_folder(str(single)).verdict
    assert found.answer == "no"
    assert "the `step` of `state.3` is -1" in " ".join(found.why)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("weight_decay", "0.1", "`weight_decay` of its group 1 is '0.1'"),
        ("eps", None, "`eps` of its group 1 is None"),
        ("betas", (0.9, "x"), "`betas` of its group 1 is (0.9, 'x')"),
        ("betas", 0.9, "`betas` of its group 1 is 0.9"),
        ("maximize", "no", "`maximize` of its group 1 is 'no'"),
        ("amsgrad", True, "`amsgrad` of its group 1 is set, but the state of"),
        ("foreach", None, ""),
        ("lr", torch.tensor(0.1), ""),
    ],
)
def test_an_option_of_another_type_is_no_resume(single, name, value, why):
    alter(single / "optimizer.pt", option(name, value))
    found = " ".join(verdict(single).why)
    assert why in found
    assert bool(why) == ("group 1 is" in found)


def test_options_that_exclude_each_other_are_no_resume(single):
    def set_both(held):
        held["param_groups"][1].update(fused=True, differentiable=True)

    alter(single / "optimizer.pt", set_both)
    found = verdict(single)
    assert found.answer == "no"
    assert "`fused` and `differentiable` of its group 1 are both set" in " ".join(found.why)


def test_a_state_that_no_option_uses_is_named_and_resumes(single):
    alter(single / "optimizer.pt", with_largest)
    found = verify_folder(str(single))
    assert found.verdict.answer == "yes"
    assert any("has `max_exp_avg_sq`, but `amsgrad`" in one.what for one in found.contents.problems)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"last_epoch": None}, "its `last_epoch` is None"),
        ({"last_epoch": 4.5}, "its `last_epoch` is 4.5"),
        ({"_step_count": "5"}, "its `_step_count` is '5'"),
        ({"base_lrs": ["a"]}, "its `base_lrs` is ['a'], and not a list of numbers"),
        ({"_last_lr": 0.1}, "its `_last_lr` is 0.1, and not a list of numbers"),
        ({"lr_lambdas": 1}, "its `lr_lambdas` is 1, and not a list of states"),
        ({"gamma": "x"}, "its `gamma` is 'x', and no number"),
        ({"_schedulers": [{"last_epoch": None}]}, "its `last_epoch` is None"),
    ],
)
def test_a_field_of_a_schedule_of_another_type_is_no_resume(single, fields, why):
    held = torch.load(single / "scheduler.pt", weights_only=False)
    assert schedule_fault(held) == ""
    torch.save(held | fields, single / "scheduler.pt")
    found = verdict(single)
    assert found.answer == "no"
    assert why in " ".join(found.why)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"global_step": 8.0}, "no"),
        ({"log_history": None}, "no"),
        ({"log_history": "x"}, "no"),
        ({"log_history": ["x"]}, "no"),
        ({"num_input_tokens_seen": "x"}, "no"),
        ({"max_steps": None}, "no"),
        ({"best_metric": "x"}, "no"),
        ({"stateful_callbacks": {"TrainerControl": {"args": "x"}}}, "no"),
        ({"stateful_callbacks": {"TrainerControl": "x"}}, "no"),
        ({"train_batch_size": -1}, "partly"),
        ({"train_batch_size": 2.5}, "partly"),
        ({"epoch": float("nan")}, "yes"),
        ({"epoch": "x"}, "yes"),
    ],
)
def test_the_state_of_a_trainer_gets_one_answer(single, fields, answer):
    path = single / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert verdict(single).answer == answer


@pytest.mark.parametrize("name", list(vars(TrainerState())))
@pytest.mark.parametrize("value", [None, "x", [], {}, True, 1, 1.5])
def test_our_trainer_takes_each_state_that_the_judge_takes(name, value):
    state = TrainerState().state_dict() | {"log_history": [], name.lstrip("_"): value}
    if not state_fault(state) and name not in CORRECTED:
        TrainerState().load_state_dict(state)


@pytest.mark.parametrize("value", [0, 5, 5.0, 1e9])
def test_a_count_is_a_count(value):
    assert number_fault(value) == ""


def exchanged(held):
    held["state"][0], held["state"][1] = held["state"][1], held["state"][0]


@pytest.mark.parametrize("count", [1, 2])
def test_exchanged_moments_are_found_by_two_other_steps(single, count):
    for nth in range(count):
        shutil.copytree(single, single.with_name(f"checkpoint-{9 + nth}"))
    alter(single / "optimizer.pt", exchanged)
    assert ("exchanged" in " ".join(verdict(single).why)) == (count > 1)
    # The step beside it is whole, and is not blamed for the difference.
    assert "exchanged" not in " ".join(verdict(single.with_name("checkpoint-9")).why)
