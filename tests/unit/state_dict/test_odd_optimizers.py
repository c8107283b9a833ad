"""Optimizers with unusual groups and state: each save can be resumed into fresh objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Checkpointer
from resilient.errors import IncompatibleCheckpoint
from resilient.state_dict.optimizer import NamedOptimizer, is_same
from tests.helpers.round_trip import require_same_state


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step_of(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).square().sum()
    loss.backward()
    optimizer.step(lambda: loss)


def by_position(build, groups):
    def make(model):
        own = list(model.parameters())
        return build([{**one, "params": [own[at] for at in one["params"]]} for one in groups])

    return make


def grouped(*groups, build=torch.optim.AdamW):
    return by_position(build, [{"params": params, **options} for params, options in groups])


def with_own_state(key, value):
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.state[key] = value
        return optimizer

    return make


def of_all(build, **options):
    return lambda model: build(model.parameters(), **options)


CASES = {
    "empty group last": grouped(([0, 1, 2, 3], {}), ([], {"weight_decay": 0.5})),
    "empty group first": grouped(([], {"weight_decay": 0.5}), ([0, 1, 2, 3], {})),
    "empty groups with options": grouped(([], {"lr": 1.0}), ([0, 1], {}), ([], {"lr": 2.0})),
    "all groups empty": grouped(([], {"lr": 1.0}), ([], {"lr": 2.0})),
    "parameters without gradients": of_all(torch.optim.AdamW),
    "some parameters": grouped(([2], {})),
    "parameter twice": grouped(([0, 0, 1], {})),
    "own state, text key": with_own_state("note", {"count": 3}),
    "own state, tuple key": with_own_state(("note", 1), torch.ones(2)),
    "own state, number": with_own_state("count", 3),
    "tuple option key": grouped(([0, 1], {("a", 1): 2}), ([2], {("a", 1): 3})),
    "number option key": grouped(([0, 1], {7: 2}), ([2], {7: 3})),
    "dollar option key": grouped(([0, 1], {"$a": 2}), ([], {"$a": 3})),
    "tensor option": grouped(([0], {"lr": torch.tensor(0.1)}), ([], {"lr": torch.tensor(0.2)})),
    "none and nested options": grouped(([0], {"a": None, "b": {"c": [1, (2, float("inf"))]}})),
    "param names": lambda model: torch.optim.AdamW(model.named_parameters()),
    "LBFGS": of_all(torch.optim.LBFGS, line_search_fn="strong_wolfe"),
    "Adafactor": of_all(torch.optim.Adafactor),
    "NAdam": of_all(torch.optim.NAdam),
    "RAdam": of_all(torch.optim.RAdam),
    "ASGD": of_all(torch.optim.ASGD),
    "Rprop": of_all(torch.optim.Rprop),
    "Adagrad": of_all(torch.optim.Adagrad),
    "SGD": of_all(torch.optim.SGD, lr=0.1, momentum=0.9),
    "capturable": of_all(torch.optim.AdamW, amsgrad=True, lr=torch.tensor(0.1)),
}


@pytest.mark.filterwarnings("ignore:.*duplicate parameters.*")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_odd_optimizer_saved_resumes(tmp_path, make, steps):
    model = network()
    optimizer = make(model)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as saving:
        saving.resume()
        for _ in range(steps):
            step_of(model, optimizer)
        saving.save(1)
    other = network()
    fresh = make(other)
    with Checkpointer(tmp_path, model=other, optimizer=fresh) as resuming:
        assert resuming.resume() == 1
    require_same_state(optimizer.state_dict(), fresh.state_dict())
    step_of(model, optimizer)
    step_of(other, fresh)
    require_same_state(dict(model.state_dict()), dict(other.state_dict()))


def test_group_empty_here_alone_keeps_own_options():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = NamedOptimizer(model, optimizer).state_dict()
    fresh = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "lr": 3.0}])
    NamedOptimizer(model, fresh).load_state_dict(saved)
    assert fresh.param_groups[1]["lr"] == 3.0


def test_group_added_in_training_resumes(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as saving:
        saving.resume()
        saving.save(1)
        optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.5})
        optimizer.add_param_group({"params": [], "lr": 0.7})
        step_of(model, optimizer)
        saving.save(2)
    other = network()
    fresh = torch.optim.AdamW([{"params": [*one.parameters()]} for one in other])
    fresh.add_param_group({"params": []})
    with Checkpointer(tmp_path, model=other, optimizer=fresh) as resuming:
        assert resuming.resume() == 2
    assert [one["lr"] for one in fresh.param_groups] == [0.1, 0.5, 0.7]


def test_groups_that_do_not_match_are_refused_before_load(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW([{"params": [*one.parameters()], "lr": 0.1} for one in model])
    optimizer.param_groups[1]["weight_decay"] = 0.7
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as saving:
        saving.resume()
        step_of(model, optimizer)
        saving.save(1)
    other = network()
    before = {name: one.clone() for name, one in other.state_dict().items()}
    regrouped = torch.optim.AdamW(other.parameters())
    # A small model is copied at load, so what is refused before the load stays as it was.
    with (
        Checkpointer(tmp_path, model=other, optimizer=regrouped) as resuming,
        pytest.raises(IncompatibleCheckpoint, match="grouped differently"),
    ):
        resuming.resume()
    require_same_state(before, dict(other.state_dict()))


def test_is_same_compares_tensors_and_nan():
    assert is_same({"a": [torch.ones(2), float("nan")]}, {"a": [torch.ones(2), float("nan")]})
    assert not is_same({"a": torch.ones(2)}, {"a": torch.ones(3)})
    assert not is_same({"a": True}, {"a": "x"})
