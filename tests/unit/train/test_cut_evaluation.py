"""A stop in the middle of an evaluation: saved at once, and the next life makes the evaluation."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed
from resilient.errors import Preempted
from resilient.storage.open import open_store
from resilient.train.callbacks.base import TrainerCallback
from tests.helpers.endings import differences, ending
from tests.unit.train.models import make_trainer

KINDS = {
    "steps": {"eval_strategy": "steps", "eval_steps": 5},
    "epochs": {"eval_strategy": "epoch"},
    "best model": {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "load_best_model_at_end": True,
    },
    "plateau": {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "lr_scheduler_type": "reduce_lr_on_plateau",
    },
    "in bfloat16": {"eval_strategy": "steps", "eval_steps": 5, "bf16_full_eval": True},
}


class StopInEvaluation(TrainerCallback):
    """Asks all ranks to stop after some batches of an evaluation, and counts what comes after."""

    def __init__(self, batches):
        self.trainer = None
        self.batches = batches
        self.seen = 0

    def on_prediction_step(self, args, state, control, /, **_):
        self.seen += 1
        if self.seen == self.batches:
            self.trainer._gate.request_stop("notice")


def train(folder, *batches, **options):
    """Train through stops after so many batches of evaluation, and then to the end."""
    stopped = []
    for count in batches:
        callback = StopInEvaluation(count)
        trainer = make_trainer(folder, callbacks=[callback], eval_size=23, **options)
        callback.trainer = trainer
        with pytest.raises(Preempted):
            trainer.train()
        assert callback.seen == count, "not one batch more"
        assert trainer.model.training
        stopped.append(trainer.state.global_step)
    make_trainer(folder, eval_size=23, **options).train()
    return stopped


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_ends_with_the_bits_and_the_history_of_an_unbroken_one(tmp_path, kind):
    train(tmp_path / "unbroken", **KINDS[kind])
    batches = (1, 5) if kind == "epochs" else (1, 9, 3)
    stopped = train(tmp_path / "cut", *batches, **KINDS[kind])
    assert differences(ending(tmp_path / "cut"), ending(tmp_path / "unbroken")) == []
    steps = {one.step for one in committed(open_store(str(tmp_path / "cut")))}
    assert stopped[-1] in steps or kind == "best model"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [(), (1,), (2, 1)], ids=str)
def test_so_does_one_that_was_stopped_in_its_last_evaluation(tmp_path, kind, again):
    first, length = (2, {"num_train_epochs": 1}) if kind == "epochs" else (5, {"max_steps": 10})
    options = {**KINDS[kind], **length}
    train(tmp_path / "unbroken", **options)
    stopped = train(tmp_path / "cut", first, *again, **options)
    assert stopped == [13 if kind == "epochs" else 10] * (1 + len(again))
    assert differences(ending(tmp_path / "cut"), ending(tmp_path / "unbroken")) == []


def test_a_stop_in_an_evaluation_at_the_start_saves_nothing_and_begins_again(tmp_path):
    options = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 5}
    train(tmp_path / "unbroken", **options)
    assert train(tmp_path / "cut", 2, **options) == [0]
    assert differences(ending(tmp_path / "cut"), ending(tmp_path / "unbroken")) == []


def test_an_evaluation_of_the_users_own_call_is_not_cut(tmp_path):
    trainer = make_trainer(tmp_path, eval_size=23)
    assert trainer._gate is None
    assert "eval_loss" in trainer.evaluate()
