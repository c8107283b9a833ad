"""Optimizers of torch, Adafactor of Transformers, parameter groups and ``optim_args``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train.arguments.choices import did_you_mean, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.train.arguments import TrainingArguments

# Weight decay is not applied to biases and norms, found by module type and by name as in
# Transformers 5.23 (trainer.py).
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
    """Return whether weight decay applies to a parameter, judged by its name alone."""
    return not _NO_DECAY_NAMES.search(name)


def parameter_groups(
    model: nn.Module, weight_decay: float, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters into a group with and a group without weight decay.

    Both groups keep the model's order. An empty group is left out.

    Args:
        model: Model to train.
        weight_decay: Weight decay of the decayed group.
        names: Names of the decayed parameters; None: :func:`decay_parameter_names`.

    Raises:
        ConfigError: The model has no trainable parameter.
    """
    decayed = set(decay_parameter_names(model) if names is None else names)
    named_parameters = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not named_parameters:
        raise ConfigError("the model has no parameter that requires a gradient")
    groups = [
        {
            "params": [parameter for name, parameter in named_parameters if name in decayed],
            "weight_decay": weight_decay,
        },
        {
            "params": [parameter for name, parameter in named_parameters if name not in decayed],
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def given(args: TrainingArguments, model: nn.Module | None) -> nn.Module:
    """Return the model, for an optimizer whose groups depend on modules of the model.

    Raises:
        ConfigError: No model was given.
    """
    if model is None:
        raise ConfigError(
            f"the optimizer `{text_of(args.optim)}` treats modules of the model differently, but "
            "no model was passed",
            hint="call `get_optimizer_cls_and_kwargs(args, model)`",
        )
    return model


_YES, _NO = ("true", "1", "yes"), ("false", "0", "no")


def parse_options(source: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return options as a dict; text has the form ``key=value,key=value``, as in Transformers.

    Raises:
        ConfigError: A pair has no key or no value.
    """
    if not source:
        return {}
    if not isinstance(source, str):
        return dict(source)
    pairs = [pair.partition("=") for pair in source.replace(" ", "").split(",")]
    if not all(key and equals and value for key, equals, value in pairs):
        raise ConfigError(f"`optim_args`={source!r} is not key=value,key=value")
    return {key: value for key, _, value in pairs}


def typed(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the given ``options`` to the types of ``defaults``.

    Args:
        name: Name of the optimizer, for errors.
        options: Given options.
        defaults: All options of the optimizer. The type of a default is the type of the option.
            For an option without a default, the value is the type itself.

    Raises:
        ConfigError: The optimizer has no such option, or a value has another type.
    """
    for option in options:
        if option not in defaults:
            raise ConfigError(
                f"`optim_args` name `{option}`, which `{text_of(name)}` does not have"
                f"{did_you_mean(option, list(defaults))}: "
                f"it has {', '.join(defaults) or 'none'}"
            )
    return {
        option: _convert_option(defaults[option], option, value)
        for option, value in options.items()
    }


def _convert_option(default: Any, option: str, value: Any) -> Any:
    kind = default if isinstance(default, type) else type(default)
    word = str(value).lower()
    if kind is bool and word in (*_YES, *_NO):
        return word in _YES
    if kind in (int, float, str):
        try:
            return kind(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(f"`optim_args` has `{option}`={value!r}, which is not a {kind.__name__}")


Groups = list[dict[str, Any]]
Recipe = tuple[type[torch.optim.Optimizer], dict[str, Any]]
"""Optimizer class and its options. ``params`` is an option if the optimizer needs own groups."""


def adam_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that every Adam takes from the arguments."""
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def adamw(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW, fused for ``adamw_torch_fused``."""
    typed(args.optim, options, {})
    fused = True if args.optim == "adamw_torch_fused" else None
    return torch.optim.AdamW, {"lr": args.learning_rate, **adam_options(args), "fused": fused}


def sgd(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return SGD."""
    defaults = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    return torch.optim.SGD, {"lr": args.learning_rate, **typed(args.optim, options, defaults)}


def adagrad(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return Adagrad."""
    defaults = {"lr_decay": 0.0, "eps": 1e-10}
    return torch.optim.Adagrad, {"lr": args.learning_rate, **typed(args.optim, options, defaults)}


def rmsprop(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return RMSprop."""
    defaults = {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8, "centered": False}
    return torch.optim.RMSprop, {"lr": args.learning_rate, **typed(args.optim, options, defaults)}


def adafactor(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return Adafactor of Transformers with the learning rate of the arguments.

    Adafactor's own scaling and relative step are off.

    Raises:
        ConfigError: Transformers is not installed.
    """
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        raise ConfigError(
            "the optimizer `adafactor` is part of Transformers, which is not installed",
            hint="pip install transformers",
        ) from error
    typed(args.optim, options, {})
    kind: Any = Adafactor
    return kind, {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False}
