"""Datasets without a length: dealt by count, resumed at any sample."""

from __future__ import annotations

import random
import string
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.train.data.sampler import DataCursor
from resilient.train.data.streaming import (
    StreamBatchLayout,
    StreamCursor,
    StreamReader,
    StreamSource,
    is_stream,
)
from tests.unit.train.models import DieAfter, Dies, Net, Noisy, make_trainer

datasets = pytest.importorskip("datasets")
SIZE = 27


class Stream(IterableDataset):
    """Samples with augmentation from the global streams, in an order that each pass changes."""

    def __init__(self, size=SIZE):
        self.rows = Noisy(size)
        self.epoch = 0
        self.read = []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        size = len(self.rows)
        for place in range(size):
            yield self.sample((place * 5 + self.epoch) % size)

    def sample(self, index):
        self.read.append(index)
        return {**self.rows[index], "index": index}


class Stateful(Stream):
    """Knows its place, as datasets for stateful loaders do."""

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.place = 0

    def __iter__(self):
        size = len(self.rows)
        while self.place < size:
            self.place += 1
            yield self.sample((self.place * 7 + self.epoch) % size)
        self.place = 0

    def state_dict(self):
        return {"place": self.place, "of": {"epoch": self.epoch}}

    def load_state_dict(self, state):
        self.place = state["place"]


class Iterates:
    """An iterator that knows its place, of a dataset that does not."""

    def __init__(self, stream):
        self.stream, self.place = stream, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.stream.rows):
            raise StopIteration
        self.place += 1
        return self.stream.sample(self.place - 1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Iterated(Stream):
    def __iter__(self):
        return Iterates(self)


class DealsItself(Stream):
    """Does what torch tells datasets to do about the processes of a loader."""

    def __iter__(self):
        info = get_worker_info()
        every = list(super().__iter__())
        return iter(every if info is None else every[info.id :: info.num_workers])


def rows():
    """Lines of what the standard library has at hand."""
    for index in range(SIZE):
        letters = string.ascii_letters[index : index + 6]
        yield {"x": [ord(one) / 99 for one in letters], "label": index % 3, "index": index}


def of_hugging_face(_size=None):
    return datasets.Dataset.from_list(list(rows())).to_iterable_dataset(num_shards=3)


def generated(_size=None):
    return datasets.IterableDataset.from_generator(rows)


def shuffled(_size=None):
    return of_hugging_face().shuffle(seed=1, buffer_size=8, max_buffer_input_shards=1)


class Sees(Net):
    def __init__(self):
        super().__init__()
        self.batches = []

    def forward(self, x, labels=None, index=None):
        if self.training:
            self.batches.append(index.tolist())
        return super().forward(x, labels)


def make(folder, stream, **options):
    options = {"max_steps": 11, "save_steps": 2, **options}
    trainer = make_trainer(folder, **options)
    trainer.model, trainer.train_dataset = Sees(), stream
    return trainer


def life(folder, stream, *, dies_after=None, **options):
    if dies_after is None:
        trainer = make(folder, stream, **options)
        trainer.train()
        return trainer
    trainer = make(folder, stream, callbacks=[DieAfter(dies_after)], **options)
    with pytest.raises(Dies):
        trainer.train()
    return trainer


KINDS = [Stream, Stateful, Iterated, DealsItself, of_hugging_face, generated, shuffled]


@pytest.mark.parametrize("kind", KINDS, ids=[one.__name__ for one in KINDS])
@pytest.mark.parametrize("dies_after", [3, 7, 9])
def test_a_run_over_a_stream_that_died_ends_with_the_bits_of_one_that_did_not(
    tmp_path, repository, kind, dies_after
):
    unbroken = life(tmp_path / "unbroken", kind())
    repository.checkpoints.clear()
    life(tmp_path / "broken", kind(), dies_after=dies_after)
    broken = life(tmp_path / "broken", kind())
    saved = (dies_after - 1) // 2 * 2 if dies_after % 2 == 0 else dies_after - 1
    assert broken.model.batches == unbroken.model.batches[saved:]
    assert broken.state.log_history == unbroken.state.log_history
    expected = unbroken.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in broken.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stream, Stateful, shuffled], ids=["plain", "stateful", "hf"])
def test_processes_that_load_change_nothing(tmp_path, repository, kind):
    options = {"gradient_accumulation_steps": 3, "max_steps": 5}
    alone = life(tmp_path / "alone", kind(), **options)
    repository.checkpoints.clear()
    life(tmp_path / "helped", kind(), dataloader_num_workers=2, dies_after=3, **options)
    helped = life(tmp_path / "helped", kind(), dataloader_num_workers=1, **options)
    assert helped.model.batches == alone.model.batches[6:]
    expected = alone.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in helped.model.state_dict().items())


def test_every_pass_has_every_sample_once(tmp_path, repository):
    trainer = life(tmp_path, Stream(), max_steps=14)
    first, second = trainer.model.batches[:7], trainer.model.batches[7:]
    for epoch, batches in enumerate((first, second)):
        seen = list(chain(*batches))
        assert seen == [(place * 5 + epoch) % SIZE for place in range(SIZE)]
    assert [len(one) for one in first] == [4] * 6 + [3]
    # As Transformers tells it: parts of a pass are parts of the run, as nobody knows its length.
    assert trainer.state.epoch == pytest.approx(1 + SIZE / 4 / 14)


def test_the_last_group_of_a_pass_is_short_and_ends_with_it(tmp_path, repository):
    trainer = life(tmp_path, Stream(), gradient_accumulation_steps=4, max_steps=3)
    assert len(trainer.model.batches) == 4 + 3 + 4


@pytest.mark.parametrize("kind", [Stateful, Iterated], ids=["dataset", "iterator"])
def test_what_knows_its_place_is_not_read_again(tmp_path, repository, kind):
    life(tmp_path, kind(), dies_after=5)
    stream = kind()
    trainer = life(tmp_path, stream, max_steps=6)
    assert stream.read[:8] == list(chain(*trainer.model.batches))


def read_by(ranks, batch, *, samples=0, workers=0, drop_last=False):
    """Return the micro-batches of all ranks: by round, by rank."""
    found = []
    for rank in range(ranks):
        layout = StreamBatchLayout(0, batch, ranks, drop_last=drop_last)
        cursor = StreamCursor(0, 42, samples=samples)
        reader = StreamReader(Stream(), cursor, layout, rank)
        loaded = DataLoader(reader, batch_size=None, num_workers=workers, collate_fn=list)
        found.append([[sample["index"] for sample in samples] for samples, *_ in loaded])
    return [list(turn) for turn in zip(*found, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_deal_a_stream_among_them_by_count(ranks, workers):
    order = [place * 5 % SIZE for place in range(SIZE)]
    turns = read_by(ranks, 4, workers=workers)
    flat = [index for turn in turns for batch in turn for index in batch]
    assert flat[:SIZE] == order
    assert set(flat[SIZE:]) <= set(order)
    assert {len(batch) for turn in turns for batch in turn} == ({4} if ranks > 1 else {4, 3})


def test_at_another_number_of_ranks_nothing_is_lost_or_repeated():
    first = read_by(2, 4)[:2]
    rest = read_by(3, 3, samples=16)
    flat = [index for turn in (*first, *rest) for batch in turn for index in batch]
    assert flat[:SIZE] == [place * 5 % SIZE for place in range(SIZE)]


def test_an_incomplete_round_is_dropped_when_it_shall_be():
    assert len(read_by(2, 4, drop_last=True)) == 3
    assert len(read_by(2, 4)) == 4


def test_reading_leaves_the_random_numbers_of_training_alone():
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # noqa: NPY002
    source = StreamSource(Stream(), DataCursor(0, 42))
    first = source.take(3)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    again = StreamSource(Stream(), DataCursor(0, 42, samples=2)).take(1)
    assert torch.equal(again[0]["x"], first[2]["x"])


def test_a_stream_is_evaluated(tmp_path, repository):
    trainer = make(tmp_path, Stream(), eval_strategy="steps", eval_steps=5)
    trainer.eval_dataset = Stream()
    trainer.train()
    rows = Noisy(SIZE)
    order = [place * 5 % SIZE for place in range(SIZE)]
    labels = trainer.predict(Stream()).label_ids.tolist()
    assert labels == [int(rows.y[index]) for index in order]
    assert [one["step"] for one in trainer.state.log_history if "eval_loss" in one] == [5, 10, 11]


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("stream", "options", "said"),
    [
        (Stream(), {"max_steps": -1}, "set `max_steps`"),
        (Empty(), {}, "`Empty` is empty"),
        (Stream(3), {"dataloader_drop_last": True}, "less than one round"),
        (Stream(), {"train_sampling_strategy": "group_by_length"}, "a stream is trained"),
        (Stream(), {"auto_find_batch_size": True}, "needs a train_dataset with a length"),
        (Stream(), {"random_numbers": "transformers"}, "needs a train_dataset with a length"),
    ],
)
def test_what_a_stream_cannot_do_is_said(tmp_path, repository, stream, options, said):
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, stream, **options).train()


def test_an_empty_stream_is_not_evaluated_to_nothing(tmp_path, repository):
    with pytest.raises(ConfigError, match="`Empty` is empty"):
        make(tmp_path, Stream()).evaluate(Empty())


def test_a_run_over_rows_does_not_go_on_over_a_stream(tmp_path, repository):
    life(tmp_path, Stream(), dies_after=3)
    with pytest.raises(IncompatibleCheckpoint, match="of 0 samples"):
        make(tmp_path, Noisy(SIZE)).train()
    repository.checkpoints.clear()
    numbered = [{**Noisy(SIZE)[index], "index": index} for index in range(SIZE)]
    life(tmp_path, numbered, dies_after=3)
    with pytest.raises(IncompatibleCheckpoint, match="is a stream"):
        make(tmp_path, Stream()).train()


def test_what_has_no_items_is_a_stream():
    assert is_stream(Stream())
    assert is_stream(generated())
    assert not is_stream(Noisy(3))
    assert not is_stream([1, 2])
    assert not is_stream(None)
