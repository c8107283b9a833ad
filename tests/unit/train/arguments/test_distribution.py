"""What the arguments about several ranks say together, and what of it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Trainer, TrainingArguments
from resilient.distributed.launch_env import World
from resilient.errors import ConfigError
from resilient.strategies.ddp import DdpStrategy
from resilient.train.arguments.derived import syncs_each_batch
from resilient.train.session import _backend


@pytest.mark.parametrize(
    ("name", "value", "parallelism"),
    [
        ("USE_FSDP", "1", "fsdp"),
        ("USE_FSDP", "0", "ddp"),
        ("USE_DEEPSPEED", "true", "deepspeed"),
        ("USE_DEEPSPEED", "", "ddp"),
    ],
)
def test_the_environment_switches(monkeypatch, name, value, parallelism):
    monkeypatch.setenv(name, value)
    assert TrainingArguments().parallelism == parallelism
    assert TrainingArguments(parallelism="fsdp").parallelism == "fsdp"


def test_the_environment_does_not_switch_twice(monkeypatch):
    monkeypatch.setenv("USE_FSDP", "1")
    monkeypatch.setenv("USE_DEEPSPEED", "1")
    with pytest.raises(ConfigError, match="USE_FSDP and USE_DEEPSPEED are both set"):
        TrainingArguments()


def test_the_configuration_of_accelerate_may_say_what_is_done_anyway():
    config = {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": True,
        "gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True},
    }
    args = TrainingArguments(accelerator_config=config, gradient_accumulation_steps=2)
    assert syncs_each_batch(args)
    assert not syncs_each_batch(TrainingArguments())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"split_batches": True}, "per rank"),
        ({"even_batches": False}, "equal batches"),
        ({"use_seedable_sampler": False}, "only a reproducible order"),
        ({"split_batch": True}, "did you mean `split_batches`"),
        ({"gradient_accumulation_kwargs": {"num_steps": 3}}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_kwargs": {"adjust_scheduler": False}}, "counts steps"),
    ],
)
def test_what_accelerate_would_do_otherwise_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(accelerator_config=config)


def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="needs a GPU"):
        _backend(TrainingArguments(ddp_backend="nccl", use_cpu=True), World(0, 2))


def test_a_static_graph_reduces_in_its_first_backward_pass():
    with pytest.raises(ConfigError, match="the very first backward pass"):
        TrainingArguments(ddp_static_graph=True, gradient_accumulation_steps=2)


def test_buffers_that_would_differ_are_refused():
    strategy = DdpStrategy(torch.device("cpu"), broadcast_buffers=False)
    with pytest.raises(ConfigError, match="running_mean and 2 more buffers differ"):
        strategy.prepare(nn.BatchNorm1d(3))


def test_a_trainer_says_how_it_is_parallel_and_lets_itself_be_wrapped(tmp_path):
    class Own(Trainer):
        def _wrap_model(self, model, training=True):
            self.wrapped = training
            return super()._wrap_model(model, training)

    class Guess(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    args = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True)
    trainer = Own(Guess(2, 1), args, train_dataset=[torch.ones(2)] * 8)
    assert trainer.model_wrapped is trainer.model
    assert not trainer.is_fsdp_enabled
    assert not trainer.is_deepspeed_enabled
    trainer.train()
    assert trainer.wrapped
    assert Trainer(Guess(2, 1), TrainingArguments(str(tmp_path), fsdp=True)).is_fsdp_enabled
