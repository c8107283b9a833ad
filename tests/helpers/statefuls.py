"""Small statefuls of each kind that is known at a glance, and what they say."""

from __future__ import annotations

import torch
from torch import nn

from resilient.state_dict.capture_cache import fast_state_dict
from resilient.state_dict.flatten import flatten
from resilient.state_dict.optimizer import NamedOptimizer


def model():
    inner = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
    network = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2), nn.Identity()
    )
    network[4].inner = inner
    network[4].other = nn.Linear(2, 1)
    network.register_buffer("passing", torch.zeros(2), persistent=False)
    return network


def train_model():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return NamedOptimizer(network, optimizer)


def answer(flatten_part):
    tree, tensors = flatten_part
    return tree, {name: (tensor.shape, tensor.tolist()) for name, tensor in tensors.items()}


def anew(stateful):
    return answer(flatten("part", fast_state_dict(stateful)))


def first_state(names):
    return next(iter(names.optimizer.state.values()))
