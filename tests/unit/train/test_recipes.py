"""Schedules, decay groups, data order and losses against Transformers and accelerate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.data.collate import default_data_collator
from resilient.train.data.ordering import epoch_order
from resilient.train.optimizers import create_optimizer, decay_parameter_names
from resilient.train.schedules import SCHEDULES, create_scheduler
from tests.unit.train.models import Net

transformers = pytest.importorskip("transformers")


SHAPES = {
    "linear": {},
    "cosine": {"num_cycles": 1.3},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "cosine_with_min_lr": {"min_lr": 0.01},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1},
    "polynomial": {"lr_end": 0.02, "power": 1.7},
    "inverse_sqrt": {"timescale": 9},
    "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"},
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("warmup", [0, 7, 0.3])
@pytest.mark.parametrize("with_options", [True, False])
def test_schedules_equal_those_of_transformers(kind, warmup, with_options):
    needed = {
        key: SHAPES[kind][key]
        for key in ("min_lr", "min_lr_rate", "num_decay_steps")
        if key in SHAPES[kind]
    }
    options = SHAPES[kind] if with_options else needed

    def rates(make):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = make(optimizer)
        for _ in range(25):
            optimizer.step()
            yield optimizer.param_groups[0]["lr"]
            scheduler.step()

    args = TrainingArguments(
        learning_rate=0.5, lr_scheduler_type=kind, warmup_steps=warmup, lr_scheduler_kwargs=options
    )
    theirs = transformers.get_scheduler
    steps = 6 if warmup == 0.3 else warmup
    assert list(rates(lambda optimizer: create_scheduler(args, optimizer, 20))) == list(
        rates(lambda optimizer: theirs(kind, optimizer, steps, 20, options))
    )


def test_every_schedule_of_transformers_is_ours():
    theirs = {one.value for one in transformers.SchedulerType}
    assert theirs == set(SCHEDULES)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("cosine", {"num_cycle": 1}, "did you mean `num_cycles`"),
        ("linear", {"power": 2}, "it has none"),
        ("warmup_stable_decay", {}, "needs `num_decay_steps`"),
        ("polynomial", {"lr_end": 1.0}, "must be below"),
        ("cosine_with_min_lr", {}, "needs a floor"),
        ("cosine_with_min_lr", {"min_lr": 1, "min_lr_rate": 1}, "use one of them"),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "sqrt"}, "is none of"),
    ],
)
def test_options_that_a_schedule_does_not_have_are_refused(kind, options, said):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    args = TrainingArguments(lr_scheduler_type=kind, lr_scheduler_kwargs=options)
    with pytest.raises(ConfigError, match=said):
        create_scheduler(args, optimizer, 20)


def test_the_state_of_a_schedule_needs_no_pickle():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    state = create_scheduler(TrainingArguments(), optimizer, 20).state_dict()
    assert state["lr_lambdas"] == [None]


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.ln = nn.LayerNorm(2)
        self.final_norm = nn.RMSNorm(2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))])
        self.norm = nn.BatchNorm1d(2)
        self.normal = nn.Linear(2, 2)


def test_decay_groups_equal_those_of_transformers(tmp_path):
    model = Norms()
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    )
    assert sorted(decay_parameter_names(model)) == sorted(trainer.get_decay_parameter_names(model))


def test_every_trainable_parameter_is_in_one_group():
    model = Net()
    model.layers[0].bias.requires_grad_(False)
    optimizer = create_optimizer(TrainingArguments(weight_decay=0.1), model)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in held} == {id(one) for one in model.parameters() if one.requires_grad}
    assert len(held) == len({id(one) for one in held})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_the_order_of_samples_equals_accelerates():
    sampler = pytest.importorskip("accelerate.data_loader").SeedableRandomSampler(
        range(31), generator=torch.Generator(), data_seed=42
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(sampler) == epoch_order(31, 42, epoch).tolist()


@pytest.mark.parametrize(
    "features",
    [
        [{"x": torch.ones(2), "label": 1, "text": "a", "none": None}] * 3,
        [{"x": [1, 2], "label_ids": [0.5, 1.0]}] * 2,
        [{"x": [1.0, 2.0], "label": 0.5}] * 2,
    ],
)
def test_batches_equal_those_of_transformers(features):
    ours, theirs = default_data_collator(features), transformers.default_data_collator(features)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)
        assert ours[name].dtype == value.dtype


def test_losses_equal_a_bare_loop_bit_for_bit(tmp_path, repository):
    """The last group of an epoch is short: 50 samples are 13 micro-batches, 4 steps of 3 and 1."""
    from resilient.train.run import set_seed
    from tests.unit.train.models import Noisy, make_trainer

    options = {"gradient_accumulation_steps": 3, "logging_steps": 1, "num_train_epochs": 1}
    trainer = make_trainer(tmp_path, **options)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model, data = Net(), Noisy(50)
    set_seed(42)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 5 - step) / 5)
    order = epoch_order(50, 42, 0).tolist()
    losses = []
    for first in range(0, 13, 3):
        group = [order[at * 4 : at * 4 + 4] for at in range(first, min(first + 3, 13))]
        total = 0.0
        for indices in group:
            batch = default_data_collator([data[index] for index in indices])
            loss = model(**batch)["loss"] / len(group)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    assert logged == losses
    assert trainer.state.global_step == 5
