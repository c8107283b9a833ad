"""What is known at a glance is what asking anew would give, whatever was changed meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from resilient.state_dict.capture_cache import CaptureCache
from resilient.state_dict.rng_state import RandomState
from tests.helpers.statefuls import anew, answer, first_state, model, train_model


class Linear(nn.Linear):
    """One of another class, with a way of its own to say its state."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.ones(1)


def another_parameter(one):
    one[0].weight = nn.Parameter(torch.ones(3, 2))


def other_memory(one):
    one[0].weight.data = torch.ones(3, 2)


def another_shape(one):
    one[0].weight.data = one[0].weight.data.view(2, 3)


def a_tied_parameter(one):
    one[2].bias = one[0].bias


def one_module_less(one):
    del one[3]


def another_module(one):
    one[2] = nn.Linear(3, 3)


def modules_in_another_order(one):
    one[0], one[2] = one[2], one[0]


def a_parameter_less(one):
    one[0].bias = None


def a_buffer_more(one):
    one[1].register_buffer("more", torch.ones(2))


def a_buffer_that_stays(one):
    one._non_persistent_buffers_set.clear()


def a_buffer_that_passes(one):
    one[1]._non_persistent_buffers_set.add("running_mean")


def a_hook(one):
    one[1].register_state_dict_post_hook(
        lambda _, found, prefix, __: found.update({f"{prefix}more": torch.ones(1)})
    )


def a_hook_before(one):
    one[1].register_state_dict_pre_hook(lambda module, *_: module.running_mean.add_(1))


def a_way_of_the_instance(one):
    one[2]._save_to_state_dict = lambda found, prefix, _: found.update({prefix + "x": 1})


def another_class(one):
    one[2].__class__ = Linear


def other_dicts(one):
    one[2].__dict__ = {**vars(one[0])}


def key_of_another_name(one):
    one[2]._parameters["other"] = one[2]._parameters.pop("bias")


def a_module_that_moved(one):
    """The last child of one module becomes the first of the next, all in the same order."""
    one[4].inner._modules = {"other": one[4]._modules.pop("other"), **one[4].inner._modules}


def a_child_that_moved(one):
    """As before, in the dicts that are there."""
    held = one[4].inner._modules
    children = {"other": one[4]._modules.pop("other"), **held}
    held.clear()
    held.update(children)


MODULE = [
    another_parameter, other_memory, another_shape, a_tied_parameter, one_module_less,
    another_module, modules_in_another_order, a_parameter_less, a_buffer_more,
    a_buffer_that_stays, a_buffer_that_passes, a_hook, a_hook_before, a_way_of_the_instance,
    another_class, other_dicts, key_of_another_name, a_module_that_moved, a_child_that_moved,
]  # fmt: skip


def another_rate(named):
    named.optimizer.param_groups[0]["lr"] = 0.5


def a_rate_that_is_a_tensor(named):
    named.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def another_group(named):
    more = nn.Parameter(torch.ones(2))
    named._model.register_parameter("more", more)
    named.optimizer.add_param_group({"params": [more]})


def another_group_and_other_names(named):
    first = named._model[0]._parameters
    first["renamed"] = first.pop("weight")
    another_group(named)


def states_of_each_other(named):
    state = named.optimizer.state
    (one, first), (other, second), *rest = state.items()
    state.clear()
    state.update({other: first, one: second, **dict(rest)})


def a_group_less(named):
    group = named.optimizer.param_groups[0]
    named.optimizer.state.pop(group["params"].pop(0))


def parameters_in_another_order(named):
    named.optimizer.param_groups[0]["params"].reverse()


def no_state(named):
    named.optimizer.state.clear()


def states_in_another_order(named):
    state = named.optimizer.state
    first = next(iter(state))
    state[first] = state.pop(first)


def another_moment(named):
    first_state(named)["exp_avg"] = torch.ones_like(first_state(named)["exp_avg"])


def other_memory_of_a_moment(named):
    first_state(named)["exp_avg"].data = torch.ones_like(first_state(named)["exp_avg"])


def a_moment_of_another_name(named):
    first_state(named)["other"] = first_state(named).pop("exp_avg")


def a_number_among_moments(named):
    first_state(named)["count"] = 3


def moments_of_another_dict(named):
    state = named.optimizer.state
    first = next(iter(state))
    state[first] = {**state[first], "exp_avg": torch.zeros_like(state[first]["exp_avg"])}


def hooked(named):
    named.optimizer.register_state_dict_post_hook(lambda _, said: {**said, "more": 1})


OPTIMIZER = [
    another_rate, a_rate_that_is_a_tensor, another_group, another_group_and_other_names,
    states_of_each_other, a_group_less,
    parameters_in_another_order, no_state, states_in_another_order, another_moment,
    other_memory_of_a_moment, a_moment_of_another_name, a_number_among_moments,
    moments_of_another_dict, hooked,
]  # fmt: skip


def a_number_of_python(_):
    random.getrandbits(8)


def a_number_of_numpy(_):
    np.random.random()  # noqa: NPY002 - users draw from it


def a_normal_number_of_numpy(_):
    np.random.standard_normal()  # noqa: NPY002


def a_number_of_torch(_):
    torch.rand(1)


def a_number_of_each(_):
    for draw in (a_number_of_torch, a_number_of_python, a_number_of_numpy):
        draw(None)


RANDOM = [
    a_number_of_each,
    a_number_of_python,
    a_number_of_numpy,
    a_normal_number_of_numpy,
    a_number_of_torch,
]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *((model, one) for one in MODULE),
        *((train_model, one) for one in OPTIMIZER),
        *((RandomState, one) for one in RANDOM),
    ],
    ids=lambda one: one.__name__,
)
def test_what_is_known_at_a_glance_is_what_asking_anew_gives(make, change):
    torch.manual_seed(0)
    stateful, recall = make(), CaptureCache()
    for _ in range(3):
        assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    assert recall._last_states["part"].was_unchanged, "it was never known at a glance"
    change(stateful)
    for _ in range(3):
        asked = recall.flatten_part("part", stateful)
        # A hook may change what is there each time it is asked.
        assert change is a_hook_before or answer(asked) == anew(stateful)
    assert change is not a_hook_before or "part" not in recall._last_states


def test_a_class_that_is_given_a_way_of_its_own_is_asked(monkeypatch):
    stateful, recall = model(), CaptureCache()
    for _ in range(3):
        recall.flatten_part("part", stateful)
    monkeypatch.setattr(nn.Linear, "get_extra_state", lambda _: {"n": 3})
    assert answer(recall.flatten_part("part", stateful)) == anew(stateful)


def test_numbers_that_changed_in_place_are_in_what_is_known():
    stateful, recall = train_model(), CaptureCache()
    for _ in range(3):
        recall.flatten_part("part", stateful)
    first_state(stateful)["exp_avg"].add_(1)
    assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    assert "part" in recall._last_states


def test_another_stateful_under_the_name_is_asked():
    recall = CaptureCache()
    first = model()
    for _ in range(3):
        recall.flatten_part("part", first)
    second = model()
    assert answer(recall.flatten_part("part", second)) == anew(second)
    assert answer(recall.flatten_part("part", first)) == anew(first)


def test_what_differs_each_time_is_not_looked_at_for_ever():
    recall, generators = CaptureCache(), RandomState()
    for _ in range(4):
        random.getrandbits(8)
        assert answer(recall.flatten_part("part", generators)) == anew(generators)
    assert "part" not in recall._last_states


def test_what_torch_draws_at_each_step_is_no_reason_to_ask_anew():
    recall, generators = CaptureCache(), RandomState()
    for _ in range(4):
        torch.rand(1)
        assert answer(recall.flatten_part("part", generators)) == anew(generators)
    assert recall._last_states["part"].was_unchanged
