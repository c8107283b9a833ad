"""What each trial of a search takes over from the trainer that searches, and what it reports."""

from __future__ import annotations

import pytest
import torch

from resilient import EarlyStoppingCallback, Trainer
from resilient.errors import ConfigError
from resilient.train.search.study import BestRun, GivenTrial
from tests.unit.train.models import Net, Noisy
from tests.unit.train.test_search import Began, Two, make


class Sums:
    """A study of one trial, which remembers what was reported."""

    def __init__(self):
        self.trial = GivenTrial({"learning_rate": 0.1})
        self.trial.report = lambda value, step: self.reported.append((step, value))
        self.asked = [self.trial]
        self.reported, self.told = [], []

    def ask(self):
        return self.asked.pop(0) if self.asked else None

    def tell(self, trial, values, *, pruned):
        self.told.append(values)

    def best(self):
        return [BestRun("0", self.told[0][0], {})]


def test_the_objective_is_one_of_all_datasets_that_are_evaluated(tmp_path):
    study, seen = Sums(), []

    def objective(metrics):
        seen.append({name for name in metrics if name.endswith("_loss")})
        return metrics["eval_near_loss"] + 2 * metrics["eval_near_far_loss"]

    trainer = make(tmp_path)
    trainer.eval_dataset = trainer.made_with["eval_dataset"] = {
        "near_far": Noisy(5, augment=False),
        "near": Noisy(9, augment=False),
    }
    best = trainer.hyperparameter_search(
        lambda trial: trial.params, compute_objective=objective, backend=study
    )
    assert [step for step, _ in study.reported] == [2, 4, 6]
    assert seen == [{"eval_near_loss", "eval_near_far_loss"}] * 3
    assert study.told == [[study.reported[-1][1]]]
    assert best.objective == study.reported[-1][1]


def test_callbacks_that_were_added_or_removed_later_are_so_in_each_trial(tmp_path):
    Began.steps.clear()
    stopping = EarlyStoppingCallback()
    trainer = make(tmp_path, callbacks=[stopping])  # which would refuse to train
    trainer.add_callback(Began())
    trainer.pop_callback(stopping)
    trainer.hyperparameter_search(lambda trial: trial.params, backend=Two())
    assert Began.steps == [0, 0]


class Registers(Trainer):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register("mine", Net())


def test_what_is_registered_with_the_pattern_alone_is_refused(tmp_path):
    trainer = make(tmp_path, kind=Registers, max_steps=1)
    trainer.hyperparameter_search(lambda trial: trial.params, backend=Two())
    trainer.register("more", Net())
    with pytest.raises(ConfigError, match="`more` is registered with the trainer"):
        trainer.hyperparameter_search(lambda trial: trial.params, backend=Two())


def test_without_evaluations_a_trial_is_judged_by_its_end(tmp_path):
    study = Two()
    make(tmp_path, eval_strategy="no", max_steps=2).hyperparameter_search(
        lambda trial: trial.params, backend=study
    )
    values = [value for _, [value], _ in study.told]
    assert len(set(values)) == 2
    assert min(values) > 0


def test_each_trial_has_a_repository_of_its_own(tmp_path):
    places = {"repo": str(tmp_path / "far"), "near_repo": str(tmp_path / "near")}
    make(tmp_path / "out", max_steps=2, **places).hyperparameter_search(
        lambda trial: trial.params, backend=Two()
    )
    for place in places.values():
        found = sorted(one.parent.name for one in (tmp_path / place).glob("*/checkpoint-2-g1"))
        assert found == ["run-0", "run-1"]


def test_a_second_training_with_a_trial_begins_as_the_first_did(tmp_path, repository):
    trainer, ends = make(tmp_path), []
    for _ in range(2):
        repository.checkpoints.clear()
        trainer.train(resume_from_checkpoint=False, trial={"learning_rate": 0.25, "max_steps": 3})
        ends.append([one.clone() for one in trainer.model.parameters()])
    assert all(map(torch.equal, *ends))
    assert not any(map(torch.equal, ends[0], Net().parameters()))
