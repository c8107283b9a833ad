"""How DDP is told to send gradients, and what a hook's state survives."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from resilient.errors import ConfigError
from resilient.strategies.compression import OwnErrors, SharedPower
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.distribution import compression_of


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
    for part in (SharedPower, OwnErrors):
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
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**arguments)
