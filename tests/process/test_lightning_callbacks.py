"""Callbacks that change optimizer, flags or trainer while it trains: from every save, no change."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.errors import ConfigError
from resilient.format.keys import parse_checkpoint

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
lightning = pytest.importorskip("lightning.pytorch")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
ROWS = torch.rand(22, 3, generator=torch.Generator().manual_seed(5))


class Module(lightning.LightningModule):
    def __init__(self, *, trains_all=False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.head, self.trains_all = nn.Linear(4, 1), trains_all

    def training_step(self, batch, _):
        return (self.head(self.backbone(batch[0])).squeeze(1) - batch[0].sum(1)).square().mean()

    def configure_optimizers(self):
        trained = [one for one in self.parameters() if one.requires_grad or self.trains_all]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Unfreezes(lightning.Callback):
    """Thaws a layer once, and adds no group; its hook `on_fit_start` needs the loaded state."""

    def __init__(self):
        self.state, self.seen = {"epochs": 0}, []

    def setup(self, _trainer, module, stage):
        module.backbone.requires_grad_(False).eval()

    def on_fit_start(self, _trainer, _module):
        self.seen.append(self.state["epochs"])

    def on_train_epoch_start(self, trainer, module):
        self.state = {"epochs": trainer.current_epoch}
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(True).train()

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class AddsAgain(lightning.Callback):
    """Adds a group in the second epoch, and makes it again when a run is resumed."""

    added = False

    def add(self, trainer, module):
        trainer.optimizers[0].add_param_group(
            {"params": [*module.backbone.parameters()], "lr": 0.3}
        )
        self.added = True

    def setup(self, _trainer, module, stage):
        module.backbone.requires_grad_(False)

    def on_fit_start(self, trainer, module):
        if self.added:
            self.add(trainer, module)
        module.backbone.requires_grad_(self.added)

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.add(trainer, module)
            module.backbone.requires_grad_(True)

    def state_dict(self):
        return {"added": self.added}

    def load_state_dict(self, state):
        self.added = state["added"]


class Accumulates(lightning.Callback):
    """Changes the factor once, and never again."""

    def on_train_epoch_start(self, trainer, _module):
        if trainer.current_epoch == 1:
            trainer.accumulate_grad_batches = 2


def trained(folder, make, *, trains_all=False, **options):
    from resilient.integrations.lightning import ResilientCheckpoint

    torch.manual_seed(1)
    module, callback = Module(trains_all=trains_all), make()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, ResilientCheckpoint(folder, every_n_steps=1)],
        **{"max_epochs": 3, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(ROWS), 4, shuffle=True))
    weights = [one.detach().numpy().tobytes() for one in module.state_dict().values()]
    groups = [(group["lr"], len(group["params"])) for group in trainer.optimizers[0].param_groups]
    return weights, groups, trainer.global_step


CALLBACKS = {
    "finetuning": (lambda: callbacks.BackboneFinetuning(1, train_bn=False), {}),
    "unfreezing": (Unfreezes, {"trains_all": True}),
    "adding": (AddsAgain, {}),
    "scheduled accumulation": (
        lambda: callbacks.GradientAccumulationScheduler({1: 2, 2: 3}), {"trains_all": True},
    ),
    "own accumulation": (Accumulates, {"trains_all": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLBACKS)
def test_lightning_callback_resumed_from_each_save_ends_the_same(tmp_path, name):
    make, options = CALLBACKS[name]
    whole = tmp_path / "whole"
    expected = trained(whole, make, **options)
    steps = sorted(parse_checkpoint(one.name).step for one in whole.glob("checkpoint-*"))
    assert len(steps) >= 10
    # From the middle of each epoch, and from its end.
    for step in [steps[1], *steps[5:-1:2]]:
        part = tmp_path / f"from-{step}"
        shutil.copytree(whole, part)
        for later in steps[steps.index(step) + 1 :]:
            shutil.rmtree(part / f"checkpoint-{later}-g1")
        assert trained(part, make, **options) == expected, f"from step {step}"


def test_lightning_callback_state_is_loaded_before_on_fit_start(tmp_path):
    made = [Unfreezes(), Unfreezes()]
    for callback, epochs in zip(made, (2, 3), strict=True):
        trained(tmp_path, lambda one=callback: one, trains_all=True, max_epochs=epochs)
    assert [one.seen for one in made] == [[0], [1]]


def test_lightning_timer_that_has_run_out_trains_no_step(tmp_path):
    def timer():
        return callbacks.Timer(duration={"seconds": seconds}, verbose=False)

    seconds = 600
    assert trained(tmp_path, timer, max_epochs=1)[-1] == 6
    seconds = 0
    assert trained(tmp_path, timer, max_epochs=2)[-1] == 6


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: callbacks.StochasticWeightAveraging(0.1), "StochasticWeightAveraging"),
        (lambda: callbacks.ModelPruning("l1_unstructured", amount=0.3), "ModelPruning"),
    ],
    ids=["averaging", "pruning"],
)
def test_lightning_callback_without_exact_resume_is_refused(tmp_path, make, name):
    with pytest.raises(ConfigError, match=f"a run with {name} cannot be resumed exactly"):
        trained(tmp_path, make)
    assert not list(tmp_path.iterdir())
