"""The norm of gradients is the bits of torch's own, of whatever kinds they are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import get_total_norm

from resilient.train.model.precision import total_norm


def some(*dtypes, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    shapes = [(64, 65), (65,), (7, 3, 5), (), (1,)]
    return [
        (torch.randn(shape, generator=generator) * scale).to(dtypes[nth % len(dtypes)])
        for nth, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    "gradients",
    [
        pytest.param(some(torch.float32), id="of one kind"),
        pytest.param(some(torch.float64), id="double"),
        pytest.param(some(torch.bfloat16), id="bfloat16"),
        pytest.param(some(torch.float32, torch.float64), id="mixed"),
        pytest.param(some(torch.float32, scale=1e30), id="overflowing"),
        pytest.param([*some(torch.float32), torch.tensor(torch.nan)], id="no number"),
        pytest.param([], id="none"),
    ],
)
def test_it_is_the_norm_of_torch(gradients):
    ours, torchs = total_norm(gradients), get_total_norm(gradients, foreach=True)
    assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
    assert torch.equal(ours, torchs) or (ours.isnan() and torchs.isnan())


def test_a_norm_has_no_history():
    gradient = torch.ones(3, requires_grad=True) * 2
    assert not total_norm([gradient]).requires_grad
