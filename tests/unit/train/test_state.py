from __future__ import annotations

import json

import pytest

from resilient.train.state import TrainerControl, TrainerState


def test_the_file_is_the_fields_own_format(tmp_path):
    path = tmp_path / "trainer_state.json"
    state = TrainerState(epoch=1.5, global_step=1500, log_history=[{"loss": 2.0, "step": 500}])
    state.save_to_json(path)
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert TrainerState.load_from_json(path) == state


def test_transformers_reads_our_file_and_we_read_theirs(tmp_path):
    theirs = pytest.importorskip("transformers.trainer_callback").TrainerState
    ours, back = tmp_path / "ours.json", tmp_path / "theirs.json"
    state = TrainerState(global_step=7, best_metric=0.5, log_history=[{"loss": 1.0}])
    state.save_to_json(ours)
    read = theirs.load_from_json(str(ours))
    assert read.global_step == 7
    read.save_to_json(str(back))
    assert TrainerState.load_from_json(back) == state


def test_a_field_of_a_newer_version_is_tolerated(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 3, "of_the_future": 1}))
    assert TrainerState.load_from_json(path).global_step == 3
    state = TrainerState()
    state.load_state_dict({"global_step": 3, "of_the_future": 1})
    assert state.global_step == 3


def test_every_rank_shows_the_same_state_and_keeps_its_own_place():
    zero, one = TrainerState(), TrainerState(is_world_process_zero=False)
    assert zero.state_dict() == one.state_dict()
    one.load_state_dict(zero.state_dict())
    assert not one.is_world_process_zero


def test_a_history_in_a_checkpoint_is_a_copy():
    state = TrainerState(log_history=[{"loss": 1.0}, {"of": [1]}])
    saved = state.state_dict()
    state.log_history.append({"loss": 2.0})
    state.log_history[0]["loss"] = 3.0
    state.log_history[1]["of"].append(2)
    assert saved["log_history"] == [{"loss": 1.0}, {"of": [1]}]


def test_only_flags_that_outlive_a_step_are_saved():
    control = TrainerControl(should_training_stop=True, should_save=True, should_log=True)
    other = TrainerControl()
    other.load_state_dict(control.state_dict())
    assert other == TrainerControl(should_training_stop=True)


def test_the_fields_and_what_they_are_at_first_are_those_of_the_field():
    theirs = pytest.importorskip("transformers.trainer_callback").TrainerState()
    ours, known = TrainerState(), vars(theirs)
    differing = {name for name in known if getattr(ours, name, "missing") != known[name]}
    assert differing <= {"train_batch_size"}  # a number from the start, where theirs is None
    assert (ours.logging_steps, ours.eval_steps, ours.save_steps) == (500, 500, 500)
    assert (ours.global_step, ours.epoch, ours.max_steps, ours.train_batch_size) == (0, 0.0, 0, 0)
    assert (ours.num_train_epochs, ours.log_history) == (0, [])
    assert ours.best_metric is ours.best_global_step is None
