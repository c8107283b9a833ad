"""A model of which this rank holds a stage: what it says of the rest, and what it takes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.pipeline import PipelineModel, PipelineOptimizer, remote_tensor
from resilient.state_dict.sharding import FlatShard
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import address_of, stable_storages


class Two(nn.Module):
    """A first stage, a second one with buffers, and a buffer that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.BatchNorm1d(4)
        self.register_buffer("both", torch.arange(2.0))


def stage_of(number, seed=1):
    torch.manual_seed(seed)
    model = Two()
    away = model.second if number == 0 else model.first
    away.to("meta")
    return model


def trained(model):
    groups = [
        {"params": [one for name, one in model.named_parameters() if kind in name]}
        for kind in ("weight", "bias")
    ]
    return torch.optim.AdamW(groups, lr=0.1)


def step(optimizer):
    for group in optimizer.param_groups:
        for one in group["params"]:
            if not one.is_meta:
                one.grad = torch.ones_like(one)
    optimizer.step()


def exchange(shown, number):
    """Return what shows a value to both stages, as far as they have shown theirs."""

    def show(value):
        shown[number] = value
        return list(shown.values())

    return show


def pair():
    """Return both stages' models and optimizers, as two ranks would hold them after a step."""
    shown = {}
    models = [stage_of(number) for number in range(2)]
    optimizers = [trained(model) for model in models]
    kept = [
        PipelineOptimizer(model, optimizer, writes=True, exchange=exchange(shown, number))
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    for optimizer in optimizers:
        step(optimizer)
    for one in kept:
        one.state_dict()
    return models, optimizers, kept


def whole():
    torch.manual_seed(1)
    model = Two()
    optimizer = trained(model)
    step(optimizer)
    return model, optimizer


def held(tree):
    """Return the bytes that a rank holds, by name."""
    return {name: one.memory.tolist() for name, one in tree.items() if one.memory.numel()}


def test_every_name_is_said_and_each_tensor_is_held_once():
    models, _, _ = pair()
    first = PipelineModel(models[0], writes=True).state_dict()
    second = PipelineModel(models[1], writes=True, but=("both",)).state_dict()
    expected, _ = whole()
    assert list(first) == list(second) == list(expected.state_dict())
    assert all(isinstance(one, FlatShard) for one in (*first.values(), *second.values()))
    assert set(held(first)) == {"both", "first.weight", "first.bias"}
    assert set(held(second)) == {name for name in expected.state_dict() if "second" in name}
    for name, one in expected.state_dict().items():
        assert (first[name].shape, first[name].dtype) == (one.shape, one.dtype)
        assert {**held(first), **held(second)}[name] == one.reshape(-1).tolist()


def test_of_what_several_ranks_hold_one_writes():
    models, optimizers, _ = pair()
    assert held(PipelineModel(models[0], writes=False).state_dict()) == {}
    other = PipelineOptimizer(models[0], optimizers[0], writes=False, exchange=lambda one: [one])
    state = other.state_dict()["state"]
    assert all(held(one) == {} for one in state.values())
    assert state["first.weight"]["exp_avg"].shape == (4, 3)


def test_an_optimizer_says_the_state_of_all_stages_in_the_groups_of_the_whole():
    _, optimizers, kept = pair()
    model, optimizer = whole()
    expected = NamedOptimizer(model, optimizer).state_dict()
    for number, one in enumerate(kept):
        found = one.state_dict()
        assert [group["params"] for group in found["param_groups"]] == [
            group["params"] for group in expected["param_groups"]
        ]
        assert list(found["state"]) == list(expected["state"])
        for name, kinds in expected["state"].items():
            mine = name.startswith(("first", "second")[number])
            for kind, tensor in kinds.items():
                said = found["state"][name][kind]
                assert (said.shape, said.dtype) == (tensor.shape, tensor.dtype)
                wanted = tensor.reshape(-1).tolist() if mine else []
                assert said.memory.tolist() == wanted
        assert len(optimizers[number].param_groups) == 2


def test_a_stage_takes_its_own_from_a_state_of_the_whole():
    model, optimizer = whole()
    for number in range(2):
        mine = stage_of(number, seed=2)
        other = trained(mine)
        kept = PipelineOptimizer(mine, other, writes=True, exchange=lambda one: [one])
        PipelineModel(mine, writes=True).load_state_dict(model.state_dict())
        kept.load_state_dict(NamedOptimizer(model, optimizer).state_dict())
        for name, one in mine.named_parameters():
            expected = model.get_parameter(name)
            if one.is_meta:
                assert one not in other.state
                continue
            assert torch.equal(one, expected)
            for kind, value in optimizer.state[expected].items():
                assert torch.equal(other.state[one][kind], value), (name, kind)


def test_only_what_is_here_is_read():
    models, _, kept = pair()
    here = PipelineModel(models[0], writes=True)
    assert here.like("first.weight") is None, "wanted whole"
    assert here.like("second.weight").memory.numel() == 0
    assert kept[0].like("state/first.weight/exp_avg") is None
    assert kept[0].like("state/second.weight/exp_avg").memory.numel() == 0
    assert kept[0].like("state/second.weight/step") is None
    assert kept[0].like("param_groups/0/lr") is None


def test_another_model_is_refused():
    model, optimizer = whole()
    mine = stage_of(0)
    staged = PipelineModel(mine, writes=True)
    with pytest.raises(ValueError, match="parameters differ: both"):
        staged.load_state_dict({k: v for k, v in model.state_dict().items() if k != "both"})
    with pytest.raises(RuntimeError, match=r"shape \(2,\) of `first.bias` was saved"):
        staged.load_state_dict({**model.state_dict(), "first.bias": torch.zeros(2)})
    kept = PipelineOptimizer(mine, trained(mine), writes=True, exchange=lambda one: [one])
    state = NamedOptimizer(model, optimizer).state_dict()
    state["param_groups"][0]["params"] = ["first.weight"]
    with pytest.raises(ValueError, match="parameters differ: second"):
        kept.load_state_dict(state)


def test_an_optimizer_of_the_model_as_it_was_is_refused():
    optimizer = trained(whole()[0])
    with pytest.raises(
        ConfigError, match="4 of the optimizer's 4 parameters do not belong to the model"
    ):
        PipelineOptimizer(stage_of(0), optimizer, writes=True, exchange=lambda one: [one])


def test_a_group_that_comes_later_is_cut_as_the_first_were():
    shown, models = {}, [stage_of(number) for number in range(2)]
    kept = []
    for number, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.first.parameters(), lr=0.1)
        one = PipelineOptimizer(model, optimizer, writes=True, exchange=exchange(shown, number))
        step(optimizer)
        one.state_dict()
        optimizer.add_param_group({"params": list(model.second.parameters())})
        step(optimizer)
        one.state_dict()
        kept.append(one)
    for number, one in enumerate(kept):
        state = one.state_dict()
        names = [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
        assert [group["params"] for group in state["param_groups"]] == names
        assert sorted(state["state"]) == sorted(name for some in names for name in some)
        held = [len(group["params"]) for group in one.optimizer.param_groups]
        assert held == ([2, 0] if number == 0 else [0, 2])
        mine = stage_of(number, seed=2)
        fresh = torch.optim.AdamW(mine.first.parameters(), lr=0.1)
        other = PipelineOptimizer(mine, fresh, writes=True, exchange=lambda one: [one])
        fresh.add_param_group({"params": list(mine.second.parameters())})
        other.load_state_dict({**state, "state": {}})
    optimizer.add_param_group({"params": list(nn.Linear(1, 1).parameters())})
    with pytest.raises(
        ConfigError, match="2 of the optimizer's 2 parameters do not belong to the model"
    ):
        kept[1].state_dict()


def test_tied_parameters_stay_one_wherever_they_are():
    for number in range(2):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(2, 2)})
        model["b"].weight = model["a"].weight
        if number:
            moved = nn.Parameter(model["a"].weight.detach().to("meta"))
            model["a"].weight = model["b"].weight = moved
        snapshot = capture(1, {"model": Part(PipelineModel(model, writes=True))}, 0)
        names = set(snapshot.parts[0].tensors)
        assert "model/a.weight" in names
        assert "model/b.weight" not in names


def test_what_a_step_alone_changes_is_said():
    models, optimizers, kept = pair()
    steady = stable_storages({"optimizer": Part(kept[0])})
    own = [models[0].first.weight, optimizers[0].state[models[0].first.weight]["exp_avg"]]
    assert {address_of(one) for one in own} <= steady


def test_nothing_is_held_of_what_is_elsewhere():
    one = remote_tensor((2, 3), torch.bfloat16)
    assert (one.shape, one.dtype, one.memory.numel()) == ((2, 3), torch.bfloat16, 0)
