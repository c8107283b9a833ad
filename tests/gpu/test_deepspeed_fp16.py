"""DeepSpeed in fp16, which it trains on a GPU only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from resilient.state_dict.deepspeed import ZeroOptimizer
from resilient.strategies.deepspeed import DeepSpeedStrategy
from resilient.train.arguments import TrainingArguments
from resilient.train.model.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_fp16_trains_and_its_loss_scale_is_saved():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    device = torch.device("cuda", 0)
    config = {
        "train_batch_size": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    strategy = DeepSpeedStrategy(device, config)
    model = strategy.prepare(nn.Linear(4, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    updates = Precision(TrainingArguments(), device)
    bound = strategy.bind(model, optimizer, updates)
    bound.updates.backward(bound.model(torch.ones(1, 4, device=device)).sum())
    assert bound.updates.step(optimizer)
    state = ZeroOptimizer(bound.model).state_dict()
    assert state["loss_scale"]["cur_scale"] == 16
    assert state["state"]["weight"]["exp_avg"].memory.dtype == torch.float32
    dist.destroy_process_group()
