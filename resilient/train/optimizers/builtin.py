"""Torch optimizers, parameter groups, optim_args.

Two groups of parameters: with weight decay and without.

``optim_args``: text or a dict, to typed options that an optimizer has.

Optimizers of torch itself, and Adafactor of Transformers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train.arguments.choices import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.train.arguments import TrainingArguments

# Biases and norms are not decayed, by module type and by name (Transformers 5.23, trainer.py).
_NO_DECAY_MODULES = (nn.LayerNorm,)
_NO_DECAY_NAMES = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE
)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay applies to."""
    shielded = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NO_DECAY_MODULES)
        for name, _ in module.named_parameters(recurse=False)
    }
    return [
        name
        for name, _ in model.named_parameters()
        if name not in shielded and is_decayed_name(name)
    ]


def is_decayed_name(name: str) -> bool:
    """Say whether weight decay applies to a parameter, as far as its name tells."""
    return not _NO_DECAY_NAMES.search(name)


def parameter_groups(
    model: nn.Module, weight_decay: float, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters into decayed and not decayed, in the model's order.

    Args:
        model: to train.
        weight_decay: of those that decay.
        names: which those are; None: :func:`decay_parameter_names`.

    Raises:
        ConfigError: the model has nothing to train.
    """
    decayed = set(decay_parameter_names(model) if names is None else names)
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not named:
        raise ConfigError("the model has no parameter that requires a gradient")
    groups = [
        {"params": [one for name, one in named if name in decayed], "weight_decay": weight_decay},
        {"params": [one for name, one in named if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def given(args: TrainingArguments, model: nn.Module | None) -> nn.Module:
    """Return the model, for an optimizer whose groups depend on its modules.

    Raises:
        ConfigError: there is none.
    """
    if model is None:
        raise ConfigError(
            f"the optimizer `{args.optim}` treats modules of the model differently, and no model "
            "was given",
            hint="call `get_optimizer_cls_and_kwargs(args, model)`",
        )
    return model


_YES, _NO = ("true", "1", "yes"), ("false", "0", "no")


def parse_options(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return options as a dict; text is ``key=value,key=value``, as in Transformers.

    Raises:
        ConfigError: a pair has no key or no value.
    """
    if not given:
        return {}
    if not isinstance(given, str):
        return dict(given)
    pairs = [pair.partition("=") for pair in given.replace(" ", "").split(",")]
    if not all(key and equals and value for key, equals, value in pairs):
        raise ConfigError(f"`optim_args`={given!r} is not key=value,key=value")
    return {key: value for key, _, value in pairs}


def typed(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` in the types of ``defaults``; only what was given.

    Args:
        name: of the optimizer, for errors.
        options: what was given.
        defaults: what the optimizer has; each value's type says what text means. A type itself
            stands for an option without a default.

    Raises:
        ConfigError: the optimizer has no such option, or the value is of another type.
    """
    for option in options:
        if option not in defaults:
            raise ConfigError(
                f"`optim_args` name `{option}`, which `{name}` does not have"
                f"{did_you_mean(option, list(defaults))}: "
                f"it has {', '.join(defaults) or 'none'}"
            )
    return {option: _as(defaults[option], option, value) for option, value in options.items()}


def _as(like: Any, option: str, value: Any) -> Any:
    kind = like if isinstance(like, type) else type(like)
    word = str(value).lower()
    if kind is bool and word in (*_YES, *_NO):
        return word in _YES
    if kind in (int, float, str):
        try:
            return kind(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(f"`optim_args` has `{option}`={value!r}, which is no {kind.__name__}")


Groups = list[dict[str, Any]]
Recipe = tuple[type[torch.optim.Optimizer], dict[str, Any]]
"""A class and its options; ``params`` is among them where it wants groups of another kind."""


def adam_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that every Adam takes from the arguments."""
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def adamw(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW, fused if its name says so."""
    typed(args.optim, options, {})
    fused = True if args.optim == "adamw_torch_fused" else None
    return torch.optim.AdamW, {"lr": args.learning_rate, **adam_options(args), "fused": fused}


def sgd(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return SGD."""
    known = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    return torch.optim.SGD, {"lr": args.learning_rate, **typed(args.optim, options, known)}


def adagrad(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return Adagrad."""
    known = {"lr_decay": 0.0, "eps": 1e-10}
    return torch.optim.Adagrad, {"lr": args.learning_rate, **typed(args.optim, options, known)}


def rmsprop(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return RMSprop."""
    known = {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8, "centered": False}
    return torch.optim.RMSprop, {"lr": args.learning_rate, **typed(args.optim, options, known)}


def adafactor(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return Adafactor of Transformers with the rate of the arguments: no scale, no own step.

    Raises:
        ConfigError: Transformers is not installed.
    """
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        raise ConfigError(
            "the optimizer `adafactor` is that of Transformers, which is not installed",
            hint="pip install transformers",
        ) from error
    typed(args.optim, options, {})
    kind: Any = Adafactor
    return kind, {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False}
