"""A run of Transformers becomes one of ours, once, and is then as safe as any."""

from __future__ import annotations

import shutil

import pytest
import torch
from hf_runs import EVAL, checkpoint_of, make, recorded
from models import DieAfter, Dies

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.train.data.drawing import draw_for_loader
from resilient.train.data.sampling import Cursor

EVALUATED = {**EVAL, "greater_is_better": False}


def trainer(folder, *, callbacks=(), **options):
    made = make("reg_sgd", folder, callbacks=callbacks, **options)
    if "eval_strategy" in options:
        made.eval_dataset = made.train_dataset
    return made


@pytest.fixture
def whole(tmp_path, theirs):
    """Return a run that was taken over and never died; its evaluations draw as theirs do."""
    run = trainer(tmp_path / "whole", **EVALUATED)
    run.train(str(theirs))
    return run


def test_a_run_goes_on_with_its_samples_and_its_schedule(tmp_path, theirs):
    run = trainer(tmp_path / "out")
    run.train(theirs)
    expected = recorded("reg_sgd")
    assert [one for one, _ in run.seen] == [one for one, _ in expected["seen"][7:]]
    rates = [one["learning_rate"] for one in run.state.log_history if "loss" in one]
    assert rates == [one["learning_rate"] for one in expected["log_history"] if "loss" in one]
    losses = [float.fromhex(one) for _, one in run.seen]
    assert losses == pytest.approx([float.fromhex(one) for _, one in expected["seen"][7:]], 1e-4)


@pytest.mark.parametrize("dies_after", [9, 20, 27])
def test_a_run_that_dies_afterwards_ends_as_one_that_did_not(tmp_path, theirs, whole, dies_after):
    out, losses = tmp_path / "out", {}
    for callbacks in ([DieAfter(dies_after)], []):
        run = trainer(out, callbacks=callbacks, **EVALUATED)
        if callbacks:
            with pytest.raises(Dies):
                run.train(theirs)
        else:
            # The same command again; what it came from is not needed any more.
            shutil.move(theirs, theirs.parent / "gone")
            run.train()
        first = run.state.global_step - len(run.seen)
        losses |= {first + nth: one for nth, one in enumerate(run.seen)}
    assert list(losses.values()) == whole.seen
    assert torch.equal(run.model.lin.weight, whole.model.lin.weight)
    assert run.state.log_history[-3] == whole.state.log_history[-3]


def test_random_numbers_are_drawn_for_a_loader_as_theirs_and_only_then():
    def left(origin):
        torch.manual_seed(3)
        draw_for_loader(Cursor(8, 0, origin=origin))
        return torch.get_rng_state()

    untouched = torch.manual_seed(3).get_state()
    torch.utils.data.DataLoader([1]).__iter__()  # draws one number for its workers
    assert torch.equal(left({"trainer": "transformers"}), torch.get_rng_state())
    assert torch.equal(left(None), untouched)


def test_the_same_request_again_goes_on_from_what_is_newest(tmp_path, theirs):
    out = tmp_path / "out"
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieAfter(16)]).train(theirs)
    run = trainer(out)
    run.train(theirs)
    assert len(run.seen) == 40 - 14


def test_a_repository_of_another_run_is_refused(tmp_path, theirs):
    out = tmp_path / "out"
    trainer(out, max_steps=2).train()
    with pytest.raises(ConfigError, match="did not begin from it"):
        trainer(out).train(theirs)


def test_parts_that_they_know_nothing_of_begin_as_they_are(tmp_path, theirs):
    class Count:
        number = 5

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            self.number = state["number"]

    run, mine = trainer(tmp_path / "out"), Count()
    run.register("mine", mine)
    run.train(theirs)
    assert mine.number == 5


def test_nothing_is_taken_over_when_it_is_damaged_or_of_another_model(tmp_path, theirs):
    (theirs / "optimizer.pt").unlink()
    with pytest.raises(IncompatibleCheckpoint, match=r"no optimizer\.pt"):
        trainer(tmp_path / "out").train(theirs)
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    with pytest.raises(IncompatibleCheckpoint, match="groups of"):
        trainer(tmp_path / "out").train(checkpoint_of("gpt2_all", 8))


def test_another_training_set_is_refused(tmp_path, theirs):
    run = trainer(tmp_path / "out")
    run.train_dataset = make("gpt2_ga_uneven", tmp_path / "other").train_dataset
    with pytest.raises(IncompatibleCheckpoint, match="was trained on another one"):
        run.train(theirs)


def test_more_samples_per_step_lose_and_repeat_none(tmp_path, theirs):
    run = trainer(tmp_path / "out", per_device_train_batch_size=8)
    run.train(theirs)
    taken = [one for indices, _ in recorded("reg_sgd")["seen"][:7] for one in indices]
    rest = [one for indices, _ in run.seen for one in indices]
    assert sorted(taken + rest[: 80 - len(taken)]) == list(range(80))
