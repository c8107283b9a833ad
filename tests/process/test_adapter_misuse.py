"""What scripts of other trainers do besides: save too early, ask for a resume, leap over steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from resilient.errors import ConfigError, NothingToResume

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
ROWS = torch.arange(96.0).reshape(24, 4) / 50


class Rows(Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return {"x": ROWS[index], "labels": ROWS[index].sum()}


class Endless(IterableDataset):
    def __iter__(self):
        yield from ROWS


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, gradient_accumulation_steps=4)
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_is_not_saved_in_the_middle_of_an_accumulation(tmp_path, accelerator):
    from resilient.integrations.accelerate import AcceleratorCheckpointer

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(ROWS), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    taken = refused = 0
    with AcceleratorCheckpointer(accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        for (rows,) in checkpointer.batches(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            taken += 1
            if taken % 4 == 0:
                checkpointer.save(taken)
                continue
            with pytest.raises(ConfigError, match="accumulation") as caught:
                checkpointer.save(taken)
            assert "sync_gradients" in caught.value.hint
            refused += 1
    assert (taken, refused) == (12, 9)


def test_accelerate_on_data_without_length_says_what_to_do(tmp_path, accelerator):
    from resilient.integrations.accelerate import AcceleratorCheckpointer

    model, loader = accelerator.prepare(nn.Linear(4, 4), DataLoader(Endless()))
    with AcceleratorCheckpointer(accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        with pytest.raises(ConfigError, match="no length") as caught:
            next(checkpointer.batches(loader))
    assert "__len__" in caught.value.hint
    assert model is not None


def trained_by_transformers(folder, steps, **how):
    from transformers import Trainer, TrainingArguments

    from resilient.integrations.transformers import ResilientCallback

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x).squeeze(1) - labels).square().mean()}

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder / "output"), max_steps=steps, per_device_train_batch_size=4,
        save_steps=2, lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=Line(), args=arguments, train_dataset=Rows())
    trainer.add_callback(ResilientCallback(trainer, folder / "repository"))
    trainer.train(**how)
    return trainer.model.layer.weight.detach()


def test_transformers_may_be_told_to_resume_as_usual_scripts_tell_it(tmp_path):
    unbroken = trained_by_transformers(tmp_path / "unbroken", 8)
    with pytest.raises(NothingToResume, match="no checkpoint to resume from"):
        trained_by_transformers(tmp_path / "broken", 4, resume_from_checkpoint=True)
    trained_by_transformers(tmp_path / "broken", 4)
    broken = trained_by_transformers(tmp_path / "broken", 8, resume_from_checkpoint=True)
    assert torch.equal(unbroken, broken)


@pytest.mark.smoke
def test_lightning_with_two_optimizers_saves_though_its_steps_leap(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from resilient.integrations.lightning import ResilientCheckpoint

    class Pair(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)
            self.automatic_optimization = False

        def training_step(self, batch, _index):
            for optimizer, model in zip(self.optimizers(), (self.one, self.two), strict=True):
                optimizer.zero_grad()
                self.manual_backward(model(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(one.parameters(), 0.1) for one in (self.one, self.two)]

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResilientCheckpoint(tmp_path, every_n_steps=5)],
    )  # fmt: skip
    trainer.fit(Pair(), DataLoader(TensorDataset(ROWS), batch_size=2))
    saved = sorted(int(one.name.split("-")[1]) for one in tmp_path.glob("checkpoint-*"))
    assert trainer.global_step == 24
    assert saved == [6, 10, 16, 20, 24]
