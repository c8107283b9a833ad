"""Training after ``ckpt rollback`` equals, bit for bit, that of a run that never went further."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.rollback import apply_rollback, plan_rollback, plan_undo
from resilient.clock import SystemClock
from resilient.errors import Fenced
from resilient.storage.open import open_store

CLOCK = SystemClock()


class Slopes(Dataset):
    """Samples whose target is a multiple of the mean of their inputs."""

    def __init__(self, slope):
        self.x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        self.slope = slope

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.slope * self.x[index].mean()}


class Fit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x, y):
        return {"loss": (self.layers(x).squeeze(-1) - y).square().mean()}


def train(folder, steps, slope=1.0, **options):
    """Train to ``steps``, from whatever resume takes; return the trainer."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=4,
        logging_steps=4,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        seed=7,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = Trainer(Fit(), arguments, train_dataset=Slopes(slope))
    trainer.train()
    return trainer


def state_of(trainer):
    """Return all that a next step depends on."""
    optimizer = trainer.optimizer.state_dict()["state"]
    moments = {
        f"{key}.{slot}": value
        for key, slots in optimizer.items()
        for slot, value in slots.items()
        if torch.is_tensor(value)
    }
    return {**trainer.model.state_dict(), **moments}


def losses(trainer):
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def go_back(folder, ref):
    store = open_store(str(folder))
    apply_rollback(store, plan_rollback(store, resolve(store, ref)), CLOCK)


def test_after_going_back_training_is_that_of_a_run_that_never_went_further(tmp_path):
    never, went = tmp_path / "never", tmp_path / "went"
    for folder in (never, went):
        train(folder, 8)
    # Further, on other data, to other weights, over two checkpoints and the end of an epoch.
    further = train(went, 18, slope=-9.0)
    go_back(went, "step:8")
    expected = train(never, 20)
    back = train(went, 20)
    assert back.state.global_step == 20
    assert_same(state_of(back), state_of(expected))
    assert losses(back) == losses(expected)
    # And what was left is there, whole: undo goes on from it, to the bit.
    store = open_store(str(went))
    apply_rollback(store, plan_undo(store), CLOCK)
    assert lineage(store).candidates[0].step == 18
    again = train(went, 18, slope=-9.0)
    assert_same(state_of(again), state_of(further))


def test_without_going_back_the_other_data_would_be_in_the_weights(tmp_path):
    """What the test above compares is not the same anyway."""
    train(tmp_path / "never", 8)
    train(tmp_path / "went", 8)
    train(tmp_path / "went", 18, slope=-9.0)
    expected, went = train(tmp_path / "never", 20), train(tmp_path / "went", 20)
    one, other = state_of(expected), state_of(went)
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


def test_a_run_that_trains_on_is_fenced_at_its_next_save(tmp_path):
    class GoesBack(TrainerCallback):
        """The person at the other terminal, when step 8 is saved and step 12 may be."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 14:
                go_back(tmp_path, "step:4")

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=40,
        save_steps=4,
        seed=7,
        disable_tqdm=True,
        use_cpu=True,
    )
    with pytest.raises(Fenced, match="generation 2"):
        Trainer(Fit(), arguments, train_dataset=Slopes(1.0), callbacks=[GoesBack()]).train()
    store = open_store(str(tmp_path))
    found = lineage(store)
    assert found.candidates[0].folder == "checkpoint-4-g1"
    assert {one.step for one in found.abandoned} in ({8}, {12, 8})
