"""Orders of samples: all of them, once, the same in every life and cut the same for every rank."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.data.ordering import (
    LengthGrouped,
    Rebalanced,
    Sampling,
    Sequential,
    cost_of,
    lengths_of,
    split_by_cost,
)
from resilient.train.data.sampler import BatchLayout, DataCursor, ResumableSampler, worker_options
from tests.unit.train.models import DieAfter, Dies, Net, Noisy, make_trainer

LENGTHS = [1 + random.Random(index).randrange(40) for index in range(57)]
SAMPLINGS = [Sampling(), Sequential(), LengthGrouped(LENGTHS), Rebalanced(LENGTHS, 2)]
NAMES = [type(one).__name__ for one in SAMPLINGS]


def dealt(sampling, ranks, *, samples=0, epoch=1, batch=3):
    """Return the micro-batches of all ranks from a position on: by round, by rank."""
    layout = BatchLayout(57, batch, ranks)
    queues = [
        ResumableSampler(DataCursor(57, 5, epoch, samples, group=6), layout, rank, sampling)
        for rank in range(ranks)
    ]
    return [[one.indices for one in turn] for turn in zip(*queues, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_an_epoch_has_every_sample_and_the_round_fills_itself_from_the_start(sampling, ranks):
    seen = [index for turn in dealt(sampling, ranks) for batch in turn for index in batch]
    assert set(seen) == set(range(57))
    assert len(seen) - 57 < 3 * ranks
    assert all(all(turn) for turn in dealt(sampling, ranks))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_the_rest_of_an_epoch_is_the_same_from_wherever_a_life_begins(sampling, ranks):
    whole = dealt(sampling, ranks)
    for rounds in range(0, len(whole), 2):  # a step is two rounds
        assert dealt(sampling, ranks, samples=rounds * 3 * ranks) == whole[rounds:]


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["random", "grouped"])
def test_at_another_number_of_ranks_the_rest_is_what_was_not_trained_on(sampling):
    first = [one for turn in islice(dealt(sampling, 2), 4) for batch in turn for one in batch]
    rest = [one for turn in dealt(sampling, 3, samples=24) for batch in turn for one in batch]
    assert sorted(set(rest) - set(first)) == sorted(set(range(57)) - set(first))
    assert len(rest) == 33 + -33 % 9


def test_groups_of_one_length_are_transformers_own():
    from transformers.trainer_pt_utils import get_length_grouped_indices

    for epoch in range(3):
        cursor = DataCursor(57, 5, epoch, group=4)
        generator = torch.Generator().manual_seed(5 + epoch)
        expected = get_length_grouped_indices(LENGTHS, 4, generator=generator)
        assert LengthGrouped(LENGTHS).order(cursor).tolist() == expected
    assert LENGTHS[expected[0]] == max(LENGTHS)


def test_the_groups_of_the_first_life_stay_when_the_batch_changes():
    before = DataCursor(57, 5, 0, 12, group=6)
    after = DataCursor(57, 5, group=24)
    after.load_state_dict(before.state_dict())
    grouped = LengthGrouped(LENGTHS)
    assert grouped.order(after).tolist() == grouped.order(before).tolist()
    old = {name: one for name, one in before.state_dict().items() if name != "group"}
    after.load_state_dict(old)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_no_split_into_neighbours_has_a_cheaper_dearest_part(seed, groups):
    lengths = [1 + random.Random(seed * 100 + index).randrange(30) for index in range(7)]
    parts = split_by_cost(range(7), lengths, groups)
    assert sorted(index for part in parts for index in part) == list(range(7))
    assert len(parts) == groups
    ordered = sorted(lengths, reverse=True)
    assert dearest(parts, lengths) == pytest.approx(cheapest(ordered, groups))


def dearest(parts, lengths):
    return max(cost_of(len(one), max(lengths[index] for index in one)) for one in parts)


def cheapest(ordered, groups):
    """Try every cut of a sorted list."""
    if groups == 1:
        return cost_of(len(ordered), ordered[0])
    return min(
        max(cost_of(cut, ordered[0]), cheapest(ordered[cut:], groups - 1))
        for cut in range(1, len(ordered) - groups + 2)
    )


def test_fewer_samples_than_parts_cannot_be_split():
    with pytest.raises(ValueError, match="cannot fill"):
        split_by_cost([1], [1, 1], 2)


@pytest.mark.parametrize("sampling", SAMPLINGS[2:], ids=NAMES[2:])
def test_padding_costs_less_than_in_random_batches(sampling):
    def padded(one):
        batches = [batch for turn in dealt(one, 2) for batch in turn]
        return sum(len(one) * max(LENGTHS[index] for index in one) for one in batches)

    assert padded(sampling) < 0.8 * padded(Sampling())


class Columns(list):
    column_names = ("length", "x")

    def __getitem__(self, key):
        return LENGTHS if key == "length" else super().__getitem__(key)


def test_lengths_come_from_a_column_from_samples_or_from_what_the_model_reads():
    assert lengths_of(Columns(), "length", "input_ids") == LENGTHS
    assert lengths_of([{"n": 3}, {"n": 4}], "n", "x") == [3, 4]
    assert lengths_of([{"x": "abc"}, {"x": "d"}], "length", "x") == [3, 1]
    with pytest.raises(ConfigError, match="length_column_name"):
        lengths_of([{"y": 1}], "length", "x")
    with pytest.raises(ConfigError, match="are unknown"):
        lengths_of([(1, 2)], "length", "x")


class Long(Noisy):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "length": LENGTHS[index]}


@pytest.mark.parametrize(
    ("strategy", "workers"), [("sequential", 0), ("group_by_length", 0), ("batch_rebalance", 2)]
)
def test_a_run_that_died_ends_with_the_bits_of_one_that_did_not(
    tmp_path, repository, strategy, workers
):
    options = {
        "train_sampling_strategy": strategy,
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": workers,
        "save_steps": 3,
        "dataloader_multiprocessing_context": "fork" if workers else None,
    }

    def trainer(folder, **more):
        made = make_trainer(folder, **options, **more)
        made.train_dataset = Long(50)
        return made

    unbroken = trainer(tmp_path / "unbroken")
    unbroken.train()
    repository.checkpoints.clear()
    with pytest.raises(Dies):
        trainer(tmp_path / "broken", callbacks=[DieAfter(5)]).train()
    broken = trainer(tmp_path / "broken")
    broken.train()
    assert broken.state.log_history == unbroken.state.log_history
    expected = unbroken.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in broken.model.state_dict().items())


def test_sequential_trains_in_the_order_of_the_dataset(tmp_path, repository):
    seen = []

    class Sees(Net):
        def forward(self, x, labels=None, index=None):
            seen.extend(index.tolist())
            return super().forward(x, labels)

    class Numbered(Noisy):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "index": index}

    trainer = make_trainer(tmp_path, train_sampling_strategy="sequential", num_train_epochs=1)
    trainer.model, trainer.train_dataset = Sees(), Numbered(10)
    trainer.train()
    assert seen == list(range(10))


def test_loaders_start_as_they_are_told_to():
    args = TrainingArguments(dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")
    assert worker_options(args, pin=True)["multiprocessing_context"] == "spawn"
    assert "multiprocessing_context" not in worker_options(TrainingArguments(), pin=True)
