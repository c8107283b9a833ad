"""A Trainer resumed with other objects than those that saved: reported, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError, IncompatibleCheckpoint
from tests.unit.train.models import Net, Noisy


class Count:
    def __init__(self, value=0) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def trainer(  # noqa: PLR0913 - the axes of the test
    folder, *, steps, schedule=None, rate=0.05, dtype=None, own=None, changes=None
):
    model = Net() if dtype is None else Net().to(dtype)
    optimizers = (None, None)
    if schedule is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        optimizers = (optimizer, schedule(optimizer))
    made = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            max_steps=steps,
            save_steps=4,
            disable_tqdm=True,
            resume_changes=changes,
        ),
        train_dataset=Noisy(50),
        optimizers=optimizers,
    )
    if own is not None:
        made.register("own", own)
    return made


def step_lr(optimizer):
    return lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 4)


def test_scheduler_of_another_class_refused(tmp_path):
    trainer(tmp_path, steps=4, schedule=step_lr).train()
    with pytest.raises(IncompatibleCheckpoint, match="CosineAnnealingLR") as found:
        trainer(tmp_path, steps=8, schedule=cosine).train()
    assert 'TrainingArguments(resume_changes=["part:scheduler"])' in found.value.hint
    allowed = trainer(tmp_path, steps=8, schedule=cosine, changes=["part:scheduler"])
    allowed.train()
    assert allowed.lr_scheduler.last_epoch == 4


def test_options_of_a_given_optimizer_reported(tmp_path, capsys):
    trainer(tmp_path, steps=4, schedule=step_lr).train()
    capsys.readouterr()
    trainer(tmp_path, steps=4, schedule=step_lr, rate=0.5).train()
    said = capsys.readouterr().err
    assert (
        "optimizer: lr 0.05 -> 0.5, initial_lr 0.05 -> 0.5: the values of the checkpoint are used"
        in said
    )


def test_registered_part_forgotten_refused(tmp_path):
    trainer(tmp_path, steps=4, own=Count(3)).train()
    with pytest.raises(IncompatibleCheckpoint, match="`own`: saved, but not passed") as found:
        trainer(tmp_path, steps=8).train()
    assert "trainer.register(name, thing)" in found.value.hint
    trainer(tmp_path, steps=8, changes="part:own").train()


def test_model_of_a_narrower_dtype_refused(tmp_path):
    trainer(tmp_path, steps=4).train()
    with pytest.raises(IncompatibleCheckpoint, match=r"torch\.float32 -> torch\.bfloat16"):
        trainer(tmp_path, steps=8, dtype=torch.bfloat16).train()


def test_unknown_name_in_resume_changes_names_the_prefix(tmp_path):
    with pytest.raises(ConfigError, match="part:NAME"):
        trainer(tmp_path, steps=1, changes=["scheduler"])
