"""Hyper-parameter search: trials are trainings of their own, and a search that is killed goes on.

Each trial trains into a folder of its own, ``<output_dir>/run-<number>``, so it resumes like any
training. What trials there are, and how they ended, is the study's to keep.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resilient.errors import ConfigError
from resilient.train.callbacks.callback import TrainerCallback
from resilient.train.evaluation.gather import gather_objects
from resilient.train.search.trials import argument_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
    """

    def __init__(
        self, trial: Any, compute_objective: Callable[[dict[str, Any]], Any], ranks: int
    ) -> None:
        self.values: list[float] = []
        self.pruned = False
        self._trial = trial
        self._compute_objective = compute_objective
        self._ranks = ranks

    def on_evaluate(self, _args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
        """Report the metrics; all ranks obey rank zero's study."""
        self.take(kwargs["metrics"])
        if len(self.values) > 1:
            return  # nothing prunes by several objectives
        self._trial.report(self.values[0], step=state.global_step)
        self.pruned = gather_objects(self._trial.should_prune(), self._ranks)[0]
        control.should_training_stop |= self.pruned

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
        ConfigError: ``hp_space`` names what is no argument.
    """
    ranks = trainer.session.world.size
    share = partial(gather_objects, ranks=ranks)
    while True:
        mine = study.ask() if study is not None else None
        told = (mine.number, dict(hp_space(mine))) if mine is not None else None
        asked = share(told)[0]
        if asked is None:
            found: list[BestRun] = share(study.best() if study is not None else None)[0]
            return found
        number, params = asked
        trial = mine if mine is not None else GivenTrial(params, number)
        another = _trainer_of(trainer, number, params)
        another.hp_name = hp_name
        reporter = TrialReporter(trial, compute_objective, ranks)
        another.add_callback(reporter)
        another.train(trial=trial)
        if not reporter.values:
            reporter.take(another.evaluate())
        if study is not None:
            study.tell(mine, reporter.values, pruned=reporter.pruned)


def _trainer_of(trainer: Any, number: int, params: Mapping[str, Any]) -> Any:
    """Return a trainer like the given one, for one trial, in a folder of its own."""
    args = trainer.args
    folder = f"run-{number}"
    places = {
        name: f"{place.rstrip('/')}/{folder}"
        for name in ("output_dir", "repo", "near_repo")
        if (place := getattr(args, name))
    }
    known = argument_values(params, args, trainer.model_init)
    # With `deepcopy`, as callbacks have a state that must not go from trial to trial.
    named = dict(trainer.made_with)
    named["callbacks"] = copy.deepcopy(tuple(named.get("callbacks") or ()))
    return type(trainer)(**{**named, "model": None, "args": replace(args, **{**known, **places})})
