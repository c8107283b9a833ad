"""Modules that hold or tell what is in them in ways of their own are known as they are saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.state_dict.capture_cache import CaptureCache
from tests.helpers.statefuls import anew, answer


class Hidden(nn.Module):
    """Tells nobody of the modules within it, but to be saved."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def modules(self):
        return iter(())

    def named_modules(self, *_, **__):
        return iter(())


class Attribute(nn.Module):
    """Has an attribute that is called as a method of modules."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.modules = ["inner"]


class Scripted(nn.Module):
    """Has a module that keeps what it holds in a way of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = torch.jit.script(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [Hidden, Attribute, Scripted], ids=lambda one: one.__name__)
def test_modules_of_other_ways_are_known_as_they_are_saved(kind):
    stateful, recall = kind(), CaptureCache()
    for _ in range(3):
        assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
    with torch.no_grad():
        stateful.inner.weight.zero_()
    if kind is not Scripted:
        stateful.inner.weight = nn.Parameter(torch.ones(2, 2))
    assert answer(recall.flatten_part("part", stateful)) == anew(stateful)
