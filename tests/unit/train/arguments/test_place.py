from __future__ import annotations

from datetime import timedelta

import pytest

from resilient.train.arguments import TrainingArguments


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_alone_this_process_is_the_only_one():
    args = TrainingArguments(use_cpu=True, per_device_train_batch_size=3)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.local_rank, args.n_gpu, args.device.type) == (0, 0, "cpu")
    assert (args.train_batch_size, args.eval_batch_size) == (3, 8)
    assert args.parallel_mode == args.parallel_mode.value == "not_parallel"
    assert args.should_save
    assert args.should_log


def test_the_launcher_says_who_a_process_is(monkeypatch):
    args = TrainingArguments(use_cpu=True)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (args.world_size, args.process_index, args.local_rank) == (8, 5, 1)
    assert args.parallel_mode == "distributed"
    assert not args.should_save
    assert not args.should_log
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert args.should_log
    assert not TrainingArguments(log_on_each_node=False).should_log


def test_warm_up_and_timeouts_in_the_units_of_their_users():
    assert TrainingArguments(warmup_steps=0.1).get_warmup_steps(101) == 11
    assert TrainingArguments(warmup_steps=7).get_warmup_steps(101) == 7
    assert TrainingArguments(ddp_timeout=90).ddp_timeout_delta == timedelta(seconds=90)


def test_without_a_process_group_nobody_waits_for_the_first():
    with TrainingArguments().main_process_first():
        pass
