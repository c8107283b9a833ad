"""``parallelism="auto"``: what is looked at, and that what is chosen is told and done."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train import strategy_selection
from resilient.train.arguments import TrainingArguments
from resilient.train.strategy_selection import model_facts
from tests.unit.train.models import make_trainer


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({}, 16.0),
        ({"optim": "sgd"}, 12.0),
        ({"optim": "adamw_torch_8bit"}, 10.0),
        ({"optim": "adafactor"}, 8.0),
        ({"optim": "lion"}, 12.0),
        ({"optim": "galore_adamw", "optim_target_modules": "all-linear"}, 10.0),
    ],
)
def test_an_optimizer_counts_by_what_it_keeps(options, bytes_each):
    facts = model_facts(TrainingArguments(**options), Layers())
    assert facts.number_bytes == pytest.approx(bytes_each, abs=0.2)
    assert (facts.numbers, facts.layers, facts.largest_layer_parameters) == (88, 3, 16)


def test_frozen_weights_need_no_gradient_and_half_ones_half_the_room():
    model = Layers().to(torch.bfloat16)
    model.embed.requires_grad_(False)
    facts = model_facts(TrainingArguments(), model)
    assert facts.number_bytes == pytest.approx((88 * 2 + 48 * (2 + 8)) / 88)
    assert facts.weight_bytes == 2


def test_what_goes_between_layers_is_known_of_models_that_say_their_width():
    class Config:
        hidden_size, max_position_embeddings = 8, 16

    model = Layers()
    assert model_facts(TrainingArguments(), model).activation_bytes == 0
    model.config = Config()
    args = TrainingArguments(per_device_train_batch_size=2, bf16=True)
    assert model_facts(args, model).activation_bytes == 2 * 16 * 8 * 2


def test_what_is_chosen_is_told_and_trained(tmp_path, repository):
    trainer = make_trainer(tmp_path, parallelism="auto", max_steps=2)
    assert trainer.args.parallelism == "ddp"
    lines = (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()
    told = [one for one in map(json.loads, lines) if one["event"] == "ParallelismChosen"]
    assert len(told) == 1
    assert told[0]["arguments"] == {"parallelism": "ddp"}
    assert "it fits on each rank" in told[0]["reasons"][-1]
    assert trainer.train().global_step == 2


def test_a_model_that_fits_nowhere_is_refused_before_it_is_trained(
    tmp_path, repository, monkeypatch
):
    monkeypatch.setattr(strategy_selection, "_memory_bytes", lambda *_: 100)
    with pytest.raises(ConfigError, match=r"does not fit: .* and there are 1"):
        make_trainer(tmp_path, parallelism="auto", max_steps=2)


def test_what_is_left_to_us_is_not_said_as_well():
    with pytest.raises(ConfigError, match="chooses it: omit one"):
        TrainingArguments(parallelism="auto", parallelism_config={"tp_size": 2})
    with pytest.raises(ConfigError, match="`fsdp` is given and `parallelism`='auto'"):
        TrainingArguments(parallelism="auto", fsdp=True)
