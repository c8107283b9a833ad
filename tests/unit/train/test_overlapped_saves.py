"""Saves that copy beside the next step: the trainer keeps the promise that they ask for."""

from __future__ import annotations

import time

import pytest

from resilient.checkpoint.catalog import committed
from resilient.engine_factory import open_engine
from resilient.state_dict.host_copy import HostCopyBatch
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from resilient.train.callbacks.base import TrainerCallback
from tests.helpers.manifests import Values
from tests.unit.train.fakes import MemoryCheckpointer, equal
from tests.unit.train.models import make_trainer


def saved(folder):
    """Return what every checkpoint of a repository holds of model and optimizer."""
    found = {}
    for checkpoint in committed(open_store(str(folder))):
        checkpointer = open_engine(str(folder))
        model, optimizer = Values(), Values()
        checkpointer.load_part(checkpoint, "model", Part(model))
        checkpointer.load_part(checkpoint, "optimizer", Part(optimizer))
        checkpointer.close()
        found[checkpoint.step] = {"model": dict(model.state), "optimizer": optimizer.state}
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_checkpoints_hold_the_same_bits_with_and_without_overlap(
    tmp_path, monkeypatch, accumulation
):
    options = {"save_steps": 1, "max_steps": 4, "gradient_accumulation_steps": accumulation}
    make_trainer(tmp_path / "plain", save_overlap=False, **options).train()
    make = HostCopyBatch.make

    def make_late(self, *, modestly=False):
        # Beside training it comes late, so that training comes upon copies that are not made.
        time.sleep(0.02 if modestly else 0)
        make(self, modestly=modestly)

    monkeypatch.setattr(HostCopyBatch, "make", make_late)
    make_trainer(tmp_path / "overlapped", **options).train()
    plain, overlapped = saved(tmp_path / "plain"), saved(tmp_path / "overlapped")
    assert sorted(plain) == [1, 2, 3, 4]
    assert equal(overlapped, plain)


class Watched(MemoryCheckpointer):
    """Notes what the trainer asks of it."""

    def save(self, step, parts, about, *, keep=(), overlap=False):
        self.repository.notes.append("save, later" if overlap else "save")
        return super().save(step, parts, about, keep=keep)

    def before_update(self):
        self.repository.notes.append("wait")

    def warm(self, parts):
        state = parts["optimizer"].stateful.state_dict()["state"]
        self.repository.notes.append(f"warm {bool(state)}")


class Changing(TrainerCallback):
    """Notes where state may change."""

    def __init__(self, notes):
        self.notes = notes

    def on_pre_optimizer_step(self, args, state, control, /, **_):
        self.notes.append("change")

    def on_evaluate(self, args, state, control, /, **_):
        self.notes.append("evaluated")


@pytest.fixture
def notes(repository, monkeypatch):
    repository.notes = []
    monkeypatch.setattr(repository, "open", lambda *_, **__: Watched(repository, _[1]))
    from resilient.train import session

    monkeypatch.setattr(session, "open_engine", repository.open)
    return repository.notes


def test_training_waits_before_each_change_and_gets_memory_before_the_second(tmp_path, notes):
    trainer = make_trainer(tmp_path, max_steps=3, save_steps=1, callbacks=[Changing(notes)])
    trainer.train()
    step = ["wait", "change", "save, later"]
    assert notes == [*step, "wait", "warm True", *step[1:], *step]


def test_training_waits_before_an_evaluation_that_may_swap_weights(tmp_path, notes):
    trainer = make_trainer(
        tmp_path,
        max_steps=1,
        save_steps=1,
        eval_strategy="epoch",
        eval_size=8,
        callbacks=[Changing(notes)],
    )
    trainer.train()
    assert notes[:4] == ["wait", "change", "save, later", "wait"]
    assert "evaluated" in notes[4:]


def test_overlap_can_be_left_out(tmp_path, notes):
    make_trainer(tmp_path, max_steps=1, save_steps=1, save_overlap=False).train()
    assert "save" in notes
    assert "save, later" not in notes


def test_a_run_that_never_saves_takes_no_memory_for_it(tmp_path, notes):
    make_trainer(tmp_path, max_steps=3, save_strategy="no").train()
    assert set(notes) == {"wait"}
