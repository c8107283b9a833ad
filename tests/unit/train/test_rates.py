"""Learning rates that are tensors, as an optimizer has them that compiles its step."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from resilient.train.arguments import TrainingArguments
from resilient.train.meters import Meters
from resilient.train.schedules.factory import (
    continue_schedule,
    create_scheduler,
    greedy,
    needs_metric,
    plateau,
)


def tensor_rate():
    """Return an optimizer with such a rate, and the tensor."""
    rate = torch.tensor(0.5)
    return SGD([torch.nn.Parameter(torch.ones(1))], lr=rate), rate


def test_the_rate_of_a_step_is_logged_and_not_what_the_tensor_became_since():
    meters = Meters(torch.device("cpu"), 1)
    _, rate = tensor_rate()
    meters.end_step(torch.tensor(1.0), rate)
    rate.fill_(0.25)
    assert json.dumps(meters.take()["learning_rate"]) == "0.5"


@pytest.mark.parametrize("make", [greedy, plateau])
def test_a_schedule_that_follows_a_metric_changes_the_tensor_in_place(make):
    pytest.importorskip("transformers")
    optimizer, rate = tensor_rate()
    scheduler = make(optimizer, patience=0, factor=0.5)
    assert needs_metric(scheduler)

    for metric in (1.0, 2.0, 3.0):
        scheduler.step(metric)

    assert optimizer.param_groups[0]["lr"] is rate
    assert 0 < float(rate) < 0.5


def test_a_greedy_schedule_goes_on_with_the_same_tensor_and_numbers():
    pytest.importorskip("transformers")
    old, _ = tensor_rate()
    before = greedy(old, patience=0, factor=0.5)
    for metric in (1.0, 2.0, 3.0):
        before.step(metric)
    optimizer, rate = tensor_rate()
    scheduler = greedy(optimizer, patience=0, factor=0.5)

    saved = before.state_dict()
    scheduler.load_state_dict(saved)

    assert all(isinstance(one, float) for one in (*saved["_last_lr"], *saved["_init_lrs"]))
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == float(old.param_groups[0]["lr"])


def test_a_schedule_of_another_length_keeps_the_tensor():
    optimizer, rate = tensor_rate()
    short = LambdaLR(optimizer, lambda step: 1 - step / 4)
    optimizer.step()
    short.step()
    long = LambdaLR(optimizer, lambda step: 1 - step / 8)

    continue_schedule(short, long, optimizer)

    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.5 * 7 / 8)


@pytest.mark.parametrize(
    ("name", "options"), [("polynomial", {}), ("cosine_with_min_lr", {"min_lr": 0.01})]
)
def test_floor_of_given_optimizer_equals_transformers(name, options):
    from transformers import get_scheduler as theirs_of

    args = TrainingArguments(
        lr_scheduler_type=name, lr_scheduler_kwargs=options, learning_rate=0.001
    )
    ours, theirs = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.05) for _ in range(2))
    schedules = (
        create_scheduler(args, ours, 5),
        theirs_of(name, theirs, 0, 5, scheduler_specific_kwargs=options),
    )
    for _ in range(5):
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
