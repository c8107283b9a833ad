"""Train loaders that a script makes itself: every sample once, in all lives and on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

from resilient.errors import ConfigError
from resilient.train.data.custom_loader import LoaderRebuilt, resumable_loader
from resilient.train.data.sampler import BatchLayout, DataCursor, KeyedDataset, ResumableSampler
from resilient.train.trainer import Trainer
from tests.unit.train.models import DieAfter, Dies, make_trainer


class Numbered(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.full((6,), float(index)), "label": index % 3}


class Seeing(Trainer):
    """Notes the samples of each step."""

    loader_options: ClassVar = {"shuffle": True}

    def get_train_dataloader(self):
        options = {"batch_size": self.args.per_device_train_batch_size, **self.loader_options}
        return DataLoader(self.train_dataset, collate_fn=self.data_collator, **options)

    def training_step(self, model, inputs, *counted):
        self.seen = [*getattr(self, "seen", []), *inputs["x"][:, 0].int().tolist()]
        return super().training_step(model, inputs, *counted)


def seeing(**options):
    return type("Own", (Seeing,), {"loader_options": options})


def trainer_of(folder, kind, **options):
    trainer = make_trainer(folder, kind=kind, num_train_epochs=1, save_steps=1, **options)
    trainer.train_dataset = Numbered(50)
    return trainer


@pytest.mark.parametrize("options", [{"shuffle": True}, {}], ids=["random", "sequential"])
def test_an_epoch_that_dies_has_every_sample_once(tmp_path, repository, options):
    first = trainer_of(tmp_path, seeing(**options), callbacks=[DieAfter(5)])
    with pytest.raises(Dies):
        first.train()
    second = trainer_of(tmp_path, seeing(**options))
    second.train()
    seen = first.seen + second.seen
    assert sorted(seen) == list(range(50))
    assert (seen == list(range(50))) == (not options)


def test_what_the_loader_does_with_samples_stays_and_it_is_told(tmp_path, repository):
    begun = []

    def collate(samples):
        begun.append(len(samples))
        return {
            "x": torch.stack([one["x"] for one in samples]),
            "labels": torch.tensor([one["label"] for one in samples]),
        }

    class Own(Seeing):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=collate)

    told = []
    trainer = trainer_of(tmp_path, Own)
    emit = replace(trainer.session.emit, sinks=(lambda record, event: told.append(event),))
    trainer.session = replace(trainer.session, emit=emit)
    trainer.train()
    assert sum(begun) == 50
    assert [one.order for one in told if isinstance(one, LoaderRebuilt)] == ["random"]


def test_ranks_share_the_samples_of_a_loader_that_knows_of_no_ranks():
    seen = []
    args = make_args(per_device_train_batch_size=4, dataloader_drop_last=False)
    for rank in range(2):
        sampler = ResumableSampler(DataCursor(16, 0), BatchLayout(16, 4, 2), rank)
        plain = DataLoader(Numbered(16), batch_size=4)
        loader = resumable_loader(args, plain, sampler)
        seen += [int(x[0]) for batch in loader for x in batch["x"]]
    assert sorted(seen) == list(range(16))


def make_args(**values):
    return type("Args", (), {"reduction": "fast", **values})


class Another(DataLoader):
    pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda data: DataLoader(data, batch_size=5), "batch_size=5"),
        (lambda data: DataLoader(data, batch_size=4, drop_last=True), "drop_last=True"),
        (lambda data: DataLoader(Subset(data, range(8)), batch_size=4), "8 samples"),
        (lambda data: DataLoader(data, batch_sampler=[[0, 1, 2, 3]]), "batches of a `list`"),
        (lambda data: DataLoader(data, batch_size=None), "batches of a `NoneType`"),
        (lambda data: Another(data, batch_size=4), "a `Another`"),
        (lambda data: [{"x": torch.zeros(4, 6)}], "a `list`"),
        (
            lambda data: DataLoader(
                data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 50, 50)
            ),
            "its own `WeightedRandomSampler`",
        ),
    ],
)
def test_a_loader_with_a_meaning_of_its_own_is_refused_before_a_step(
    tmp_path, repository, make, says
):
    kind = type("Own", (Trainer,), {"get_train_dataloader": lambda self: make(self.train_dataset)})
    with pytest.raises(ConfigError, match=says) as refused:
        trainer_of(tmp_path, kind).train()
    assert "batch_sampler=self.train_sampler" in refused.value.hint
    assert not repository.checkpoints


def test_a_loader_around_the_runs_sampler_is_taken_as_it_is(tmp_path, repository):
    class Own(Seeing):
        def get_train_dataloader(self):
            self.made = Another(
                KeyedDataset(self.train_dataset),
                batch_sampler=self.train_sampler,
                collate_fn=self.data_collator,
            )
            return self.made

    trainer = trainer_of(tmp_path, Own)
    trainer.train()
    assert sorted(trainer.seen) == list(range(50))
    assert trainer.callback_handler.context["train_dataloader"] is trainer.made
