"""The judge decides on the checkpoint that ``Trainer.fit(ckpt_path=...)`` names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.errors import IncompatibleCheckpoint, IntegrityError

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
lightning = pytest.importorskip("lightning.pytorch")
ROWS = torch.arange(24.0).reshape(8, 3) / 24


class Module(lightning.LightningModule):
    def __init__(self, empty_group=False) -> None:
        super().__init__()
        self.layer, self.empty_group = nn.Linear(3, 1), empty_group

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        groups = [{"params": self.layer.parameters()}]
        return torch.optim.AdamW([*groups, *([{"params": []}] if self.empty_group else [])], lr=0.1)


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
    from lightning.pytorch.callbacks import ModelCheckpoint

    fit(1, ModelCheckpoint(tmp_path / "theirs", save_last=True))
    return tmp_path / "theirs" / "last.ckpt"


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
