"""Tokens and floating-point operations: counted over all micro-batches, ranks and lives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.meters import TokenCount, UsageCounter, transformer_flos
from resilient.train.state import TrainerState
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import equal
from tests.unit.train.models import DieAfter, Dies
from tests.unit.train.test_resume import comparable
from tests.unit.train.token_models import LENGTH, Mean, Sentences

HUGE = 10**24 + 1


class Masked(Sentences):
    """Row i has i % 7 + 1 tokens; the others are padding."""

    def __getitem__(self, index):
        mask = (torch.arange(LENGTH) <= index % LENGTH).long()
        return {**super().__getitem__(index), "attention_mask": mask}


class Attending(Mean):
    """Takes the mask: what a forward does not take, is gone before it is counted."""

    def forward(self, input_ids, labels=None, attention_mask=None):
        return super().forward(input_ids, labels)


class Sized(Mean):
    def num_parameters(self, only_trainable=False, exclude_embeddings=False):
        assert exclude_embeddings
        return 77


class Vast(Trainer):
    def floating_point_ops(self, inputs):
        return HUGE


class Watch(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, /, **_):
        self.seen.append(state.num_input_tokens_seen)


def trainer_of(folder, *, model=None, kind=Trainer, callbacks=(), **options):
    options = {"max_steps": 6, "logging_steps": 2, "save_steps": 2, **options}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, disable_tqdm=True, **options
    )
    return kind(model or Mean(), args, train_dataset=Masked(), callbacks=callbacks)


def test_tokens_are_counted_at_every_step_and_logged(tmp_path, repository):
    watch = Watch()
    trainer = trainer_of(
        tmp_path,
        include_num_input_tokens_seen=True,
        gradient_accumulation_steps=2,
        callbacks=[watch],
    )
    output = trainer.train()
    each = 2 * 2 * LENGTH
    assert watch.seen == [each * step for step in range(1, 7)]
    logged = [one["num_input_tokens_seen"] for one in trainer.state.log_history if "loss" in one]
    assert logged == [each * 2, each * 4, each * 6]
    assert output.metrics["train_tokens_per_second"] > 0


def test_padding_is_not_counted_if_asked_so(tmp_path, repository):
    trainer = trainer_of(
        tmp_path,
        model=Attending(),
        include_num_input_tokens_seen="non_padding",
        max_steps=-1,
        num_train_epochs=1,
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(row % LENGTH + 1 for row in range(20))


def test_nothing_is_counted_or_logged_unless_asked(tmp_path, repository):
    trainer = trainer_of(tmp_path)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 0
    assert "num_input_tokens_seen" not in trainer.state.log_history[0]


def count(model, batch, *, padding=None, skips=True):
    told = []
    counting = TokenCount(model, padding, told.append, skips_padding=skips)
    return counting(batch), counting(batch), len(told)


def test_what_says_which_tokens_are_padding():
    ids = torch.tensor([[5, 0, 0], [1, 2, 0]])
    assert count(Mean(), {"input_ids": ids}, padding=0) == (3, 3, 0)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert count(Mean(), {"input_ids": ids, "attention_mask": mask}, padding=0) == (5, 5, 0)
    assert count(Mean(), {"input_ids": ids}) == (6, 6, 1)
    assert count(Mean(), {"input_ids": ids}, skips=False) == (6, 6, 0)
    assert count(Mean(), {"pixels": ids}) == (0, 0, 1)
    model = Mean()
    model.main_input_name = "pixels"
    assert count(model, {"pixels": ids}, skips=False) == (6, 6, 0)
    assert count(model, ids) == (0, 0, 1)


def test_operations_are_those_of_transformers(tmp_path, repository):
    trainer = trainer_of(tmp_path, model=Sized())
    output = trainer.train()
    assert output.metrics["total_flos"] == trainer.state.total_flos == 6 * (6 * 2 * LENGTH * 77)
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 4, "n_head": 1, "vocab_size": 11}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    batch = {"input_ids": torch.zeros(3, 5, dtype=torch.int64)}
    parameters = model.num_parameters(exclude_embeddings=True)
    theirs = transformers.Trainer.floating_point_ops(SimpleNamespace(model=model), batch)
    assert transformer_flos(model, parameters, batch) == theirs


def test_counts_are_exact_and_resumed(tmp_path, repository):
    """An unbroken run tells its state at other moments than one that was stopped."""
    options = {"kind": Vast, "include_num_input_tokens_seen": "all"}
    whole = trainer_of(tmp_path, logging_steps=6, save_steps=6, **options)
    whole.train()
    unbroken = comparable(repository)
    repository.checkpoints.clear()
    for step in (3, 5):
        with pytest.raises(Dies):
            trainer_of(
                tmp_path, callbacks=[DieAfter(step)], logging_steps=6, save_steps=1, **options
            ).train()
    trainer_of(tmp_path, logging_steps=6, save_steps=6, **options).train()
    assert whole.state.total_flos == 6 * HUGE
    state = comparable(repository)[1]["trainer_state"]
    assert equal(state | {"save_steps": 6}, unbroken[1]["trainer_state"])


def test_a_counter_that_nobody_wants_is_off():
    state = TrainerState()
    counter = UsageCounter(state, torch.device("cpu"))
    assert not counter.is_on
    counter.settle()
    assert state == TrainerState()
