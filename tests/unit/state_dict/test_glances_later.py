"""What is known at a glance is of the objects that training has now, not of those that it had."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from resilient.state_dict.capture_cache import CaptureCache
from resilient.state_dict.rng_state import RandomState
from tests.helpers.statefuls import anew, answer, first_state, model, train_model


def other_memory(one):
    one[0].weight.data = torch.ones(3, 2)


def another_shape(one):
    one[0].weight.data = one[0].weight.data.view(2, 3)


def known(stateful):
    """Return what has asked a stateful until it was known at a glance."""
    recall = CaptureCache()
    for _ in range(3):
        assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    assert recall._last_states["part"].was_unchanged
    return recall


def in_double(one):
    one.double()


@pytest.mark.parametrize("change", [other_memory, another_shape, in_double])
def test_a_parameter_that_was_wrapped_again_is_looked_at_from_then_on(change):
    stateful = model()
    recall = known(stateful)
    for name in ("weight", "bias"):
        same = getattr(stateful[0], name).detach()
        setattr(stateful[0], name, nn.Parameter(same, requires_grad=False))
    for _ in range(2):
        assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    change(stateful)
    tree, tensors = recall.flatten_part("part", stateful)
    assert answer((tree, tensors)) == anew(stateful)
    assert tensors["part/0.weight"].dtype == stateful[0].weight.dtype


def test_a_moment_that_was_wrapped_again_is_looked_at_from_then_on():
    stateful = train_model()
    recall = known(stateful)
    first_state(stateful)["exp_avg"] = first_state(stateful)["exp_avg"].detach()
    for _ in range(2):
        assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    first_state(stateful)["exp_avg"].data = torch.ones_like(first_state(stateful)["exp_avg"])
    assert answer(recall.flatten_part("part", stateful)) == anew(stateful)


def test_what_counts_changes_is_looked_at():
    stateful = model()
    recall = known(stateful)
    torch.utils.swap_tensors(stateful[0].weight, nn.Parameter(stateful[0].weight.data))
    _, tensors = recall.flatten_part("part", stateful)
    with torch.no_grad():
        stateful[0].weight.add_(1)
    assert tensors["part/0.weight"]._version == stateful[0].weight._version


def test_a_rate_that_is_no_tensor_any_more_is_none_in_what_is_known():
    stateful, recall = train_model(), CaptureCache()
    stateful.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    for _ in range(3):
        assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    stateful.optimizer.param_groups[0]["lr"] = 0.5
    assert answer(recall.flatten_part("part", stateful)) == anew(stateful)


def test_what_was_taken_apart_is_compared_and_not_what_came_a_moment_later(monkeypatch):
    recall, generators = CaptureCache(), RandomState()
    ask, asked = RandomState.state_dict, []

    def draw_once_behind(self):
        said = ask(self)
        if not asked:
            random.getrandbits(32)
        asked.append(said)
        return said

    monkeypatch.setattr(RandomState, "state_dict", draw_once_behind)
    recall.flatten_part("part", generators)
    assert answer(recall.flatten_part("part", generators)) == anew(generators)
