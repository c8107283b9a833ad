"""Which memory is left to be copied beside training."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from resilient.state_dict.capture_cache import CaptureCache
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import (
    StableStorageCache,
    address_of,
    is_deferrable,
    stable_storages,
    state_memory,
)


@pytest.mark.parametrize("offset", [0, 1], ids=["whole", "within"])
def test_steady_memory_is_told_by_its_storage(offset):
    parameter = nn.Parameter(torch.ones(5)[offset:])
    part = Part(torch.optim.SGD([parameter], lr=0.1))
    assert stable_storages({"optimizer": part}) == {address_of(parameter)}


@pytest.mark.parametrize("is_named", [True, False])
def test_a_small_parameter_is_copied_at_once_and_its_moments_wait_where_that_is_wanted(is_named):
    """A model may keep a temperature of its own within bounds in its forward pass."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    part = Part(NamedOptimizer(model, optimizer) if is_named else optimizer)
    steady, small = stable_storages({"optimizer": part}), state_memory({"optimizer": part})
    moment = optimizer.state[model.weight]["exp_avg"]
    assert not is_deferrable(model.weight, steady, small)
    assert is_deferrable(moment, steady, small)
    assert not is_deferrable(moment, steady)
    assert not is_deferrable(moment, frozenset(), small)


def test_a_number_of_a_model_that_its_optimizer_keeps_too_is_copied_at_once():
    """``p.detach().float()`` of a parameter in full precision is the parameter."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = model.weight.detach().float()
    optimizer.state["mean"] = torch.ones(2)
    optimizer.state["calls"] = 3
    small = state_memory({"optimizer": Part(NamedOptimizer(model, optimizer))})
    assert small == {address_of(optimizer.state["mean"])}


def test_what_is_only_called_steady_is_not_asked():
    model = nn.Sequential(OrderedDict(steady=nn.Linear(2, 2)))
    assert stable_storages({"model": Part(model)}) == frozenset()


class Calm(nn.Linear):
    def steady(self, beside):
        """Have nothing to do with memory."""


def test_what_a_module_calls_steady_is_its_own():
    assert stable_storages({"model": Part(Calm(2, 2))}) == frozenset()


class Pace:
    def __init__(self):
        self.steady = 3

    def state_dict(self):
        return {"steady": self.steady}

    def load_state_dict(self, state):
        self.steady = state["steady"]


def test_a_number_that_somebody_calls_steady_is_not_asked():
    assert stable_storages({"pace": Part(Pace())}) == frozenset()


class Trained:
    """A model and its optimizer, which has state."""

    def __init__(self, is_named=True):
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(self.model[0].parameters())
        held = NamedOptimizer(self.model, self.optimizer) if is_named else self.optimizer
        self.parts = {"model": Part(self.model), "optimizer": Part(held)}
        self.step()

    def step(self):
        self.model(torch.ones(4, 2)).sum().backward()
        self.optimizer.step()


def nothing(_):
    pass


def another_group(one):
    one.optimizer.add_param_group({"params": [*one.model[2].parameters()]})


def other_memory_of_a_parameter(one):
    one.model[0].weight.data = one.model[0].weight.data.clone()


def other_memory_of_a_moment(one):
    state = one.optimizer.state[one.model[0].weight]
    state["exp_avg"] = state["exp_avg"].clone()


def a_moment_that_moved(one):
    one.optimizer.state[one.model[0].weight]["exp_avg"].share_memory_()


def a_moment_that_is_the_parameter(one):
    one.optimizer.state[one.model[0].weight]["master"] = one.model[0].weight.detach()


def no_state(one):
    one.optimizer.state.clear()


def another_optimizer(one):
    other = torch.optim.SGD(one.model[2].parameters(), momentum=0.9)
    one.parts["optimizer"] = Part(NamedOptimizer(one.model, other))


CHANGES = [
    nothing, another_group, other_memory_of_a_parameter, other_memory_of_a_moment,
    a_moment_that_moved, a_moment_that_is_the_parameter, no_state, another_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_is_steady_is_what_would_be_found_anew_whatever_changed(change, is_named):
    one, recall, steadiness = Trained(is_named), CaptureCache(), StableStorageCache()
    for turn in range(6):
        if turn == 3:
            change(one)
        found = steadiness.of(one.parts, capture(1, one.parts, 0, recall))
        assert found == (stable_storages(one.parts), state_memory(one.parts))


def test_what_is_steady_is_the_same_object_as_long_as_nothing_moved():
    one, recall, steadiness = Trained(), CaptureCache(), StableStorageCache()
    found = []
    for _ in range(4):
        found.append(steadiness.of(one.parts, capture(1, one.parts, 0, recall)))
        one.step()
    assert found[1] is found[2] is found[3]


def test_what_is_not_known_again_is_looked_for_anew():
    """Another tensor may lie at the same address."""
    one, recall, steadiness = Trained(), CaptureCache(), StableStorageCache()
    snapshot = capture(1, one.parts, 0, recall)
    found = steadiness.of(one.parts, snapshot)
    again = capture(1, one.parts, 0, CaptureCache())
    assert steadiness.of(one.parts, again) == found
    assert steadiness.of(one.parts, again) is not found
