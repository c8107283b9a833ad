"""Optimizer state follows the parameter's name."""

from __future__ import annotations

import pytest
import torch

from resilient.errors import ConfigError
from resilient.state.optimizer import NamedOptimizer


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
    with pytest.raises(ValueError, match="grouped otherwise"):
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
    with pytest.raises(ConfigError, match="not the model's"):
        NamedOptimizer(model, optimizer)


def test_it_says_which_parameter_a_state_will_lie_like_before_there_is_any():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3)})
    named = NamedOptimizer(model, torch.optim.AdamW(model.parameters()))
    assert named.like("state/a.weight/exp_avg") is model["a"].weight
    assert named.like("state/a.weight/step") is None
    assert named.like("state/b.weight/exp_avg") is None
    assert named.like("param_groups/0/a.weight") is None
