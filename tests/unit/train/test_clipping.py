"""Gradients are clipped as torch clips them, to the bit, also where clipping is left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.train.arguments import TrainingArguments
from resilient.train.model.precision import Precision

CPU = torch.device("cpu")
# Below, at and just above the norm at which torch's factor becomes less than one.
NORMS = (0.0, 1e-8, 0.5, 1 - 2e-6, 1 - 1e-6, 1 - 5e-7, 1.0, 1 + 1e-7, 1 + 1e-6, 2.0, 1e30)


def parameters_with(norm):
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((7, 5), (11,), ())]
    drawn = [torch.randn(one.shape, generator=generator) for one in made]
    whole = torch.cat([one.reshape(-1) for one in drawn]).norm()
    for one, gradient in zip(made, drawn, strict=True):
        one.grad = gradient * (norm / whole)
    return made


@pytest.fixture
def precision(tmp_path):
    return Precision(TrainingArguments(output_dir=str(tmp_path)), CPU)


@pytest.mark.parametrize("norm", [*NORMS, float("nan"), float("inf")])
def test_every_gradient_has_the_bits_that_torch_gives_it(norm, precision):
    ours, torchs = parameters_with(norm), parameters_with(norm)
    found = precision.clip(torch.optim.SGD(ours), ours, 1.0)
    expected = nn.utils.clip_grad_norm_(torchs, 1.0, foreach=True)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    for mine, other in zip(ours, torchs, strict=True):
        assert torch.equal(mine.grad.view(torch.int32), other.grad.view(torch.int32))


def test_gradients_are_freed_of_all_that_the_optimizer_has(precision):
    made = parameters_with(1.0)
    precision.zero_grad(torch.optim.SGD([{"params": made[:1]}, {"params": made[1:]}]), [])
    assert [one.grad for one in made] == [None, None, None]


def test_gradients_outside_the_optimizer_are_freed_too(precision):
    made = parameters_with(1.0)
    precision.zero_grad(torch.optim.SGD(made[:1]), made)
    assert [one.grad for one in made] == [None, None, None]


def test_an_optimizer_that_frees_gradients_in_its_own_way_is_left_to_do_so(precision):
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            self.asked = set_to_none

    optimizer = Own(parameters_with(1.0))
    precision.zero_grad(optimizer, [])
    assert optimizer.asked is True
