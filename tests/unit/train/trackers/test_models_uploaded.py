"""Models reach trackers only from committed checkpoints, and harm nothing where they do not."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from resilient.checkpoint.catalog import committed
from resilient.storage.local import LocalStore
from resilient.train.trackers import Reporting, Tracker, reporting
from resilient.train.trackers.reporting import ModelNotUploaded
from tests.unit.train.models import DieAfter, Dies, make_trainer


class Cabinet(Tracker):
    """Keeps what it got, and whether the checkpoint was committed by then."""

    name = "cabinet"

    def __init__(self, folder, when="checkpoint", seen=None):
        self._store, self._when = LocalStore(folder), when
        self.seen = [] if seen is None else seen

    def start(self, opening):
        self.run_id = opening.run_id or "one"

    def log(self, metrics, step):
        pass

    def wants_models(self):
        return self._when

    def log_model(self, model):
        assert model.checkpoint in committed(self._store)
        weights = load_file(model.folder / "model.safetensors")
        self.seen.append((model.checkpoint.step, model.is_final, weights, model))


class Refusing(Cabinet):
    def log_model(self, model):
        raise OSError("the network is down")


def train(folder, tracker, die_at=0, *, events=None, **options):
    callbacks = [Reporting(tracker), *([DieAfter(die_at)] if die_at else [])]
    trainer = make_trainer(folder, callbacks=callbacks, save_overlap=False, **options)
    if events is not None:
        trainer.callback_handler.context["emit"] = events.append
    if die_at:
        with pytest.raises(Dies):
            trainer.train()
    else:
        trainer.train()
    return trainer


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    # Real lives are processes; in this one what a life left in its inbox is sent.
    monkeypatch.setattr(reporting, "_CUT_SECONDS", 60.0)


def test_every_committed_checkpoint_is_given_once_and_the_last_is_final(tmp_path):
    trainer = train(tmp_path, cabinet := Cabinet(tmp_path))
    steps = [(step, is_final) for step, is_final, *_ in cabinet.seen]
    assert steps == [*((step, False) for step in range(4, 26, 4)), (26, True)]
    last = cabinet.seen[-1][2]
    assert all(torch.equal(one, last[name]) for name, one in trainer.model.state_dict().items())
    assert not torch.equal(last["layers.0.weight"], cabinet.seen[0][2]["layers.0.weight"])
    assert cabinet.seen[-1][3].epoch == 2
    assert not cabinet.seen[-1][3].folder.exists()


def test_at_the_end_is_only_at_the_end_and_the_best_is_final(tmp_path):
    how = {"eval_strategy": "steps", "eval_steps": 4, "eval_size": 7, "save_total_limit": 2}
    train(tmp_path, cut := Cabinet(tmp_path, "end"), die_at=14, **how)
    assert cut.seen == []
    best = train(
        tmp_path,
        cabinet := Cabinet(tmp_path, "end"),
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the best is not the last
        resume_changes="all",
        **how,
    ).state.best_global_step
    assert best < 26
    assert [(step, is_final) for step, is_final, *_ in cabinet.seen] == [(best, True)]


def test_a_life_sends_what_a_kill_kept_back_and_nothing_of_an_abandoned_one(tmp_path):
    train(tmp_path, first := Cabinet(tmp_path), die_at=14)
    train(tmp_path, second := Cabinet(tmp_path), die_at=18)
    # Here a thread of the first life may outlive it by what it is giving just then.
    given = {step for step, *_ in first.seen}
    assert {4, 8, 12} <= given | {step for step, *_ in second.seen}
    generations = {step: model.checkpoint.generation for step, _, _, model in second.seen}
    assert generations.get(16, 2) == 2
    # Back to 8: what came after it is another line.
    callbacks = [Reporting(third := Cabinet(tmp_path))]
    trainer = make_trainer(tmp_path, callbacks=callbacks, save_overlap=False)
    trainer.train("checkpoint-8-g1")
    later = [model.checkpoint for *_, model in third.seen if model.checkpoint.step > 8]
    assert {one.generation for one in later} == {3}
    assert [one.step for one in later] == [12, 16, 20, 24, 26]


def test_what_a_tool_took_in_no_earlier_life_is_sent_by_the_next(tmp_path):
    train(tmp_path, Refusing(tmp_path), die_at=10)
    train(tmp_path, Refusing(tmp_path), die_at=14)
    train(tmp_path, cabinet := Cabinet(tmp_path), max_steps=16)
    assert [step for step, *_ in cabinet.seen] == [4, 8, 12, 16]


def test_what_was_abandoned_meanwhile_is_not_sent_with_what_is_owed(tmp_path):
    train(tmp_path, Refusing(tmp_path), die_at=14)
    trainer = make_trainer(
        tmp_path,
        callbacks=[Reporting(Refusing(tmp_path)), DieAfter(14)],
        save_overlap=False,
    )
    with pytest.raises(Dies):
        trainer.train("checkpoint-8-g1")
    train(tmp_path, cabinet := Cabinet(tmp_path), max_steps=16)
    given = [model.checkpoint.folder for *_, model in cabinet.seen]
    assert given == ["checkpoint-4-g1", "checkpoint-8-g1", "checkpoint-12-g2", "checkpoint-16-g3"]


def test_to_a_tool_that_no_earlier_life_had_only_this_life_is_sent(tmp_path):
    with pytest.raises(Dies):
        make_trainer(tmp_path, callbacks=[DieAfter(10)], save_overlap=False).train()
    train(tmp_path, Refusing(tmp_path), die_at=14)
    train(tmp_path, cabinet := Cabinet(tmp_path), max_steps=16)
    assert [step for step, *_ in cabinet.seen] == [12, 16]


def test_a_tool_that_is_slow_is_given_the_last_model_once(tmp_path):
    """Its thread comes to what an earlier save put there when the last is committed."""

    class Slow(Cabinet):
        def log_model(self, model):
            until = time.monotonic() + 60
            while committed(self._store)[0].step < 12 and time.monotonic() < until:
                time.sleep(0.01)
            super().log_model(model)

    train(tmp_path, cabinet := Slow(tmp_path), max_steps=12)
    assert [(step, is_final) for step, is_final, *_ in cabinet.seen] == [
        (4, False),
        (8, False),
        (12, True),
    ]


def test_a_checkpoint_that_is_not_committed_is_not_given(tmp_path, monkeypatch):
    """The manifest of step 8 waits until training is cut off."""
    may_commit = threading.Event()
    put_new = LocalStore.put_new

    def held_up(self, key, data):
        if key.startswith("checkpoint-8-") and key.endswith("manifest.json"):
            may_commit.wait(60)
        return put_new(self, key, data)

    monkeypatch.setattr(LocalStore, "put_new", held_up)
    cabinet = Cabinet(tmp_path)
    seen_at_10 = []

    class Release(DieAfter):
        def on_step_begin(self, args, state, control, /, **_):
            if state.global_step == 10:
                seen_at_10.extend(step for step, *_ in cabinet.seen)
                may_commit.set()

    make_trainer(
        tmp_path, callbacks=[Reporting(cabinet), Release(0)], save_overlap=False, max_steps=12
    ).train()
    assert set(seen_at_10) <= {4}
    assert [step for step, *_ in cabinet.seen] == [4, 8, 12]


def test_a_tool_that_takes_no_model_is_told_of_and_ends_nothing(tmp_path):
    events = []
    trainer = train(tmp_path, Refusing(tmp_path), events=events, max_steps=12)
    assert trainer.state.global_step == 12
    assert committed(LocalStore(tmp_path))[0].step == 12


def test_a_model_that_was_rotated_away_is_passed_over(tmp_path):
    how = {"save_total_limit": 1, "save_steps": 2}
    train(tmp_path, cabinet := Cabinet(tmp_path), **how)
    assert cabinet.seen[-1][:2] == (26, True)
    (line,) = [ModelNotUploaded("t", "OSError: x").message()]
    assert "training and checkpoints are not affected" in line
