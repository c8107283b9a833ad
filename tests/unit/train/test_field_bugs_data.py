"""Pains of the field with random numbers, the order of data and the count of steps.

Each test bears the number of a report, and does what it tells of.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from resilient.errors import ResilientError
from resilient.state_dict.rng_state import RandomState
from resilient.train.data.ordering import epoch_order
from tests.unit.train.models import DieAfter, Dies, Net, Noisy, make_trainer

SIZE, BATCH = 50, 4


class Numbered(Noisy):
    """Samples that say which they are, and remember that they were fetched."""

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.fetched = []

    def __getitem__(self, index):
        self.fetched.append(index)
        return {**super().__getitem__(index), "index": index}


class Sees(Net):
    """Remembers the samples of each micro-batch, and its loss."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses = [], []

    def forward(self, x, labels=None, index=None):
        output = super().forward(x, labels)
        self.batches.append(index.tolist())
        self.losses.append(output["loss"].item())
        return output


def life(folder, *, dies_after=None, size=SIZE, **options):
    """Train until the end, or until the process dies, and return the trainer."""
    callbacks = () if dies_after is None else [DieAfter(dies_after)]
    trainer = make_trainer(folder, callbacks=callbacks, **{"save_steps": 4, **options})
    trainer.model, trainer.train_dataset = Sees(), Numbered(size)
    if dies_after is None:
        trainer.train()
    else:
        with pytest.raises(Dies):
            trainer.train()
    return trainer


@pytest.fixture
def unbroken(tmp_path, repository):
    trainer = life(tmp_path / "unbroken")
    repository.checkpoints.clear()
    return trainer


def of_epoch(epoch, size=SIZE, batch=BATCH):
    order = epoch_order(size, 42, epoch).tolist()
    return [order[low : low + batch] for low in range(0, size, batch)]


def test_tf_40500_random_state_is_saved_without_pickle_and_numpys_goes_on(tmp_path, monkeypatch):
    """It was a pickle of NumPy's objects, which a newer torch refuses to load."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)
    whole = life(tmp_path / "whole")
    expected = np.random.get_state(legacy=False)  # noqa: NPY002 - the stream that users draw from
    life(tmp_path / "run", dies_after=9)
    for file in (tmp_path / "run").rglob("checkpoint-*/*"):
        assert file.suffix in {".safetensors", ".json"}
        assert b"cnumpy" not in file.read_bytes()
    np.random.seed(99)  # noqa: NPY002 - as another process would begin
    again = life(tmp_path / "run")
    assert again.model.losses == whole.model.losses[8:]
    found = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    assert found["state"]["pos"] == expected["state"]["pos"]
    assert found["state"]["key"].tolist() == expected["state"]["key"].tolist()


def test_tf_36138_every_stream_that_is_saved_is_read_again():
    """CUDA's was saved under one name and read under another; on a GPU the name is `cuda`."""
    saved = RandomState().state_dict()

    def drawn():
        return random.random(), np.random.rand(), torch.rand(3).tolist()  # noqa: NPY002, TID251

    draws = drawn()
    if torch.cuda.is_available():
        assert "cuda" in saved
    for name in ("python", "numpy", "cpu"):
        with pytest.raises(KeyError, match=name):
            RandomState().load_state_dict({key: saved[key] for key in saved if key != name})
    RandomState().load_state_dict(saved)
    assert drawn() == draws


@pytest.mark.parametrize("damage", ["lost", "spoilt"])
def test_ac_4308_a_run_does_not_go_on_with_other_random_numbers(tmp_path, monkeypatch, damage):
    """Also AC#4283: the file that was not there was a line of information."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)
    life(tmp_path, dies_after=5)
    [file] = tmp_path.glob("checkpoint-4-*/rng_state_0.safetensors")
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    trainer = make_trainer(tmp_path)
    with pytest.raises(ResilientError, match="rng_state_0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_ac_2823_a_life_that_resumes_in_an_epoch_has_the_order_of_that_epoch(
    tmp_path, repository, unbroken
):
    life(tmp_path, dies_after=17)
    again = life(tmp_path)
    assert again.model.batches == of_epoch(1)[16 - 13 :]
    assert unbroken.model.batches == of_epoch(0) + of_epoch(1)


def test_ac_4071_the_epoch_does_not_begin_again_at_zero(tmp_path, repository):
    """Also its mirror: after the epoch that was resumed comes the next one."""
    life(tmp_path, dies_after=9, num_train_epochs=3)
    again = life(tmp_path, num_train_epochs=3)
    assert again.model.batches == of_epoch(0)[8:] + of_epoch(1) + of_epoch(2)


def test_ac_4203_the_permutation_is_the_runs_and_not_that_of_the_new_process(tmp_path, repository):
    """Also AC#4195 and ms-swift#10050: how far it got was kept, and in which order was not."""
    life(tmp_path, dies_after=9)
    torch.manual_seed(12345)
    random.seed(12345)
    again = life(tmp_path)
    first = [index for batch in of_epoch(0)[:8] for index in batch]
    rest = [index for batch in again.model.batches[: 13 - 8] for index in batch]
    assert sorted(first + rest) == list(range(SIZE))


def test_tf_21934_no_sample_is_fetched_only_to_be_skipped(tmp_path, repository):
    """Also TF#11284: what was trained on is not loaded again, however far the run had got."""
    life(tmp_path, dies_after=21)
    again = life(tmp_path)
    trained = [index for batch in again.model.batches for index in batch]
    assert again.train_dataset.fetched == trained
    assert len(trained) == SIZE - (20 - 13) * BATCH


def test_tf_31441_what_a_loader_had_fetched_ahead_is_not_lost(tmp_path, repository, unbroken):
    """The position is that of training; loaders in processes run ahead of it."""
    options = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4}
    life(tmp_path, dies_after=9, **options)
    again = life(tmp_path, **options)
    assert again.model.batches == unbroken.model.batches[8:]


@pytest.mark.parametrize(("accumulation", "dies_after"), [(2, 9), (4, 5), (8, 3)])
def test_tf_22082_steps_and_epochs_are_counted_right_under_accumulation(
    tmp_path, repository, accumulation, dies_after
):
    """Also kohya#2407 and TF#37777: a run that began to count anew trained nothing, and ended."""
    options = {"gradient_accumulation_steps": accumulation, "num_train_epochs": 3, "save_steps": 2}
    whole = life(tmp_path / "whole", **options)
    repository.checkpoints.clear()
    saved = (dies_after - 1) // 2 * 2
    life(tmp_path / "run", dies_after=dies_after, **options)
    again = life(tmp_path / "run", **options)
    per_epoch = -(-13 // accumulation)
    assert again.state.global_step == whole.state.global_step == 3 * per_epoch
    assert again.state.epoch == whole.state.epoch == 3
    into = saved % per_epoch * accumulation
    assert again.model.batches == whole.model.batches[saved // per_epoch * 13 + into :]
    assert again.state.log_history == whole.state.log_history


def test_megatron_bridge_4565_nothing_is_replayed_and_the_loss_goes_on(
    tmp_path, repository, unbroken
):
    """Also TF#33336 and TF#30502: the loss jumped, because the data's tail came a second time."""
    lives = [life(tmp_path, dies_after=step) for step in (6, 11, 19)] + [life(tmp_path)]
    # What was trained after the last checkpoint of a life is lost with it, and comes again.
    begins = [0, 4, 8, 16, 26]
    losses, batches = [], []
    for one, (begin, end) in zip(lives, pairwise(begins), strict=True):
        losses += one.model.losses[: end - begin]
        batches += one.model.batches[: end - begin]
    assert losses == unbroken.model.losses
    assert batches == unbroken.model.batches
    for epoch in (batches[:13], batches[13:]):
        assert sorted(index for batch in epoch for index in batch) == list(range(SIZE))
