"""Hyper-parameter search: trials are trainings, and a search that is killed goes on."""

from __future__ import annotations

import json

import pytest
import torch

from resilient import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from resilient.errors import ConfigError
from resilient.train.search.optuna import OptunaStudy
from resilient.train.search.study import (
    BestRun,
    GivenTrial,
    TrialReporter,
    default_objective,
    default_space,
)
from resilient.train.state import TrainerControl, TrainerState
from tests.unit.train.models import DieAfter, Dies, Net, Noisy

optuna = pytest.importorskip("optuna")
optuna.logging.disable_default_handler()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("batch", [4, 8]),
    }


def make(folder, *, callbacks=(), kind=Trainer, model_init=Net, **options):
    options = {
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "disable_tqdm": True,
        **options,
    }
    return kind(
        args=TrainingArguments(str(folder), **options),
        model_init=model_init,
        train_dataset=Noisy(24),
        eval_dataset=Noisy(9, augment=False),
        callbacks=callbacks,
    )


def ended(folder):
    """Return what the trials of a study were, and how they ended."""
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    )
    study = optuna.load_study(study_name="search", storage=storage)
    return [(one.number, one.params, one.values, one.state.name) for one in study.trials]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
            patch.delenv(name, raising=False)
        best = make(folder).hyperparameter_search(space, n_trials=4)
    return folder, best


def test_every_trial_is_a_training_and_the_best_is_returned(unbroken):
    folder, best = unbroken
    trials = ended(folder)
    assert [number for number, *_ in trials] == [0, 1, 2, 3]
    assert {state for *_, state in trials} == {"COMPLETE"}
    assert isinstance(best, BestRun)
    assert best.objective == min(values[0] for _, _, values, _ in trials)
    assert best.hyperparameters == trials[int(best.run_id)][1]
    rates = {params["learning_rate"] for _, params, _, _ in trials}
    assert len(rates) == 4
    for number, params, _, _ in trials:
        (newest,) = (folder / f"run-{number}").glob("checkpoint-6-*")
        state = json.loads((newest / "trainer_state.json").read_text())
        assert state["is_hyper_param_search"]
        assert state["trial_params"] == params
        assert state["trial_name"] is None


class DieInTrial(DieAfter):
    """The process dies in the third training that it begins."""

    begun = 0

    def on_train_begin(self, args, state, control, /, **_):
        type(self).begun += 1

    def on_step_begin(self, args, state, control, /, **_):
        if type(self).begun == 3 and state.global_step == self.step:
            raise Dies("dead in the third trial")


def test_a_search_that_was_killed_goes_on_where_it_was(tmp_path, unbroken):
    DieInTrial.begun = 0
    with pytest.raises(Dies):
        make(tmp_path, callbacks=[DieInTrial(3)]).hyperparameter_search(space, n_trials=4)
    assert [state for *_, state in ended(tmp_path)] == ["COMPLETE", "COMPLETE", "RUNNING"]
    began = Began()
    best = make(tmp_path, callbacks=[began]).hyperparameter_search(space, n_trials=4)
    assert Began.steps == [2, 0]
    assert ended(tmp_path) == ended(unbroken[0])
    assert best[:3] == unbroken[1][:3]
    # Another start has nothing left to do.
    assert make(tmp_path).hyperparameter_search(space, n_trials=4)[:3] == best[:3]


class Began(TrainerCallback):
    steps: list[int] = []  # noqa: RUF012 - over all copies

    def on_train_begin(self, args, state, control, /, **_):
        self.steps.append(state.global_step)


class PrunesSecond(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return trial.number == 1


def test_a_trial_that_died_between_two_suggestions_gets_the_second_all_the_same(tmp_path):
    def both(trial):
        return trial.suggest_float("a", 0, 1), trial.suggest_float("b", 0, 1)

    unbroken = OptunaStudy(str(tmp_path / "unbroken"), 14, "minimize", 7)
    killed = OptunaStudy(str(tmp_path / "killed"), 14, "minimize", 7)
    for _ in range(14):  # TPE looks at what was after ten
        trial = unbroken.ask()
        expected = both(trial)
        killed.ask().suggest_float("a", 0, 1)
        killed = OptunaStudy(str(tmp_path / "killed"), 14, "minimize", 7)
        again = killed.ask()
        assert both(again) == expected
        assert expected[0] != expected[1]
        unbroken.tell(trial, [sum(expected)], pruned=False)
        killed.tell(again, [sum(expected)], pruned=False)


def test_a_trial_that_is_not_worth_its_time_ends_early(tmp_path):
    make(tmp_path).hyperparameter_search(space, n_trials=2, pruner=PrunesSecond())
    first, second = ended(tmp_path)
    assert (first[3], second[3]) == ("COMPLETE", "PRUNED")
    assert [one.name for one in (tmp_path / "run-1").glob("checkpoint-*")] == ["checkpoint-2-g1"]


def test_callbacks_begin_anew_in_each_trial(tmp_path):
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make(
        tmp_path, callbacks=[stopping], metric_for_best_model="loss", load_best_model_at_end=True
    )
    trainer.hyperparameter_search(space, n_trials=2)
    assert stopping.early_stopping_patience_counter == 0


def test_several_objectives_have_several_best_runs(tmp_path):
    runs = make(tmp_path).hyperparameter_search(
        space,
        compute_objective=lambda metrics: [metrics["eval_loss"], -metrics["eval_loss"]],
        direction=["minimize", "minimize"],
        n_trials=2,
    )
    assert {one.run_id for one in runs} == {"0", "1"}
    assert all(len(one.objective) == 2 for one in runs)


def sized(trial):
    model = Net()
    if trial is not None:
        model.layers[2].p = trial.suggest_float("dropout", 0.0, 0.9)
    return model


def test_what_is_for_the_model_goes_to_what_makes_it(tmp_path):
    seen = []

    class Looks(TrainerCallback):
        def on_train_begin(self, args, state, control, /, *, model, **_):
            seen.append(model.layers[2].p)

    trainer = make(tmp_path, model_init=sized, callbacks=[Looks])
    best = trainer.hyperparameter_search(
        lambda trial: {"dropout": trial.suggest_float("dropout", 0.0, 0.9)}, n_trials=1
    )
    assert seen == [best.hyperparameters["dropout"]]


def test_a_training_may_be_given_a_trial_as_a_dict(tmp_path, repository):
    trainer = make(tmp_path)
    first = trainer.model
    trainer.hp_name = lambda trial: f"rate {trial['learning_rate']}"
    trainer.train(trial={"learning_rate": 0.25, "max_steps": 3})
    assert trainer.model is not first
    assert trainer.state.global_step == 3
    assert trainer.state.trial_params == {"learning_rate": 0.25, "max_steps": 3}
    assert trainer.state.trial_name == "rate 0.25"
    plain = make(tmp_path / "plain", learning_rate=0.25, max_steps=3)
    repository.checkpoints.clear()
    plain.train()
    expected = plain.model.state_dict()
    found = trainer.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    assert not plain.state.is_hyper_param_search


def test_a_state_takes_the_length_and_the_trial_of_a_training():
    state = TrainerState()
    named = type("Named", (), {"hp_name": staticmethod(lambda trial: f"n{trial.number}")})()
    state.init_training_references(named, 9, 2, GivenTrial({"a": 1}, 7))
    assert (state.max_steps, state.num_train_epochs) == (9, 2)
    assert (state.is_hyper_param_search, state.trial_name) == (True, "n7")
    assert state.trial_params == {"a": 1}
    state.init_training_references(named, 9, 2, None)
    assert (state.is_hyper_param_search, state.trial_name, state.trial_params) == (
        False,
        None,
        None,
    )


def test_the_default_objective_is_the_loss_or_the_sum_of_the_metrics():
    loss = {"eval_loss": 0.5, "epoch": 1, "eval_runtime": 3, "eval_samples_per_second": 7}
    assert default_objective(loss) == 0.5
    assert default_objective({**loss, "eval_accuracy": 0.75, "eval_f1": 0.25}) == 1


def test_a_trial_whose_values_are_known_suggests_them():
    params = {"learning_rate": 1, "num_train_epochs": 2, "seed": 3}
    trial = GivenTrial({**params, "per_device_train_batch_size": 4})
    assert default_space(trial) == trial.params
    assert not trial.should_prune()
    with pytest.raises(ConfigError, match="suggest it in `hp_space`"):
        trial.suggest_int("depth", 1, 2)


def test_a_reporter_remembers_what_its_trial_was_told(tmp_path):
    reporter = TrialReporter(GivenTrial({}), default_objective, 1)
    reporter.on_evaluate(None, TrainerState(), TrainerControl(), metrics={"eval_loss": 0.5})
    reporter.pruned = True
    other = TrialReporter(GivenTrial({}), default_objective, 1)
    other.load_state_dict(reporter.state_dict())
    assert (other.values, other.pruned) == ([0.5], True)


class Two:
    """A study without a package: two rates, tried in turn."""

    def __init__(self):
        self.asked = [GivenTrial({"learning_rate": rate}, at) for at, rate in enumerate((0.1, 0.2))]
        self.told = []

    def ask(self):
        return self.asked.pop(0) if self.asked else None

    def tell(self, trial, values, *, pruned):
        self.told.append((trial.number, values, pruned))

    def best(self):
        return [BestRun(str(number), values[0], {}) for number, values, _ in sorted(self.told)]


def test_a_study_of_ones_own_is_searched_with(tmp_path):
    study = Two()
    best = make(tmp_path).hyperparameter_search(lambda trial: trial.params, backend=study)
    assert [number for number, _, _ in study.told] == [0, 1]
    assert best.objective == study.told[0][1][0]


@pytest.mark.parametrize(
    ("options", "search", "said"),
    [
        ({"model_init": None}, {}, "no model"),
        ({}, {"backend": "ray"}, "use 'optuna'"),
        ({}, {"hp_space": lambda _trial: {"learningrate": 1}}, "did you mean `learning_rate`"),
    ],
)
def test_what_a_search_cannot_do_is_said(tmp_path, options, search, said):
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, **options).hyperparameter_search(n_trials=1, **search)


def test_a_search_needs_what_makes_models_and_no_optimizer(tmp_path):
    with pytest.raises(ConfigError, match="needs `model_init`"):
        Trainer(Net(), TrainingArguments(str(tmp_path))).hyperparameter_search()
    with pytest.raises(ConfigError, match="both given"):
        Trainer(Net(), TrainingArguments(str(tmp_path)), model_init=Net)
    optimizers = (torch.optim.SGD(Net().parameters()), None)
    trainer = Trainer(args=TrainingArguments(str(tmp_path)), model_init=Net, optimizers=optimizers)
    with pytest.raises(ConfigError, match="omit `optimizers`"):
        trainer.hyperparameter_search()
    with pytest.raises(ConfigError, match="returned no model"):
        Trainer(args=TrainingArguments(str(tmp_path)), model_init=lambda: None)
