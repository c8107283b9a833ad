"""Trials and studies.

What a trial of a hyper-parameter search says: its values, its model, its objective (pure).

Hyper-parameter search: trials are trainings of their own, and a search that is killed goes on.

Each trial trains into a folder of its own, ``<output_dir>/run-<number>``, so it resumes like any
training. What trials there are, and how they ended, is the study's to keep.
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

# What of an evaluation is no measure of a model.
_NO_MEASURES = ("_runtime", "_per_second", "_model_preparation_time")


def argument_values(
    params: Mapping[str, Any], args: TrainingArguments, model_init: Callable[..., Any] | None
) -> dict[str, Any]:
    """Return those of ``params`` that are arguments; the others are for ``model_init(trial)``.

    Raises:
        ConfigError: there are others, and nothing takes them.
    """
    names = [one.name for one in fields(args)]
    others = [name for name in params if name not in names]
    if others and not (model_init and takes_trial(model_init)):
        raise ConfigError(
            f"`hp_space` gives `{others[0]}`, which is no training argument"
            f"{did_you_mean(others[0], names)}: what is for the model, `model_init(trial)` takes"
        )
    return {name: value for name, value in params.items() if name in names}


def default_objective(metrics: Mapping[str, Any]) -> float:
    """Return the sum of the metrics, or the loss if it is the only one (Transformers' rule)."""
    others = [
        value
        for name, value in metrics.items()
        if name not in ("epoch", "eval_loss") and not name.endswith(_NO_MEASURES)
    ]
    value = sum(others) if others else metrics.get("eval_loss", math.nan)
    return float(value)


def default_space(trial: Any) -> dict[str, Any]:
    """Return Transformers' default space: rate, epochs, seed and batch size."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical(
            "per_device_train_batch_size", [4, 8, 16, 32, 64]
        ),
    }


def params_of(trial: Any) -> dict[str, Any]:
    """Return the values of a trial, of a study's or given as a dict."""
    return dict(trial if isinstance(trial, Mapping) else trial.params)


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Say whether ``model_init`` takes a trial: an argument of that name, or one that it needs."""
    taken = inspect.signature(model_init).parameters
    return any(name == "trial" or one.default is one.empty for name, one in taken.items())


def call_model_init(model_init: Callable[..., Any], trial: Any) -> Any:
    """Return a new model, made with the trial if ``model_init`` takes one.

    Raises:
        ConfigError: it made none.
    """
    model = model_init(trial) if takes_trial(model_init) else model_init()
    if model is None:
        raise ConfigError("`model_init` returned no model")
    return model


class BestRun(NamedTuple):
    """What a search found.

    Attributes:
        run_id: the trial's number.
        objective: its value, or values.
        hyperparameters: what it was trained with.
        run_summary: the study, for more.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


class Trial(Protocol):
    """One set of hyper-parameters, as ``hp_space`` and ``model_init`` see it (Optuna's names).

    ``params`` are those that were suggested so far.
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
        """Tell how the trial is doing."""

    def should_prune(self) -> bool:
        """Say whether the trial is not worth its time any more."""


class Study(Protocol):
    """Where trials come from; one that is durable lets a search go on after a kill."""

    def ask(self) -> Any:
        """Return the next trial, first of all one that was not told the end of; None: enough."""

    def tell(self, trial: Any, values: list[float], *, pruned: bool) -> None:
        """Hear how a trial ended."""

    def best(self) -> list[BestRun]:
        """Return the best runs: one, or with several objectives those that none beats."""


class GivenTrial:
    """A trial whose values are known: on ranks that have no study, and in scripts.

    Args:
        params: value by name.
        number: of the trial.
    """

    def __init__(self, params: Mapping[str, Any], number: int = 0) -> None:
        self.number = number
        self.params = dict(params)

    def suggest_float(self, name: str, *_range: Any, **_more: Any) -> Any:
        """Return the value that is known.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self.params:
            raise ConfigError(
                f"the trial has no `{name}`: suggest it in `hp_space`, which is asked first"
            )
        return self.params[name]

    suggest_int = suggest_categorical = suggest_float

    def report(self, value: float, step: int) -> None:
        """Tell nobody."""

    def should_prune(self) -> bool:
        """Return False."""
        return False


class TrialReporter(TrainerCallback):
    """Reports each evaluation to its trial, and ends the training that is not worth its time.

    Args:
        trial: hears the objective.
        compute_objective: metrics -> objective.
        ranks: how many decide together.
        last: the name of the dataset that is evaluated last, if there are several: the objective
            is one of all their metrics.
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
        """Report the metrics; all ranks obey rank zero's study."""
        self._metrics |= kwargs["metrics"]
        if self._last is not None and f"eval_{self._last}_runtime" not in kwargs["metrics"]:
            return  # others of the same evaluation come
        metrics, self._metrics = self._metrics, {}
        self.take(metrics)
        if len(self.values) > 1:
            return  # nothing prunes by several objectives
        self.pruned = from_first(partial(self._report, state.global_step), self._ranks)
        control.should_training_stop |= self.pruned

    def _report(self, step: int) -> bool:
        self._trial.report(self.values[0], step=step)
        return bool(self._trial.should_prune())

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Compute the objective of the newest evaluation."""
        found = self._compute_objective(dict(metrics))
        self.values = [
            float(one) for one in ([found] if isinstance(found, (int, float)) else found)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return whether the trial was pruned, and its last objective."""
        return {"values": self.values, "pruned": self.pruned}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them back: a life that has nothing left to train evaluates nothing."""
        self.values = list(state_dict["values"])
        self.pruned = bool(state_dict["pruned"])


def from_first(work: Callable[[], Any], ranks: int) -> Any:
    """Return what ``work`` returns on rank zero; a failure there is everyone's. Collective.

    Raises:
        ResilientError: what rank zero's raised, which there is raised as it was.
    """
    mine = capture_failure(work)
    shown = replace(mine, rank=0, cause=None) if isinstance(mine, RankFailure) else mine
    heard = gather_objects(shown, ranks)[0]
    if isinstance(heard, RankFailure):
        own = mine.cause if isinstance(mine, RankFailure) else None
        raise own or heard.to_error(ranks)
    return heard


def search(
    trainer: Any,
    study: Study | None,
    hp_space: Callable[[Any], Mapping[str, Any]],
    compute_objective: Callable[[dict[str, Any]], Any],
    hp_name: Callable[[Any], str] | None = None,
) -> list[BestRun]:
    """Train a trainer's model with one trial of ``study`` after the other. Collective.

    Args:
        trainer: the pattern of each trial's; it trains nothing itself.
        study: rank zero's; None on the others.
        hp_space: trial -> values by the names of training arguments.
        compute_objective: metrics of an evaluation -> what is searched for.
        hp_name: trial -> its name.

    Raises:
        ConfigError: ``hp_space`` names what is no argument, or a part of the user's was registered
            with the pattern alone.
    """
    ranks = trainer.session.world.size
    first = _First(study, hp_space)
    while (asked := from_first(first.ask, ranks)) is not None:
        number, values, params = asked
        trial = GivenTrial(params, number) if study is None else first.trial
        another = _trainer_of(trainer, number, values)
        another.hp_name = hp_name
        reporter = TrialReporter(trial, compute_objective, ranks, _last_of(another.eval_dataset))
        another.add_callback(reporter)
        another.train(trial=trial)
        if not reporter.values:
            reporter.take(another.evaluate())
        from_first(partial(first.tell, reporter), ranks)
    found: list[BestRun] = from_first(first.best, ranks)
    return found


class _First:
    """The study, on rank zero; on the others nothing, which says nothing."""

    def __init__(self, study: Study | None, hp_space: Callable[[Any], Mapping[str, Any]]) -> None:
        self.trial: Any = None
        self._study = study
        self._hp_space = hp_space

    def ask(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """Return the next trial's number, its values for a training, and all it has suggested."""
        self.trial = None if self._study is None else self._study.ask()
        if self.trial is None:
            return None
        values = dict(self._hp_space(self.trial))
        return self.trial.number, values, dict(self.trial.params)

    def tell(self, reporter: TrialReporter) -> None:
        """Tell the study how the trial ended."""
        if self._study is not None:
            self._study.tell(self.trial, reporter.values, pruned=reporter.pruned)

    def best(self) -> list[BestRun]:
        """Return the best runs."""
        return [] if self._study is None else self._study.best()


def _last_of(datasets: Any) -> str | None:
    """Return the name of the last of several datasets, None where there is one."""
    several = isinstance(datasets, Mapping) and not isinstance(datasets, Dataset)
    return str([*datasets][-1]) if several and datasets else None


def _trainer_of(trainer: Any, number: int, values: Mapping[str, Any]) -> Any:
    """Return a trainer like the given one, for one trial, in a folder of its own."""
    args = trainer.args
    folder = f"run-{number}"
    places = {
        name: f"{place.rstrip('/')}/{folder}"
        for name in ("output_dir", "repo", "near_repo")
        if (place := getattr(args, name))
    }
    known = argument_values(values, args, trainer.model_init)
    # With `deepcopy`, as callbacks have a state that must not go from trial to trial.
    named = dict(trainer.made_with)
    named["callbacks"] = copy.deepcopy(tuple(named.get("callbacks") or ()))
    args = replace(args, **{**known, **places})
    another = type(trainer)(**{**named, "model": None, "args": args})
    _follow(trainer.callback_handler.callbacks, another)
    lost = sorted(set(trainer.registered) - set(another.registered))
    if lost:
        raise ConfigError(
            f"`{lost[0]}` is registered with the trainer, and the search makes one for each trial: "
            "register it in the `__init__` of a class of yours"
        )
    return another


def _follow(callbacks: Sequence[Any], another: Any) -> None:
    """Add what was added to the pattern's callbacks since it was made; remove what was removed."""
    there = Counter(type(one) for one in another.callback_handler.callbacks)
    for one in callbacks:
        if there[type(one)]:
            there[type(one)] -= 1
        else:
            another.add_callback(copy.deepcopy(one))
    for kind in there.elements():
        another.pop_callback(kind)
