"""The judge decides on the checkpoint that ``Trainer.fit(ckpt_path=...)`` names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from resilient.diff.verification import verify_folder
from resilient.errors import IncompatibleCheckpoint, IntegrityError

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
lightning = pytest.importorskip("lightning.pytorch")
ROWS = torch.arange(24.0).reshape(8, 3) / 24


class Own:
    """A schedule of a script, with a state that torch does not know."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def chained(optimizer):
    made = [schedules.StepLR(optimizer, 3), schedules.ExponentialLR(optimizer, 0.9)]
    return schedules.ChainedScheduler(made, optimizer)


def cosine(optimizer):
    return schedules.CosineAnnealingLR(optimizer, 9)


class Module(lightning.LightningModule):
    def __init__(self, empty_group=False, schedule=None, buffer=None) -> None:
        super().__init__()
        self.layer, self.empty_group, self.schedule = nn.Linear(3, 1), empty_group, schedule
        if buffer == "own":
            self.register_buffer("seen", torch.full((5,), torch.nan))
        if buffer == "batch norm":
            self.norm = nn.BatchNorm1d(3)
            self.norm.running_var.fill_(torch.nan)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        groups = [{"params": self.layer.parameters()}]
        empty = [{"params": []}] if self.empty_group else []
        optimizer = torch.optim.AdamW([*groups, *empty], lr=0.1)
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler, _):
        scheduler.step()


def fit(epochs, callback, path=None, **how):
    torch.manual_seed(1)
    module = Module(**how)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], max_epochs=epochs,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(ROWS), 2)
    trainer.fit(module, loader, ckpt_path=path, weights_only=False)
    return trainer, module


def ours(folder):
    from resilient.integrations.lightning import ResilientCheckpoint

    return ResilientCheckpoint(folder)


@pytest.fixture
def theirs(tmp_path):
    return saved(tmp_path)


def saved(folder, **how):
    from lightning.pytorch.callbacks import ModelCheckpoint

    fit(1, ModelCheckpoint(folder / "theirs", save_last=True), **how)
    return folder / "theirs" / "last.ckpt"


def with_nan(path):
    held = torch.load(path, weights_only=False)
    held["state_dict"]["layer.weight"][0, 0] = float("nan")
    torch.save(held, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-400])


@pytest.mark.smoke
@pytest.mark.parametrize("damage", [with_nan, cut], ids=lambda one: one.__name__)
def test_damaged_checkpoint_path_is_refused_before_it_is_loaded(tmp_path, theirs, damage):
    damage(theirs)
    with pytest.raises(IntegrityError, match="Nothing was loaded") as caught:
        fit(2, ours(tmp_path / "run"), str(theirs))
    assert caught.value.hint == f"resilient ckpt verify {theirs}"
    assert list((tmp_path / "run").glob("checkpoint-*")) == []


def test_damaged_checkpoint_path_is_passed_over_once_the_repository_has_more(tmp_path, theirs):
    fit(2, ours(tmp_path / "run"), str(theirs))
    cut(theirs)
    trainer, _ = fit(3, ours(tmp_path / "run"), str(theirs))
    assert trainer.global_step == 12


def test_loss_of_a_checkpoint_path_is_reported_and_strict_resume_refuses(
    tmp_path, theirs, capfd, monkeypatch
):
    trainer, _ = fit(2, ours(tmp_path / "run"), str(theirs))
    assert trainer.global_step == 8
    assert f"training continues from `{theirs}` with loss of " in capfd.readouterr().err
    monkeypatch.setenv("RESILIENT_STRICT_RESUME", "1")
    with pytest.raises(IncompatibleCheckpoint, match="strict_resume refuses"):
        fit(2, ours(tmp_path / "strict"), str(theirs))
    assert list((tmp_path / "strict").glob("checkpoint-*")) == []


def test_empty_parameter_group_is_resumed_by_lightning(tmp_path):
    fit(1, ours(tmp_path / "parts"), empty_group=True)
    trainer, parts = fit(2, ours(tmp_path / "parts"), empty_group=True)
    _, whole = fit(2, ours(tmp_path / "whole"), empty_group=True)
    assert trainer.global_step == 8
    assert torch.equal(parts.layer.weight, whole.layer.weight)


@pytest.mark.parametrize(
    "how",
    [{"schedule": chained}, {"schedule": Own}, {"buffer": "own"}, {"buffer": "batch norm"}],
    ids=["chained schedules", "own schedule", "own buffer", "batch norm"],
)
def test_checkpoint_that_lightning_resumes_exactly_is_taken(tmp_path, how):
    path = saved(tmp_path, **how)
    trainer, parts = fit(2, ours(tmp_path / "parts"), str(path), **how)
    _, whole = fit(2, ours(tmp_path / "whole"), **how)
    assert trainer.global_step == 8
    assert torch.equal(parts.layer.weight, whole.layer.weight)
    # Without the model no name tells a buffer of a script from a parameter.
    answer = "no" if how == {"buffer": "own"} else "partly"
    assert verify_folder(str(path)).verdict.answer == answer


@pytest.mark.parametrize(
    ("state", "lost", "answer"),
    [
        ({}, True, "partly"),
        ({"base_lrs": [0.1], "_last_lr": [0.05]}, True, "partly"),
        ({"_last_lr": [0.05]}, False, "no"),
        (None, False, "no"),
        ([1], False, "no"),
        ({"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}, False, "no"),
    ],
)
def test_schedule_state_of_checkpoint_path_is_judged(tmp_path, state, lost, answer):
    path = saved(tmp_path, schedule=cosine)
    held = torch.load(path, weights_only=False)
    held["lr_schedulers"] = [state]
    torch.save(held, path)
    verdict = verify_folder(str(path)).verdict
    assert verdict.answer == answer
    assert ("the schedule" in verdict.lost) is lost
