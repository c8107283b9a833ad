"""Values in the state of an optimizer of one's own come back with their types."""

from __future__ import annotations

import torch
from torch import nn

from resilient.state_dict.optimizer import NamedOptimizer
from tests.helpers.round_trip import require_same_state


class Keeper(torch.optim.SGD):
    """Keeps what it is given."""


def test_own_optimizer_state_keeps_types():
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    optimizer = Keeper(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {
        "master": torch.rand(1, 2, dtype=torch.float32),
        "count": torch.tensor([2**40 + 1]),
        "signs": torch.tensor([[True, False]]),
        "moment": torch.rand(1, 2).bfloat16(),
        "word": "text",
        "more": {"inner": [torch.tensor([2**40 + 1]), ("a", 1)]},
    }
    saved = NamedOptimizer(model, optimizer).state_dict()
    fresh = Keeper(model.parameters(), lr=0.5)
    NamedOptimizer(model, fresh).load_state_dict(saved)
    require_same_state(dict(optimizer.state[model.weight]), dict(fresh.state[model.weight]))


def test_torch_optimizer_state_follows_parameter():
    model, wide = nn.Linear(2, 1, dtype=torch.bfloat16), nn.Linear(2, 1)
    wide_optimizer = torch.optim.AdamW(wide.parameters())
    wide(torch.ones(1, 2)).sum().backward()
    wide_optimizer.step()
    saved = NamedOptimizer(wide, wide_optimizer).state_dict()
    optimizer = torch.optim.AdamW(model.parameters())
    NamedOptimizer(model, optimizer).load_state_dict(saved)
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16
