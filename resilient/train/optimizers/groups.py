"""Two groups of parameters: with weight decay and without."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

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
