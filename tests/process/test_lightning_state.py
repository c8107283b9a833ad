"""State that Lightning keeps through its hooks: from every checkpoint the run ends the same."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.errors import ConfigError, UnsavableState
from resilient.format.keys import parse_checkpoint

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
lightning = pytest.importorskip("lightning.pytorch")
ROWS = torch.rand(22, 3, generator=torch.Generator().manual_seed(5))


class Module(lightning.LightningModule):
    """Counts in its hooks, logs means of epochs, and lowers its rate by them."""

    def __init__(self, schedule="epoch_plateau", draws=False) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.seen = MeanMetric()
        self.schedule, self.draws = schedule, draws
        self.record = []

    def loss(self, batch):
        return (self.net(batch[0]).sum(1) - batch[0].sum(1)).square().mean()

    def on_train_start(self):
        if self.draws:
            torch.rand(3)

    def on_train_epoch_start(self):
        if self.draws:
            torch.rand(self.current_epoch + 1)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.seen.update(loss.detach())
        self.log("train", loss, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.record.append(("batch", batch[0][0, 0].item()))
        return loss

    def on_train_epoch_end(self):
        self.record.append(("epoch", self.trainer.callback_metrics["train"].item()))
        self.record.append(("seen", self.seen.compute().item()))

    def validation_step(self, batch, _):
        self.log("val", self.loss(batch))

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.record.append(("validated", self.trainer.global_step))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["record"] = {"list": self.record, "odd": {1: (2, {3})}}
        # The averaging callback has put its average into the place of the weights.
        now = checkpoint.get("current_model_state", checkpoint["state_dict"])
        checkpoint["twin"] = {name: one for name, one in now.items() if "num_batches" not in name}
        checkpoint["sum"] = self.net[0].weight.sum().item()

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["record"]["odd"] == {1: (2, {3})}
        weight = checkpoint["twin"]["net.0.weight"]
        assert weight.sum().item() == checkpoint["sum"]
        weight.zero_()  # memory of its own, as if read from a file
        self.record = checkpoint["record"]["list"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        kinds = torch.optim.lr_scheduler
        if self.schedule == "one_cycle":
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [
                {"scheduler": kinds.OneCycleLR(optimizer, 0.1, steps), "interval": "step"}
            ]
        interval, _, _ = self.schedule.partition("_")
        monitor = {"epoch": "train", "step": "val"}[interval]
        plateau = kinds.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        how = {"scheduler": plateau, "monitor": monitor, "interval": interval, "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": how | {"strict": interval == "epoch"}}

    def lr_scheduler_step(self, scheduler, metric):
        if metric is not None:
            self.record.append(("plateau", self.trainer.global_step, float(metric)))
        super().lr_scheduler_step(scheduler, metric)


class Counter(lightning.Callback):
    """Keeps a number in the checkpoint's own namespace."""

    count = 0

    def on_train_batch_end(self, *_):
        self.count += 1

    def on_save_checkpoint(self, _trainer, _module, checkpoint):
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, _trainer, _module, checkpoint):
        self.count = checkpoint["count"]


class StatefulLoader:
    """A loader that knows its place, and shuffles by its own counter."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __len__(self):
        return 6

    def __iter__(self):
        if self.at == 6:
            self.epoch, self.at = self.epoch + 1, 0
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < 6:
            self.at += 1
            yield (ROWS[order[self.at - 1] * 3 :][:3],)

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class Samples(TensorDataset):
    """Random samples: each worker draws from its own seed."""

    def __getitem__(self, index):
        return (super().__getitem__(index)[0] + torch.rand(()) / 10,)


def loader_of(kind):
    data, generator = TensorDataset(ROWS), torch.Generator().manual_seed(7)
    if kind == "stateful":
        return StatefulLoader()
    if kind == "workers":
        return DataLoader(Samples(ROWS), 4, shuffle=True, num_workers=1)
    if kind == "own_generator":
        return DataLoader(data, 4, shuffle=True, generator=generator)
    return DataLoader(data, 4, shuffle=True)


def trained(folder, kind="", schedule="epoch_plateau", draws=False, given=(), **options):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from resilient.integrations.lightning import ResilientCheckpoint

    torch.manual_seed(1)
    module, average, counter = Module(schedule, draws), EMAWeightAveraging(decay=0.9), Counter()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[average, counter, *given, ResilientCheckpoint(folder, every_n_steps=2)],
        **{"max_epochs": 3, **options},
    )  # fmt: skip
    trainer.fit(module, loader_of(kind), DataLoader(TensorDataset(ROWS[:6]), 3, shuffle=True))
    weights = [one.detach().numpy().tobytes() for one in module.state_dict().values()]
    averaged = int(average._average_model.n_averaged)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return weights, module.record, counter.count, averaged, rate, trainer.global_step


def saved_steps(repository):
    return sorted(parse_checkpoint(one.name).step for one in repository.glob("checkpoint-*"))


CONFIGURATIONS = {
    "mean_of_epoch": {},
    "own_generator": {"kind": "own_generator", "schedule": "step_plateau", "val_check_interval": 2},
    "iterated_early": {"schedule": "one_cycle", "draws": True},
    "reloaded": {"draws": True, "reload_dataloaders_every_n_epochs": 1},
    "stateful_loader": {"kind": "stateful", "val_check_interval": 3, "max_epochs": 2},
    "accumulated": {"accumulate_grad_batches": 2, "max_epochs": 2, "val_check_interval": 4},
    "workers": {"kind": "workers", "max_epochs": 2, "limit_train_batches": 3},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_lightning_resumed_from_each_save_ends_the_same(tmp_path, name):
    whole = tmp_path / "whole"
    expected = trained(whole, **CONFIGURATIONS[name])
    steps = saved_steps(whole)
    assert len(steps) >= 3
    for step in steps[:-1]:
        part = tmp_path / f"from-{step}"
        shutil.copytree(whole, part)
        for later in steps[steps.index(step) + 1 :]:
            shutil.rmtree(part / f"checkpoint-{later}-g1")
        assert trained(part, **CONFIGURATIONS[name]) == expected, f"from step {step}"
        assert saved_steps(part) == steps


def test_lightning_stopped_early_stays_stopped(tmp_path, capfd):
    from lightning.pytorch.callbacks import EarlyStopping

    def run():
        stopper = EarlyStopping("val", patience=1, min_delta=10.0)
        return trained(tmp_path / "runs", given=[stopper], max_epochs=9)

    first = run()
    assert first[-1] == 12
    assert run()[-1] == 12
    assert "EarlyStopping stopped this run at step 12" in capfd.readouterr().err


def test_lightning_stopped_by_a_request_trains_on(tmp_path):
    class Stop(lightning.Callback):
        def on_train_epoch_end(self, trainer, _module):
            trainer.should_stop = True

    assert trained(tmp_path / "runs", given=[Stop()])[-1] == 6
    assert trained(tmp_path / "runs", max_epochs=2)[-1] == 12


def test_lightning_hook_value_without_pickle_is_refused(tmp_path):
    class Odd(lightning.Callback):
        def on_save_checkpoint(self, _trainer, _module, checkpoint):
            checkpoint["odd_one"] = {"inner": object()}

    with pytest.raises(UnsavableState, match="odd_one/inner"):
        trained(tmp_path / "runs", given=[Odd()], max_epochs=1)


def test_lightning_part_name_taken_is_refused(tmp_path):
    from resilient.integrations.lightning import ResilientCheckpoint

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ResilientCheckpoint(tmp_path, loops=3)],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="`loops`"):
        trainer.fit(Module(), loader_of(""), DataLoader(TensorDataset(ROWS[:6]), 3))


def test_lightning_checkpoint_path_is_the_first_start_only(tmp_path, capfd):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from resilient.integrations.lightning import ResilientCheckpoint

    def run(epochs, callback, path=None):
        torch.manual_seed(1)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], max_epochs=epochs,
        )  # fmt: skip
        data = loader_of(""), DataLoader(TensorDataset(ROWS[:6]), 3)
        trainer.fit(module, *data, ckpt_path=path, weights_only=False)
        return [one.detach().clone() for one in module.parameters()], trainer.global_step

    run(1, ModelCheckpoint(tmp_path / "theirs", save_last=True))
    path = str(tmp_path / "theirs" / "last.ckpt")
    unbroken, step = run(3, ResilientCheckpoint(tmp_path / "one"), path)
    assert step == 18
    run(2, ResilientCheckpoint(tmp_path / "two"), path)
    capfd.readouterr()
    resumed, step = run(3, ResilientCheckpoint(tmp_path / "two"), path)
    assert step == 18
    assert all(map(torch.equal, unbroken, resumed))
    assert "training continues from checkpoint-12-g1" in capfd.readouterr().err
