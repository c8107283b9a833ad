"""Sums of gradients of which some are missing, and of which parts are here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.canonical.reducer import GradientReducer
from resilient.strategies.canonical.tree_reduce import add_gradients


def numbers(*values):
    return torch.tensor(values)


def test_gradients_are_added_one_by_one_and_what_is_nowhere_stays_away():
    found = add_gradients([numbers(1.0), numbers(2.0), None], [numbers(3.0), None, None])
    assert [None if one is None else one.tolist() for one in found] == [[4.0], [2.0], None]


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_missing_counts_as_the_zeros_that_another_rank_would_send(swapped):
    both = [[numbers(-0.0)], [None]]
    (found,) = add_gradients(*reversed(both)) if swapped else add_gradients(*both)
    assert math.copysign(1, float(found)) == 1


def test_a_step_leaves_the_mean_and_its_loss():
    weight = nn.Parameter(torch.zeros(3))
    unused = nn.Parameter(torch.zeros(2))
    reducer = GradientReducer([weight, unused], leaves=3, rank=0, ranks=1, window_bytes=1 << 20)
    for leaf in reducer.leaves:
        weight.grad = torch.full((3,), float(leaf))
        reducer.take(leaf, torch.tensor(leaf * 2.0))
    assert reducer.finish() == 2.0
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
    assert unused.grad is None


def test_a_sparse_gradient_is_refused():
    weight = nn.Parameter(torch.zeros(3))
    reducer = GradientReducer([weight], leaves=1, rank=0, ranks=1, window_bytes=1 << 20)
    weight.grad = torch.zeros(3).to_sparse()
    with pytest.raises(ConfigError, match="sparse"):
        reducer.take(0, torch.tensor(0.0))
