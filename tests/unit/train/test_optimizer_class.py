"""The class and the options of an optimizer, asked for or overridden by a script."""

from __future__ import annotations

import pytest
import torch

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError
from tests.unit.train.fakes import equal
from tests.unit.train.models import Net, make_trainer


def test_a_script_makes_the_optimizer_that_the_trainer_would_make(tmp_path, repository):
    args = TrainingArguments(optim="sgd", optim_args="momentum=0.9", learning_rate=0.25)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    assert (kind, options["lr"], options["momentum"]) == (torch.optim.SGD, 0.25, 0.9)
    assert "params" not in options
    kind, options = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(adam_beta2=0.9))
    assert (kind, options["betas"]) == (torch.optim.AdamW, (0.9, 0.9))


def test_what_treats_modules_differently_has_its_groups_or_asks_for_the_model():
    args, model = TrainingArguments(optim="muon"), Net()
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = kind(**options)
    assert sum(len(one["params"]) for one in optimizer.param_groups) == len([*model.parameters()])
    with pytest.raises(ConfigError, match="no model was passed") as refused:
        Trainer.get_optimizer_cls_and_kwargs(args)
    assert "get_optimizer_cls_and_kwargs(args, model)" in refused.value.hint


class Heavier(Trainer):
    """Changes one option of what the arguments say, as scripts of the field do."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        _, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return torch.optim.SGD, {"lr": options["lr"] * 2, "momentum": 0.5}


class OwnGroups(Trainer):
    def get_optimizer_cls_and_kwargs(self, args, model=None):
        return torch.optim.SGD, {"params": [model.layers[0].weight], "lr": 0.1}


class WrongOption(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.SGD, {"lr": -1.0}


def test_an_override_is_obeyed(tmp_path, repository):
    trainer = make_trainer(tmp_path, kind=Heavier, max_steps=2, lr_scheduler_type="constant")
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert [one["lr"] for one in trainer.optimizer.param_groups] == [0.1, 0.1]
    assert trainer.optimizer.defaults["momentum"] == 0.5


def test_an_override_may_give_groups_of_its_own(tmp_path, repository):
    trainer = make_trainer(tmp_path, kind=OwnGroups)
    ((only,),) = (one["params"] for one in trainer.create_optimizer().param_groups)
    assert only is trainer.model.layers[0].weight
    assert equal(trainer.create_optimizer().state_dict(), trainer.optimizer.state_dict())


def test_an_option_that_does_not_fit_is_refused(tmp_path, repository):
    with pytest.raises(ConfigError, match="the options of `SGD` do not fit: Invalid learning rate"):
        make_trainer(tmp_path, kind=WrongOption).create_optimizer()
