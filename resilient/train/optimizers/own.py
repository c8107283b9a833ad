"""Optimizers of torch itself, and Adafactor of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.train.optimizers.options import typed

if TYPE_CHECKING:
    from torch import nn

    from resilient.train.arguments import TrainingArguments

Groups = list[dict[str, Any]]


def adam_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options that every Adam takes from the arguments."""
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def adamw(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return AdamW, fused if its name says so."""
    typed(args.optim, options, {})
    fused = True if args.optim == "adamw_torch_fused" else None
    return torch.optim.AdamW(groups, lr=args.learning_rate, **adam_options(args), fused=fused)


def sgd(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return SGD."""
    known = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    more = typed(args.optim, options, known)
    try:
        return torch.optim.SGD(groups, lr=args.learning_rate, **more)
    except ValueError as error:
        raise ConfigError(f"`optim_args` do not fit `sgd`: {error}") from error


def adagrad(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return Adagrad."""
    more = typed(args.optim, options, {"lr_decay": 0.0, "eps": 1e-10})
    return torch.optim.Adagrad(groups, lr=args.learning_rate, **more)


def rmsprop(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return RMSprop."""
    known = {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8, "centered": False}
    return torch.optim.RMSprop(groups, lr=args.learning_rate, **typed(args.optim, options, known))


def adafactor(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
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
    made: torch.optim.Optimizer = kind(
        groups, lr=args.learning_rate, scale_parameter=False, relative_step=False
    )
    return made
