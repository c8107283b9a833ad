"""What a trial of a hyper-parameter search says: its values, its model, its objective (pure)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

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
