"""The engine steps where the loop would: held against a fake with an engine's documented face."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.deepspeed import DeepSpeedStrategy, EngineUpdates

CPU = torch.device("cpu")


class Engine(nn.Module):
    """Remembers what it was told; clips and steps at once, as DeepSpeed does."""

    def __init__(self, optimizer, norm=3.0, *, overflows=False) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.told = []
        self._norm, self._overflows = norm, overflows

    def backward(self, loss, *, scale_wrt_gas):
        self.told.append(("backward", float(loss), scale_wrt_gas))

    def step(self):
        self.told.append("step")

    def get_global_grad_norm(self):
        return self._norm if "step" in self.told else None

    def was_step_applied(self):
        return not self._overflows

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.told.append(is_boundary)


class Plain:
    def clip(self, optimizer, parameters, max_norm):
        return torch.tensor(7.0)


def test_the_norm_is_there_once_the_engine_has_stepped():
    engine = Engine(object(), norm=torch.tensor(3.0))
    updates = EngineUpdates(engine, Plain())
    norm = updates.clip(None, [], 1.0)
    assert updates.step(None)
    assert float(norm) == 3
    engine._norm = 5.0
    later = updates.clip(None, [], 1.0)
    updates.step(None)
    assert (float(norm), float(later)) == (3, 5), "each step has a norm of its own"


def test_a_thin_engine_leaves_clipping_to_the_loop():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    updates = EngineUpdates(Engine(optimizer, norm=None), Plain())
    norm = updates.clip(optimizer, [], 1.0)
    updates.step(optimizer)
    assert float(norm) == 7


def test_a_step_that_overflowed_is_told():
    assert not EngineUpdates(Engine(object(), overflows=True), Plain()).step(None)


def test_a_loss_is_divided_by_its_micro_batches_once():
    engine = Engine(object())
    EngineUpdates(engine, Plain()).backward(torch.tensor(0.5))
    assert engine.told == [("backward", 0.5, False)]


def test_gradients_that_the_engine_keeps_are_not_freed_by_the_loop():
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter])
    EngineUpdates(Engine(object()), Plain()).zero_grad(optimizer, [parameter])
    assert parameter.grad is not None


def test_only_the_last_backward_of_a_step_is_its_boundary():
    engine = Engine(object())
    strategy = DeepSpeedStrategy(CPU, {})
    with pytest.raises(KeyError), strategy.no_sync(engine):
        raise KeyError
    assert engine.told == [False, True]


def test_a_batch_has_the_precision_of_the_model_and_whole_numbers_stay():
    strategy = DeepSpeedStrategy(CPU, {"bf16": {"enabled": True}})
    inputs = (torch.ones(2), {"x": [torch.ones(1, dtype=torch.float64)], "y": torch.ones(1).int()})
    (first, rest), named = strategy._in_model_dtype(nn.Linear(1, 1), inputs, {"mask": None})
    assert (first.dtype, rest["x"][0].dtype) == (torch.bfloat16, torch.bfloat16)
    assert rest["y"].dtype == torch.int32
    assert named == {"mask": None}
    untouched, _ = DeepSpeedStrategy(CPU, {})._in_model_dtype(nn.Linear(1, 1), inputs, {})
    assert untouched is inputs


def test_fp16_on_a_cpu_is_refused_before_anything_is_made():
    strategy = DeepSpeedStrategy(CPU, {"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match="fp16 on a GPU only"):
        strategy.prepare(nn.Linear(1, 1))


def test_without_deepspeed_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for name, value in (("LOCAL_RANK", "0"), ("DS_ACCELERATOR", "cpu")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="needs DeepSpeed") as refusal:
        DeepSpeedStrategy(CPU, {}).prepare(nn.Linear(1, 1))
    assert "--no-build-isolation" in refusal.value.hint
