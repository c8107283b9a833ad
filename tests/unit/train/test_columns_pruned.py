"""Columns that a model does not take, and datasets of Hugging Face."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError
from resilient.train.data.collate import PruningCollator, prune_dataset, taken_columns
from tests.unit.train.models import DieAfter, Dies, Net, make_trainer

datasets = pytest.importorskip("datasets")


class Takes(nn.Module):
    def forward(self, x, labels=None):
        return x


class TakesAll(nn.Module):
    def forward(self, x, **more):
        return x


class OfTransformers(TakesAll):
    main_input_name = "x"


class Adapted(nn.Module):
    def get_base_model(self):
        return Takes()

    def forward(self, *args, **more):
        return None


def test_what_forward_names_is_taken_and_labels_by_all_their_names():
    assert taken_columns(Takes(), ["labels"]) == {"x", "labels", "label", "label_ids"}
    assert taken_columns(TakesAll(), []) is None
    assert "x" in taken_columns(OfTransformers(), [])
    assert "x" in taken_columns(Adapted(), [])


def test_a_collator_gets_nothing_that_the_model_does_not_take():
    told = []
    collate = PruningCollator(list, frozenset({"x"}), "Takes", told.append)
    assert collate([{"x": 1, "text": "a"}]) == [{"x": 1}]
    assert told == [("text",)]
    assert collate([(1, "a")]) == [(1, "a")]
    sent = ForkingPickler.loads(ForkingPickler.dumps(collate))
    assert sent([{"x": 1, "text": "a"}]) == [{"x": 1}]
    with pytest.raises(ConfigError, match="`Takes` takes"):
        collate([{"text": "a"}])


def rows(size=22):
    generator = torch.Generator().manual_seed(2)
    return {
        "text": [f"sample {index}" for index in range(size)],
        "x": torch.randn(size, 6, generator=generator).tolist(),
        "label": torch.randint(0, 3, (size,), generator=generator).tolist(),
        "length": [1 + index % 7 for index in range(size)],
    }


def test_a_dataset_of_hugging_face_loses_the_columns_themselves():
    pruned, unused = prune_dataset(datasets.Dataset.from_dict(rows()), frozenset({"x"}), "Takes")
    assert pruned.column_names == ["x"]
    assert unused == ("text", "label", "length")
    assert prune_dataset([1], frozenset({"x"}), "Takes") == ([1], ())
    with pytest.raises(ConfigError, match="remove_unused_columns"):
        prune_dataset(pruned, frozenset({"y"}), "Takes")


def strict(features):
    """A collator that takes nothing but numbers, as those for tokens."""
    return {
        "x": torch.tensor([one["x"] for one in features]),
        "labels": torch.tensor([one["label"] for one in features]),
        **{name: torch.tensor([one[name] for one in features]) for name in features[0]},
    }


class Overrides(Trainer):
    """Reads a column that the model does not take."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        weight = inputs.pop("weight").mean()
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss * weight, outputs) if return_outputs else loss * weight


def test_what_an_override_reads_stays(tmp_path, repository):
    data = [{"x": torch.ones(6), "label": 1, "weight": 2.0} for _ in range(8)]
    args = TrainingArguments(str(tmp_path), max_steps=1, disable_tqdm=True)
    Overrides(Net(), args, train_dataset=data).train()


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_run_over_a_dataset_of_hugging_face_resumes_bit_for_bit(
    tmp_path, repository, strategy, capsys
):
    def trainer(folder, **more):
        made = make_trainer(folder, train_sampling_strategy=strategy, save_steps=3, **more)
        made.train_dataset = made.eval_dataset = datasets.Dataset.from_dict(rows())
        made.data_collator = strict
        return made

    unbroken = trainer(tmp_path / "unbroken")
    unbroken.train()
    assert "not passed to the model" in capsys.readouterr().err
    assert unbroken.predict(unbroken.eval_dataset).label_ids.tolist() == rows()["label"]
    repository.checkpoints.clear()
    with pytest.raises(Dies):
        trainer(tmp_path / "broken", callbacks=[DieAfter(5)]).train()
    broken = trainer(tmp_path / "broken")
    broken.train()
    expected = unbroken.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in broken.model.state_dict().items())
