"""Optimizer state follows the parameter's name."""

from __future__ import annotations

import copy

import pytest
import torch

from resilient.errors import ConfigError
from resilient.state_dict.optimizer import NamedOptimizer


def trained(names, groups=1):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    parameters = list(model.parameters())
    split = [{"params": parameters[index::groups]} for index in range(groups)]
    optimizer = torch.optim.AdamW(split, lr=0.1)
    for step in range(3):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, float(number + step))
        optimizer.step()
    return model, optimizer


def moments(model, optimizer):
    return {name: optimizer.state[one]["exp_avg"] for name, one in model.named_parameters()}


def test_state_comes_back_by_name_when_layers_are_reordered():
    model, optimizer = trained(["a", "b", "c"])
    saved = NamedOptimizer(model, optimizer).state_dict()
    other = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("c", "a", "b")})
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    NamedOptimizer(other, fresh).load_state_dict(saved)
    expected, found = moments(model, optimizer), moments(other, fresh)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_groups_are_matched_by_what_they_hold():
    model, optimizer = trained(["a", "b"], groups=2)
    optimizer.param_groups[1]["lr"] = 0.7
    saved = NamedOptimizer(model, optimizer).state_dict()
    fresh = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups], lr=1.0)
    NamedOptimizer(model, fresh).load_state_dict(saved)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.7]


def test_other_parameters_or_groups_are_refused():
    model, optimizer = trained(["a", "b"])
    saved = NamedOptimizer(model, optimizer).state_dict()
    other, fresh = trained(["a", "x"])
    with pytest.raises(ValueError, match=r"parameters differ: b\.bias"):
        NamedOptimizer(other, fresh).load_state_dict(saved)
    model, optimizer = trained(["a", "b"], groups=2)
    optimizer.param_groups[1]["weight_decay"] = 0.7
    saved = NamedOptimizer(model, optimizer).state_dict()
    regrouped = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="grouped differently"):
        NamedOptimizer(model, regrouped).load_state_dict(saved)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_groups_that_are_told_the_same_may_be_cut_otherwise(before, after):
    model, optimizer = trained(["a", "b"], groups=before)
    saved = NamedOptimizer(model, optimizer).state_dict()
    own = list(model.parameters())
    fresh = torch.optim.AdamW([{"params": own[nth::after]} for nth in range(after)], lr=1.0)
    NamedOptimizer(model, fresh).load_state_dict(saved)
    expected, found = moments(model, optimizer), moments(model, fresh)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [group["lr"] for group in fresh.param_groups] == [0.1] * after


def test_an_optimizer_of_another_model_is_a_configuration_error():
    model, _ = trained(["a"])
    _, optimizer = trained(["a"])
    with pytest.raises(ConfigError, match="do not belong to the model"):
        NamedOptimizer(model, optimizer)


def unfreezing():
    """Return a model, an optimizer of its first layer alone, and the view of it by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    return model, optimizer, NamedOptimizer(model, optimizer)


def step_of(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def test_groups_that_come_later_are_named_and_found():
    model, optimizer, named = unfreezing()
    step_of(model, optimizer)
    assert set(named.state_dict()["state"]) == {"0.weight", "0.bias"}
    optimizer.add_param_group({"params": [model[1].weight, model[1].bias], "lr": 0.01})
    assert named.like("state/1.weight/exp_avg") is model[1].weight
    step_of(model, optimizer)
    saved = named.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
    assert torch.equal(
        saved["state"]["1.bias"]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"]
    )
    other, fresh, later = unfreezing()
    fresh.add_param_group({"params": list(other[1].parameters())})
    other.load_state_dict(model.state_dict())
    later.load_state_dict(copy.deepcopy(saved))
    for one in ((model, optimizer), (other, fresh)):
        step_of(*one)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_parameter_that_took_the_place_of_another_is_found_by_name():
    model, optimizer, named = unfreezing()
    named.state_dict()
    model[0] = torch.nn.Linear(3, 3)
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    assert named.state_dict()["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    assert named.like("state/0.weight/exp_avg") is model[0].weight


def test_a_later_group_of_another_model_is_a_configuration_error():
    _, optimizer, named = unfreezing()
    optimizer.add_param_group({"params": list(torch.nn.Linear(3, 3).parameters())})
    with pytest.raises(
        ConfigError, match="2 of the optimizer's 4 parameters do not belong to the model"
    ):
        named.state_dict()


def test_it_says_which_parameter_a_state_will_lie_like_before_there_is_any():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3)})
    named = NamedOptimizer(model, torch.optim.AdamW(model.parameters()))
    assert named.like("state/a.weight/exp_avg") is model["a"].weight
    assert named.like("state/a.weight/step") is None
    assert named.like("state/b.weight/exp_avg") is None
    assert named.like("param_groups/0/a.weight") is None


KINDS = [
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]
GOES_ON_FROM = {kind: {"Adam", "AdamW", "NAdam", "RAdam"} for kind in ("Adam", "AdamW", "RAdam")}


def two_steps(kind, saved=None):
    """Make a step, take a state that was saved if there is one, and make another step."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    named = NamedOptimizer(model, optimizer)
    if saved is not None:
        named.check_saved(saved)
        named.load_state_dict(saved)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return named.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_its_own_state_and_refuses_those_that_it_cannot_go_on_from(kind):
    for other in KINDS:
        saved = two_steps(other)
        if other == kind or other in GOES_ON_FROM.get(kind, ()):
            two_steps(kind, saved)
            continue
        with pytest.raises(
            ValueError, match=f"it was saved by an optimizer .*, but {kind} (has|needs) "
        ):
            two_steps(kind, saved)


def test_options_that_torch_or_schedules_added_since_are_no_other_kind():
    saved = two_steps("AdamW")
    for name in ("decoupled_weight_decay", "foreach", "fused", "amsgrad"):
        del saved["param_groups"][0][name]
    saved["param_groups"][0] |= {"initial_lr": 0.1, "max_lr": 1.0, "bias_correction": True}
    saved["param_groups"][0]["told_by_a_package"] = 1
    two_steps("AdamW", saved)
