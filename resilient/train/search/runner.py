"""Trainer side of a hyper-parameter search: start of the search and setup of each trial."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from resilient.errors import ConfigError
from resilient.train.arguments.validation import check
from resilient.train.run import set_seed
from resilient.train.search.study import (
    argument_values,
    call_model_init,
    default_objective,
    default_space,
    from_first,
    params_of,
    search,
)
from resilient.train.session import configure_model, place_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.train.search.study import BestRun, Study


class SearchPlan(NamedTuple):
    """Options of a search; see ``Trainer.hyperparameter_search``."""

    hp_space: Callable[[Any], Mapping[str, Any]] | None
    compute_objective: Callable[[dict[str, Any]], Any] | None
    n_trials: int
    direction: str | Sequence[str]
    hp_name: Callable[[Any], str] | None


def start(
    trainer: Any, plan: SearchPlan, backend: str | Study, options: Mapping[str, Any]
) -> list[BestRun]:
    """Run a search: rank 0 uses the study, and the other ranks use its answers. Collective.

    Raises:
        ConfigError: The trainer cannot make a model for each trial, or the backend is unknown.
    """
    if trainer.model_init is None:
        raise ConfigError(
            "hyperparameter_search needs `model_init`: each trial starts with a new model, so "
            "pass the Trainer a function that creates one instead of `model`"
        )
    if trainer.made_with.get("optimizers", (None, None)) != (None, None):
        raise ConfigError(
            "hyperparameter_search creates an optimizer for each trial: omit `optimizers`, or "
            "override `create_optimizer`"
        )
    world = trainer.session.world
    study: Study | None = None

    def open_study() -> None:
        nonlocal study
        if world.is_coordinator:
            study = _study(trainer, plan, backend, options)

    from_first(open_study, world.size)
    space, objective = plan.hp_space or default_space, plan.compute_objective or default_objective
    return search(trainer, study, space, objective, plan.hp_name)


def _study(
    trainer: Any, plan: SearchPlan, backend: str | Study, options: Mapping[str, Any]
) -> Study:
    if not isinstance(backend, str):
        return backend
    if backend != "optuna":
        raise ConfigError(f"`backend` {backend!r} is unknown: use 'optuna', or your own study")
    from resilient.train.search.optuna import OptunaStudy

    args = trainer.args
    return OptunaStudy(args.output_dir, plan.n_trials, plan.direction, args.seed, **options)


def by_name(
    init: Callable[..., Any],
    base: Callable[..., Any],
    values: Sequence[Any],
    named_values: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a trainer's constructor arguments by name.

    Args:
        init: Constructor of its class; one that takes ``*args`` passes them on.
        base: Constructor of the base class.
        values: Arguments by position.
        named_values: Arguments by name.
    """
    init_parameters = list(inspect.signature(init).parameters.values())[1:]
    names = [
        parameter.name
        for parameter in init_parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    names = names or list(inspect.signature(base).parameters)[1:]
    return {**dict(zip(names, values, strict=False)), **named_values}


def first_model(model: nn.Module | None, model_init: Callable[..., nn.Module] | None) -> nn.Module:
    """Return the initial model of a trainer.

    Raises:
        ConfigError: There is no model, there are two models, or the model is not a module.
    """
    if model is not None and model_init is not None:
        raise ConfigError("`model` and `model_init` are both given: omit one of them")
    if model is not None and not isinstance(model, nn.Module):
        hint = "pass it as `model_init`" if callable(model) else "pass a torch.nn.Module"
        raise ConfigError(f"`model` is a {type(model).__name__}, not a module", hint=hint)
    if model is not None:
        return model
    if model_init is None:
        raise ConfigError(
            "the trainer has no model: pass `model`, or `model_init` that creates one"
        )
    new_model: nn.Module = call_model_init(model_init, None)
    return new_model


def take_trial(trainer: Any, trial: Any) -> None:
    """Apply a trial to a trainer: set the trial's arguments, if any, and make a new model.

    Raises:
        ConfigError: A value is not accepted, or its name is not an argument.
    """
    trainer.trial = trial
    args = trainer.args
    if isinstance(trial, Mapping):
        for name, value in argument_values(params_of(trial), args, trainer.model_init).items():
            setattr(args, name, value)
        check(args)
    if trainer.model_init is not None:
        remake_model(trainer, trial)


def remake_model(trainer: Any, trial: Any) -> None:
    """Replace a trainer's model with a new one from ``model_init``, seeded as in a new trainer.

    The old model's optimizer and scheduler are dropped.
    """
    args = trainer.args
    is_theirs = args.random_numbers == "transformers"
    set_seed(args.seed + (0 if is_theirs else trainer.session.data_world.rank))
    model = call_model_init(trainer.model_init, trial)
    configure_model(args, model)
    trainer.model = trainer.model_wrapped = place_model(args, model, trainer.session.device)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.context["model"] = trainer.model
    trainer.__dict__.pop("label_names", None)
    trainer.learn_losses()
