"""The bar and the printer: what they show, from where they go on, and on which rank."""

from __future__ import annotations

import pytest

from resilient.train.arguments import TrainingArguments
from resilient.train.build_run import default_callbacks
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.callbacks.builtin import PrinterCallback, ProgressCallback
from resilient.train.state import TrainerState
from tests.unit.train.models import DieAfter, Dies, make_trainer


class Look(TrainerCallback):
    """Reads the bars before they are closed."""

    def __init__(self, progress):
        self.progress = progress
        self.bars = []
        self.predicted = 0

    def on_step_end(self, args, state, control, /, **_):
        bar = self.progress.training_bar
        self.bars.append((bar.initial, bar.n, bar.total))

    def on_prediction_step(self, args, state, control, /, **_):
        self.predicted = self.progress.prediction_bar.n

    def on_train_begin(self, args, state, control, /, **_):
        assert self.progress.training_bar.total == state.max_steps


def watched(folder, *more, **options):
    progress = ProgressCallback()
    look = Look(progress)
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 2, **options}
    callbacks = [progress, look, *more]
    return make_trainer(folder, callbacks=callbacks, **options), progress, look


def test_the_bar_moves_with_the_steps_and_shows_the_logs(tmp_path, repository, capsys):
    trainer, progress, look = watched(tmp_path, eval_strategy="epoch", eval_size=16)
    trainer.train()
    trainer.evaluate()
    assert look.bars == [(0, step, 4) for step in range(1, 5)]
    assert look.predicted == 2
    assert (progress.training_bar, progress.prediction_bar) == (None, None)
    said = capsys.readouterr().err
    assert "4/4" in said
    assert "loss=" in said
    assert "total_flos" not in said


def test_the_bar_goes_on_from_the_resumed_step(tmp_path, repository):
    trainer, _, _ = watched(tmp_path, DieAfter(3))
    with pytest.raises(Dies):
        trainer.train()
    trainer, _, look = watched(tmp_path)
    trainer.train()
    assert look.bars == [(2, 3, 4), (2, 4, 4)]


def test_other_ranks_have_no_bar():
    progress = ProgressCallback()
    away = TrainerState(is_world_process_zero=False, is_local_process_zero=False)
    progress.on_train_begin(None, away, None)
    progress.on_prediction_step(None, away, None, eval_dataloader=[1])
    progress.on_step_end(None, away, None)
    assert (progress.training_bar, progress.prediction_bar) == (None, None)


def test_a_long_text_is_not_shown_beside_the_bar(capsys):
    progress = ProgressCallback(max_str_len=9)
    state = TrainerState(max_steps=1)
    progress.on_train_begin(None, state, None)
    progress.on_log(None, state, None, logs={"text": "a" * 10, "loss": 0.123456})
    progress.on_train_end(None, state, None)
    said = capsys.readouterr().err
    assert "[10 characters, more than max_str_len 9]" in said
    assert "0.1235" in said


@pytest.mark.parametrize(("is_first", "lines"), [(True, 2), (False, 0)])
def test_the_printer_writes_logs_on_the_first_rank_of_each_host(capsys, is_first, lines):
    state = TrainerState(is_local_process_zero=is_first, is_world_process_zero=False)
    printer = PrinterCallback()
    printer.on_log(None, state, None, logs={"loss": 0.123456, "step": 3, "total_flos": 9})
    printer.on_log(None, state, None, logs={"loss": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == lines
    assert not said or said[0] == "{'loss': '0.1235', 'step': 3}"


@pytest.mark.parametrize(("disabled", "has_bar"), [(True, False), (False, True)])
def test_the_bar_is_there_unless_it_is_disabled(disabled, has_bar):
    made = default_callbacks(TrainingArguments(disable_tqdm=disabled), [])
    assert (ProgressCallback in made) is has_bar
