"""fp8 on a GPU that multiplies in it: every recipe trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.train.model.precision import capability_of, to_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_layers_train_in_fp8(recipe):
    pytest.importorskip("torchao", reason="torchao is not installed")
    device = torch.device("cuda", 0)
    if capability_of(device) < (9, 0):
        pytest.skip("this GPU does not multiply in fp8")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)).to(device)
    to_fp8(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(32, 64, device=device)
    y = torch.randint(0, 16, (32,), device=device)
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
