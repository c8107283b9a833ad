from __future__ import annotations

import json

import pytest
import torch

from resilient.errors import ConfigError, IncompatibleCheckpoint, Preempted, SaveFailed
from resilient.format.state_json import JsonRows
from resilient.strategies.gradient_compression import PARTS
from resilient.strategies.pipeline import RANDOM
from resilient.train.build_run import RESERVED
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.canonical_reduction import REDUCTION
from resilient.train.model.artifacts import SIDECAR_FILES
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import equal
from tests.unit.train.models import Net, make_trainer

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "eval_size": 8,
    "learning_rate": 1.0,
    "load_best_model_at_end": True,
    "greater_is_better": True,  # the "best" is then not the last
}


def steps(repository):
    return [one.step for one in sorted(repository.checkpoints)]


def test_saves_fall_on_their_steps_and_on_the_last(tmp_path, repository):
    make_trainer(tmp_path, num_train_epochs=1).train()
    assert steps(repository) == [4, 8, 12, 13]
    assert repository.closed == 1


@pytest.mark.parametrize(("strategy", "expected"), [("epoch", [13, 26]), ("no", [])])
def test_other_strategies(tmp_path, repository, strategy, expected):
    make_trainer(tmp_path, save_strategy=strategy).train()
    assert steps(repository) == expected


def test_a_checkpoint_says_what_it_is(tmp_path, repository):
    make_trainer(tmp_path, max_steps=4, gradient_accumulation_steps=2).train()
    about = repository.abouts[max(repository.checkpoints)]
    assert about.strategy == "single"
    assert json.loads(json.dumps(about.config))["max_steps"] == 4
    assert about.data == {
        "epoch": 0,
        "samples": 32,
        "seed": 42,
        "dataset_size": 50,
        "global_batch": 8,
    }


def test_the_best_model_is_kept_and_loaded(tmp_path, repository):
    trainer = make_trainer(tmp_path, **BEST)
    trainer.train()
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    best = max(losses, key=losses.get)
    assert best != trainer.state.global_step, "the test needs a run that gets worse"
    assert trainer.state.best_global_step == best
    assert trainer.state.best_metric == losses[best]
    assert trainer.state.best_model_checkpoint == f"checkpoint-{best}"
    [held] = [one for one in repository.checkpoints if one.step == best]
    assert repository.kept[-1] == (held,)
    assert equal(dict(trainer.model.state_dict()), repository.checkpoints[held]["model"])


def test_strategy_best_saves_only_what_is_better_and_the_end(tmp_path, repository):
    trainer = make_trainer(tmp_path, **{**BEST, "save_strategy": "best"})
    trainer.train()
    best, rises = float("-inf"), []
    for entry in trainer.state.log_history:
        if entry.get("eval_loss", best) > best:
            best = entry["eval_loss"]
            rises.append(entry["step"])
    assert steps(repository) == sorted({*rises, trainer.state.global_step})


def test_a_best_model_that_is_gone_is_told_and_nothing_else(tmp_path, repository, capsys):
    class Vandal(TrainerCallback):
        def on_save(self, args, state, control, /, **_):
            if state.global_step == state.max_steps:
                last = max(repository.checkpoints)
                repository.checkpoints = {last: repository.checkpoints[last]}

    make_trainer(tmp_path, callbacks=[Vandal()], **BEST).train()
    assert "the best model was not loaded" in capsys.readouterr().err


def test_a_damaged_best_model_is_told_and_the_run_is_finished(tmp_path, repository, capsys):
    first = make_trainer(tmp_path, **BEST)
    first.train()
    newest = max(repository.checkpoints)
    repository.damaged = {*repository.checkpoints} - {newest}
    again = make_trainer(tmp_path, **BEST)
    assert again.train().global_step == first.state.global_step
    said = capsys.readouterr().err
    assert f"the best model was not loaded: `{first.state.best_model_checkpoint}-g1/" in said
    assert "content is not what was committed; the last weights stay" in said
    assert equal(dict(again.model.state_dict()), repository.checkpoints[newest]["model"])


def test_a_best_model_that_was_never_saved_is_told(tmp_path, repository, capsys):
    trainer = make_trainer(tmp_path, **{**BEST, "save_steps": 4, "max_steps": 8})
    rising = iter([1.0, 2.0, 5.0, 3.0])
    trainer.evaluate = lambda **_: {"eval_loss": next(rising)}
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_model_checkpoint) == (
        6,
        "checkpoint-4",
    )
    assert (
        "the best model is of step 6, which was not saved; these weights are of checkpoint-4-g1"
    ) in (capsys.readouterr().err)
    [held] = [one for one in repository.checkpoints if one.step == 4]
    assert equal(dict(trainer.model.state_dict()), repository.checkpoints[held]["model"])


def test_a_metric_that_nobody_computes_is_named(tmp_path, repository):
    with pytest.raises(ConfigError, match="`eval_accuracy` is not one of"):
        make_trainer(tmp_path, **BEST, metric_for_best_model="accuracy").train()


def test_a_failed_save_stops_training_at_the_next(tmp_path, repository):
    repository.failing_saves = [8]
    trainer = make_trainer(tmp_path)
    with pytest.raises(SaveFailed):
        trainer.train()
    assert trainer.state.global_step == 12
    assert steps(repository) == [4]


def test_or_it_goes_on_and_loses_only_that_one(tmp_path, repository, capsys):
    repository.failing_saves = [8]
    make_trainer(tmp_path, on_save_failure="continue", num_train_epochs=1).train()
    assert steps(repository) == [4, 12, 13]
    assert "continued without a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_last_save_that_fails_is_never_success(tmp_path, repository, policy):
    repository.failing_saves = [13]
    with pytest.raises(SaveFailed):
        make_trainer(tmp_path, on_save_failure=policy, num_train_epochs=1).train()


class Asks(TrainerCallback):
    """What a signal does, at a known step."""

    def on_step_end(self, args, state, control, /, **_):
        if state.global_step == 6:
            self.gate.request_stop("SIGTERM")


def test_a_request_to_stop_saves_this_step_and_says_so(tmp_path, repository, monkeypatch):
    from resilient.train import session

    asks = Asks()
    make_gate = session.Session.stop_gate

    def spy(self, topic):
        asks.gate = make_gate(self, topic)
        return asks.gate

    monkeypatch.setattr(session.Session, "stop_gate", spy)
    trainer = make_trainer(tmp_path, callbacks=[asks])
    with pytest.raises(Preempted, match="after step 6: SIGTERM") as raised:
        trainer.train()
    assert raised.value.exit_code == 75
    assert steps(repository) == [4, 6]
    straight = make_trainer(tmp_path)
    straight.train()
    unbroken = make_trainer(tmp_path / "other")
    unbroken.train(resume_from_checkpoint=False)
    assert equal(dict(straight.model.state_dict()), dict(unbroken.model.state_dict()))


def test_a_stop_whose_save_fails_is_a_failed_save(tmp_path, repository, monkeypatch):
    from resilient.train import session

    asks = Asks()
    make_gate = session.Session.stop_gate
    monkeypatch.setattr(
        session.Session,
        "stop_gate",
        lambda self, topic: asks.__dict__.setdefault("gate", make_gate(self, topic)),
    )
    repository.failing_saves = [6]
    with pytest.raises(SaveFailed):
        make_trainer(tmp_path, callbacks=[asks]).train()


def test_data_of_another_size_is_refused(tmp_path, repository):
    make_trainer(tmp_path, max_steps=4).train()
    with pytest.raises(IncompatibleCheckpoint, match="50 samples, but this set has 60"):
        make_trainer(tmp_path, size=60).train()


def test_a_part_that_is_new_starts_fresh_and_is_named(tmp_path, repository, capsys):
    make_trainer(tmp_path, max_steps=4).train()
    trainer = make_trainer(tmp_path, max_steps=8)
    trainer.register("extra", Net())
    trainer.train()
    assert "started from their initial state: extra" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="`extra` is already registered"):
        trainer.register("extra", Net())


def test_the_names_of_our_own_parts_are_reserved_all_of_them(tmp_path, repository):
    trainer = make_trainer(tmp_path, max_steps=1, fp16=True)
    trainer.train()
    # On a CPU there is no scaler, nothing is compressed, cut or reduced on one rank, and this model
    # has no papers; losses are judged where `rollback_on` asks for it.
    others = {"scaler", "losses", RANDOM, REDUCTION, *PARTS, *SIDECAR_FILES}
    ours = repository.checkpoints[max(repository.checkpoints)].keys() | others
    assert ours == set(RESERVED)
    for name in ours:
        with pytest.raises(ConfigError, match=f"cannot register `{name}`: .*reserved: model, "):
            trainer.register(name, Net())


def test_a_checkpoint_holds_no_time_and_no_generation_in_the_state(tmp_path, repository):
    trainer = make_trainer(tmp_path, **BEST)
    trainer.train()
    saved = repository.checkpoints[max(repository.checkpoints)]["trainer_state"]
    text = json.dumps(saved, default=JsonRows.trees)
    assert "runtime" not in text
    assert "per_second" not in text
    assert "-g1" not in text


def test_weights_are_written_in_a_format_others_read(tmp_path, repository):
    load_file = pytest.importorskip("safetensors.torch").load_file
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], one) for name, one in trainer.model.state_dict().items())
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2


def test_the_public_trainer_is_this_one():
    import resilient

    assert resilient.Trainer is Trainer
