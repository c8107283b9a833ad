"""How DDP is told to send gradients, and what a hook's state survives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from resilient.errors import ConfigError
from resilient.strategies.gradient_compression import (
    Compression,
    ErrorFeedback,
    compress,
)
from resilient.strategies.gradient_compression import (
    PowerSGDState as SharedPower,
)
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.derived import compression_of


def worn_state():
    state = PowerSGDState(None, start_powerSGD_iter=2)
    state.iter = 5
    state.rng.randint(100)
    state.p_memory_dict = {0: torch.randn(3)}
    state.q_memory_dict = {0: torch.randn(4)}
    state.error_dict = {0: torch.randn(9)}
    return state


def carried_over(layout):
    old, new = worn_state(), PowerSGDState(None, start_powerSGD_iter=2)
    for part in (SharedPower, ErrorFeedback):
        part(new, layout).load_state_dict(part(old, "one").state_dict())
    return old, new


def test_a_state_is_carried_over_whole():
    old, new = carried_over("one")
    assert new.iter == 5
    assert new.rng.randint(1000) == old.rng.randint(1000)
    for name in ("p_memory_dict", "q_memory_dict", "error_dict"):
        assert torch.equal(getattr(new, name)[0], getattr(old, name)[0])


def test_in_other_buckets_only_the_step_and_the_random_stream_go_on():
    _, new = carried_over("other")
    assert new.iter == 5
    assert (new.p_memory_dict, new.q_memory_dict, new.error_dict) == ({}, {}, {})


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("feeds_back", [True, False])
@pytest.mark.parametrize("is_warm", [True, False])
def test_an_overflow_stays_in_what_power_sgd_keeps(alone, feeds_back, is_warm):
    options = {"use_error_feedback": feeds_back, "warm_start": is_warm, "start_powerSGD_iter": 2}
    compression = Compression("power_sgd", options=options)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    compress(model, compression, "one")
    for step in range(8):
        model.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        (loss * (float("inf") if step == 5 else 1.0)).backward()
    # What the refusal of fp16 rests on.
    assert model.module.weight.grad.isfinite().all() != compression.remembers


def test_power_sgd_that_keeps_nothing_may_overflow():
    keeps_nothing = {"use_error_feedback": False, "warm_start": False}
    args = TrainingArguments(
        ddp_comm_hook="power_sgd", fp16=True, ddp_comm_state_option=keeps_nothing
    )
    assert not compression_of(args).remembers


def test_the_arguments_are_those_of_power_sgd():
    args = TrainingArguments(
        ddp_comm_hook="power_sgd", ddp_comm_state_option='{"start_powerSGD_iter": 10}'
    )
    found = compression_of(args)
    assert (found.hook, found.options) == ("power_sgd", {"start_powerSGD_iter": 10})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ddp_comm_hook": "power_sdg"}, "did you mean `power_sgd`"),
        ({"ddp_comm_hook": "batched_power_sgd"}, "assertion"),
        ({"ddp_comm_hook": "fp16", "ddp_comm_wrapper": "bf16"}, "no wrapper"),
        ({"ddp_comm_hook": "fp16", "ddp_comm_state_option": {"random_seed": 1}}, "no options"),
        ({"ddp_comm_hook": "power_sgd", "ddp_comm_state_option": {"rank": 1}}, "has no rank"),
        (
            {"ddp_comm_hook": "power_sgd", "ddp_comm_state_option": {"start_powerSGD_iter": 1}},
            "at least 2",
        ),
        ({"ddp_comm_hook": "fp16", "fsdp": True}, "whole replicas"),
        ({"ddp_comm_hook": "power_sgd", "fp16": True}, "all later gradients would be infinite"),
        (
            {
                "ddp_comm_hook": "power_sgd",
                "fp16": True,
                "ddp_comm_state_option": {"warm_start": False},
            },
            "all later gradients would be infinite",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**arguments)
