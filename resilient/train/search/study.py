"""Trials and studies of a hyper-parameter search, and the search loop.

Each trial trains into its own folder, ``<output_dir>/run-<number>``, so a trial resumes like any
training. The study records the trials and their results. A search that was killed therefore
continues where it stopped.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch.utils.data import Dataset

from resilient.distributed.coordination import RankFailure, capture_failure
from resilient.errors import ConfigError
from resilient.train.arguments.choices import did_you_mean
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.evaluation.gather import gather_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.train.arguments import TrainingArguments

# Suffixes of evaluation metrics that do not measure the model.
_NO_MEASURES = ("_runtime", "_per_second", "_model_preparation_time")


def argument_values(
    params: Mapping[str, Any], args: TrainingArguments, model_init: Callable[..., Any] | None
) -> dict[str, Any]:
    """Return the ``params`` that are arguments; the others are for ``model_init(trial)``.

    Raises:
        ConfigError: There are others, and ``model_init`` does not take a trial.
    """
    names = [field.name for field in fields(args)]
    unknown_names = [name for name in params if name not in names]
    if unknown_names and not (model_init and takes_trial(model_init)):
        raise ConfigError(
            f"`hp_space` returns `{unknown_names[0]}`, which is not a training "
            f"argument{did_you_mean(unknown_names[0], names)}: `model_init(trial)` takes values "
            "for the model"
        )
    return {name: value for name, value in params.items() if name in names}


def default_objective(metrics: Mapping[str, Any]) -> float:
    """Return the sum of the metrics, or the loss if it is the only one (Transformers' rule)."""
    measures = [
        value
        for name, value in metrics.items()
        if name not in ("epoch", "eval_loss") and not name.endswith(_NO_MEASURES)
    ]
    value = sum(measures) if measures else metrics.get("eval_loss", math.nan)
    return float(value)


def default_space(trial: Any) -> dict[str, Any]:
    """Return Transformers' default search space: learning rate, epochs, seed and batch size."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical(
            "per_device_train_batch_size", [4, 8, 16, 32, 64]
        ),
    }


def params_of(trial: Any) -> dict[str, Any]:
    """Return the values of a trial; the trial comes from a study or is a dict."""
    return dict(trial if isinstance(trial, Mapping) else trial.params)


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Return whether ``model_init`` has a parameter ``trial`` or any required parameter."""
    parameters = inspect.signature(model_init).parameters
    return any(
        name == "trial" or value.default is value.empty for name, value in parameters.items()
    )


def call_model_init(model_init: Callable[..., Any], trial: Any) -> Any:
    """Return a new model, made with the trial if ``model_init`` takes one.

    Raises:
        ConfigError: ``model_init`` returned no model.
    """
    model = model_init(trial) if takes_trial(model_init) else model_init()
    if model is None:
        raise ConfigError("`model_init` returned no model")
    return model


class BestRun(NamedTuple):
    """Result of a search.

    Attributes:
        run_id: Number of the trial.
        objective: Its value or values.
        hyperparameters: Values that it was trained with.
        run_summary: The study, for details.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


class Trial(Protocol):
    """One set of hyper-parameters, as ``hp_space`` and ``model_init`` get it (Optuna's names).

    ``params`` contains the values suggested so far.
    """

    number: int
    params: Any

    def suggest_float(self, name: str, low: float, high: float, **more: Any) -> float:
        """Choose a number."""

    def suggest_int(self, name: str, low: int, high: int, **more: Any) -> int:
        """Choose a whole number."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Choose one of several."""

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value of the trial."""

    def should_prune(self) -> bool:
        """Return whether the trial should stop early."""


class Study(Protocol):
    """Source of trials; a durable study lets a killed search continue."""

    def ask(self) -> Any:
        """Return a trial whose end is not recorded, else a new trial; None if there are enough."""

    def tell(self, trial: Any, values: list[float], *, pruned: bool) -> None:
        """Record the end of a trial."""

    def best(self) -> list[BestRun]:
        """Return the best run; with several objectives, all runs that no other run dominates."""


class GivenTrial:
    """Trial with known values, for ranks without a study and for scripts.

    Args:
        params: Values by name.
        number: Number of the trial.
    """

    def __init__(self, params: Mapping[str, Any], number: int = 0) -> None:
        self.number = number
        self.params = dict(params)

    def suggest_float(self, name: str, *_range: Any, **_more: Any) -> Any:
        """Return the known value.

        Raises:
            ConfigError: There is no value of this name.
        """
        if name not in self.params:
            raise ConfigError(
                f"the trial has no `{name}`: suggest it in `hp_space`, which is asked first"
            )
        return self.params[name]

    suggest_int = suggest_categorical = suggest_float

    def report(self, value: float, step: int) -> None:
        """Do nothing."""

    def should_prune(self) -> bool:
        """Return False."""
        return False


class TrialReporter(TrainerCallback):
    """Reporter of each evaluation to its trial, which also stops a pruned training.

    Args:
        trial: Receives the objective.
        compute_objective: Function from metrics to the objective.
        ranks: Number of ranks that decide together.
        last: Name of the dataset evaluated last, if there are several. The objective is computed
            from all their metrics.
    """

    def __init__(
        self,
        trial: Any,
        compute_objective: Callable[[dict[str, Any]], Any],
        ranks: int,
        last: str | None = None,
    ) -> None:
        self.values: list[float] = []
        self.pruned = False
        self._trial = trial
        self._compute_objective = compute_objective
        self._ranks = ranks
        self._last = last
        self._metrics: dict[str, Any] = {}

    def on_evaluate(self, _args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
        """Report the metrics; all ranks follow rank 0's study."""
        self._metrics |= kwargs["metrics"]
        if self._last is not None and f"eval_{self._last}_runtime" not in kwargs["metrics"]:
            return  # more datasets of the same evaluation follow
        metrics, self._metrics = self._metrics, {}
        self.take(metrics)
        if len(self.values) > 1:
            return  # a trial with several objectives is never pruned
        self.pruned = from_first(partial(self._report, state.global_step), self._ranks)
        control.should_training_stop |= self.pruned

    def _report(self, step: int) -> bool:
        self._trial.report(self.values[0], step=step)
        return bool(self._trial.should_prune())

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Compute the objective of the newest evaluation."""
        objective = self._compute_objective(dict(metrics))
        self.values = [
            float(value)
            for value in ([objective] if isinstance(objective, (int, float)) else objective)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return whether the trial was pruned, and its last objective."""
        return {"values": self.values, "pruned": self.pruned}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result, because an attempt without remaining steps evaluates nothing."""
        self.values = list(state_dict["values"])
        self.pruned = bool(state_dict["pruned"])


def from_first(work: Callable[[], Any], ranks: int) -> Any:
    """Return the result of ``work`` on rank 0; its failure is raised on all ranks. Collective.

    Raises:
        ResilientError: Rank 0 failed. Rank 0 itself raises the original error.
    """
    own_result = capture_failure(work)
    own_answer = (
        replace(own_result, rank=0, cause=None)
        if isinstance(own_result, RankFailure)
        else own_result
    )
    answer = gather_objects(own_answer, ranks)[0]
    if isinstance(answer, RankFailure):
        own_error = own_result.cause if isinstance(own_result, RankFailure) else None
        raise own_error or answer.to_error(ranks)
    return answer


def search(
    trainer: Any,
    study: Study | None,
    hp_space: Callable[[Any], Mapping[str, Any]],
    compute_objective: Callable[[dict[str, Any]], Any],
    hp_name: Callable[[Any], str] | None = None,
) -> list[BestRun]:
    """Train a trainer's model with the trials of ``study``, one after another. Collective.

    Args:
        trainer: Template of each trial's trainer; it does not train itself.
        study: Study on rank 0; None on the others.
        hp_space: Function from a trial to values by argument name.
        compute_objective: Function from an evaluation's metrics to the objective.
        hp_name: Function from a trial to its name.

    Raises:
        ConfigError: ``hp_space`` gives an unknown argument, or a part is registered with the
            template but not by its class.
    """
    ranks = trainer.session.world.size
    rank0_study = _First(study, hp_space)
    while (trial_asked := from_first(rank0_study.ask, ranks)) is not None:
        number, values, params = trial_asked
        trial = GivenTrial(params, number) if study is None else rank0_study.trial
        another = _trainer_of(trainer, number, values)
        another.hp_name = hp_name
        reporter = TrialReporter(trial, compute_objective, ranks, _last_of(another.eval_dataset))
        another.add_callback(reporter)
        another.train(trial=trial)
        if not reporter.values:
            reporter.take(another.evaluate())
        from_first(partial(rank0_study.tell, reporter), ranks)
    best_runs: list[BestRun] = from_first(rank0_study.best, ranks)
    return best_runs


class _First:
    """Study on rank 0. The other ranks have no study, so their answers are empty."""

    def __init__(self, study: Study | None, hp_space: Callable[[Any], Mapping[str, Any]]) -> None:
        self.trial: Any = None
        self._study = study
        self._hp_space = hp_space

    def ask(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """Return the next trial's number, its values for a training, and all suggested values."""
        self.trial = None if self._study is None else self._study.ask()
        if self.trial is None:
            return None
        values = dict(self._hp_space(self.trial))
        return self.trial.number, values, dict(self.trial.params)

    def tell(self, reporter: TrialReporter) -> None:
        """Record the end of the trial in the study."""
        if self._study is not None:
            self._study.tell(self.trial, reporter.values, pruned=reporter.pruned)

    def best(self) -> list[BestRun]:
        """Return the best runs."""
        return [] if self._study is None else self._study.best()


def _last_of(datasets: Any) -> str | None:
    """Return the name of the last of several datasets; None for a single one."""
    has_several_sets = isinstance(datasets, Mapping) and not isinstance(datasets, Dataset)
    return str([*datasets][-1]) if has_several_sets and datasets else None


def _trainer_of(trainer: Any, number: int, values: Mapping[str, Any]) -> Any:
    """Return a trainer like the given one, for one trial, in its own folder."""
    args = trainer.args
    folder = f"run-{number}"
    places = {
        name: f"{place.rstrip('/')}/{folder}"
        for name in ("output_dir", "repo", "near_repo")
        if (place := getattr(args, name))
    }
    argument_by_name = argument_values(values, args, trainer.model_init)
    # A deep copy, because the state of a callback must not pass from one trial to the next.
    trainer_arguments = dict(trainer.made_with)
    trainer_arguments["callbacks"] = copy.deepcopy(tuple(trainer_arguments.get("callbacks") or ()))
    args = replace(args, **{**argument_by_name, **places})
    another = type(trainer)(**{**trainer_arguments, "model": None, "args": args})
    _follow(trainer.callback_handler.callbacks, another)
    missing_parts = sorted(set(trainer.registered) - set(another.registered))
    if missing_parts:
        raise ConfigError(
            f"`{missing_parts[0]}` is registered with the trainer, but the search creates a "
            "trainer for each trial: register it in the `__init__` of a subclass"
        )
    return another


def _follow(callbacks: Sequence[Any], another: Any) -> None:
    """Apply to a trial's trainer the callback changes made since the template was constructed."""
    count_by_class = Counter(type(callback) for callback in another.callback_handler.callbacks)
    for callback in callbacks:
        if count_by_class[type(callback)]:
            count_by_class[type(callback)] -= 1
        else:
            another.add_callback(copy.deepcopy(callback))
    for kind in count_by_class.elements():
        another.pop_callback(kind)
