"""A schedule that DeepSpeed's config names has DeepSpeed's rates, also after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from resilient import TrainingArguments
from resilient.checkpoint.catalog import committed
from resilient.errors import ConfigError
from resilient.storage.open import open_store
from resilient.train import schedules
from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks
from tests.process.deepspeed_schedule_worker import LIVES, STEPS

theirs = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="DeepSpeed is not installed")
WORKER = Path(__file__).with_name("deepspeed_schedule_worker.py")
pytestmark = [
    pytest.mark.xdist_group("deepspeed_schedules"),
    pytest.mark.timeout(480),  # DeepSpeed is imported, and fifteen worlds run, in one setup
]
RATE = 3e-4


def optimizer_of(rate=RATE):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)]
    return torch.optim.SGD(groups, lr=rate)


def ours(block, total, **arguments):
    args = TrainingArguments(
        deepspeed={"scheduler": block}, learning_rate=RATE, use_cpu=True, **arguments
    )
    optimizer = optimizer_of()
    return args, optimizer, schedules.create_scheduler(args, optimizer, total)


def rates_of(optimizer, scheduler, steps):
    """The rates of updates: a schedule steps after each, as an engine does and as our loop does."""
    rates = []
    for _ in range(steps):
        optimizer.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "low"), [(1, 0.0), (2, 1e-5), (7, 2e-4), (40, 0.0)])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_rates_equal_deepspeeds_to_the_bit(name, warmup, low, kind):
    total = 25
    more = {"total_num_steps": total} if name == "WarmupDecayLR" else {}
    params = {"warmup_min_lr": low, "warmup_num_steps": warmup, "warmup_type": kind, **more}
    optimizer = optimizer_of()
    peer = getattr(theirs, name)(optimizer, warmup_max_lr=RATE, **params)
    expected = rates_of(optimizer, peer, total + 5)
    block = {"type": name, "params": {**params, "warmup_max_lr": "auto"}}
    _, optimizer, scheduler = ours(block, total, max_steps=total)
    assert rates_of(optimizer, scheduler, total + 5) == expected
    assert len({rates[0] for rates in expected}) > 1, "a curve"


def test_what_a_block_leaves_out_is_the_runs_or_deepspeeds():
    _, optimizer, scheduler = ours({"type": "WarmupLR"}, 50)
    optimizer_of_peer = optimizer_of()
    peer = theirs.WarmupLR(optimizer_of_peer)
    assert rates_of(optimizer, scheduler, 50) == rates_of(optimizer_of_peer, peer, 50)
    _, optimizer, scheduler = ours({"type": "WarmupDecayLR"}, 50, warmup_steps=0.1)
    peer = theirs.WarmupDecayLR(optimizer_of_peer, 50, warmup_max_lr=RATE, warmup_num_steps=5)
    assert rates_of(optimizer, scheduler, 50) == rates_of(optimizer_of_peer, peer, 50)


def test_a_stretched_run_goes_on_at_the_rate_that_its_new_length_has():
    block = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    _, optimizer, short = ours(block, 10, warmup_steps=4)
    rates_of(optimizer, short, 8)
    args, longer = ours(block, 20, warmup_steps=4)[0], optimizer_of()
    expected = rates_of(longer, schedules.create_scheduler(args, longer, 20), 9)[-1]
    schedules.continue_schedule(short, schedules.create_scheduler(args, optimizer, 20), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == expected


@pytest.mark.parametrize(
    ("params", "arguments", "says"),
    [
        ({"warmup_num_steps": 0}, {}, "warmup_num_steps=0"),
        ({"warmup_num_steps": 9}, {"warmup_steps": 0.1}, "not that of `warmup_steps` \\(5\\)"),
        ({"warmup_num_steps": "auto"}, {}, "'auto' where warmup_steps=0"),
        ({}, {"lr_scheduler_type": "cosine"}, "where lr_scheduler_type='cosine'"),
    ],
)
def test_lengths_that_contradict_are_refused(params, arguments, says):
    with pytest.raises(ConfigError, match=says):
        ours({"type": "WarmupLR", "params": params}, 50, **arguments)


def test_a_schedule_of_ones_own_beside_the_configs_is_refused():
    args, optimizer, scheduler = ours({"type": "WarmupLR"}, 50)
    schedules.require_own(args, scheduler)
    with pytest.raises(ConfigError, match=r"names the schedule 'WarmupLR'.* was given `StepLR`"):
        schedules.require_own(args, torch.optim.lr_scheduler.StepLR(optimizer, 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_forks(WORKER, folder, len(LIVES))
    return folder


def test_a_run_has_the_rates_of_an_engine_whose_schedule_is_its_own(runs):
    expected = json.loads((runs / "engine" / "rates").read_text())
    newest = committed(open_store(str(runs / "unbroken")))[0]
    state = json.loads((runs / "unbroken" / str(newest) / "trainer_state.json").read_text())
    logged = [one["learning_rate"] for one in state["log_history"] if "learning_rate" in one]
    assert logged == expected
    assert len(logged) == STEPS
    assert logged[3] == pytest.approx(0.001 + 0.009 * math.log(3) / math.log(4))


def test_a_run_that_was_killed_in_its_decay_equals_an_unbroken_one(runs):
    assert committed(open_store(str(runs / "killed")))[0].generation == 2, "it did die"
    assert differences(ending(runs / "killed"), ending(runs / "unbroken")) == []
