"""A module that stays the outermost one although something was wrapped around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.strategies.module_wrapper import (
    ForwardRedirect,
    find_redirect,
    named_in,
    stateful_of,
)


class Doubling(nn.Module):
    """Calls what it wraps, and doubles."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = module
        self.calls = 0

    def forward(self, *inputs):
        self.calls += 1
        return 2 * self.wrapped(*inputs)


def make():
    module = nn.Identity()
    wrapper = Doubling(module)
    return module, wrapper, ForwardRedirect(module, wrapper, [])


def test_whoever_calls_the_module_calls_the_wrapper_once_and_each_hook_once():
    module, wrapper, _ = make()
    ran = []
    module.register_forward_hook(lambda *_: ran.append("after"))
    module.register_forward_pre_hook(lambda *_: ran.append("before"))
    assert module(torch.tensor(3)) == 6
    assert wrapper(torch.tensor(3)) == 6
    assert (wrapper.calls, ran) == (2, ["before", "after"] * 2)


def test_an_error_does_not_close_the_detour():
    module, wrapper, _ = make()
    with pytest.raises(TypeError):
        module(1, 2)
    assert module(4) == 8
    assert wrapper.calls == 2


def test_a_module_knows_its_way():
    module, wrapper, detour = make()
    assert find_redirect(module) is detour
    assert (detour.wrapper, detour.numbers) == (wrapper, 0)
    assert find_redirect(wrapper) is None
    assert stateful_of(wrapper) is wrapper


def test_the_module_has_the_names_that_it_had():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    before = named_in(module)
    assert [one.name for one in before] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    detour = ForwardRedirect(module, Doubling(module), before)
    module[0].weight = nn.Parameter(torch.zeros(1))
    assert named_in(module) == before
    assert detour.numbers == 4 + 2
    assert [name for name, _ in module.named_modules()] == ["", "0", "1"]
