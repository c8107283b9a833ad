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
