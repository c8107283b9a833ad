"""Factory of optimizers from the training arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.optimizers.builtin import (
    adafactor,
    adagrad,
    adamw,
    parameter_groups,
    parse_options,
    rmsprop,
    sgd,
)
from resilient.train.optimizers.third_party import (
    apollo,
    bitsandbytes,
    galore,
    lion,
    muon,
    schedule_free,
    stable_adamw,
    torchao,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.optimizers.builtin import Recipe

    Maker = Callable[[TrainingArguments, dict[str, Any], nn.Module | None], Recipe]

_BITSANDBYTES = (
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit"),
)

MAKERS: dict[str, Maker] = {
    "adamw_torch": adamw,
    "adamw_torch_fused": adamw,
    "sgd": sgd,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adafactor": adafactor,
    "muon": muon,
    "lion": lion,
    "stable_adamw": stable_adamw,
    "galore_adamw": galore,
    "galore_adamw_8bit": galore,
    "galore_adafactor": galore,
    "apollo_adamw": apollo,
    **dict.fromkeys(_BITSANDBYTES, bitsandbytes),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), torchao),
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"), schedule_free
    ),
}
"""Name of an optimizer -> function that returns its class and its options."""


# Names of options whose values are the parameter groups.
_GROUP_OPTIONS = ("params", "model", "optimizer_dict")


def optimizer_recipe(args: TrainingArguments, model: nn.Module | None = None) -> Recipe:
    """Return the class that ``args.optim`` names, and its options except the parameters.

    If the optimizer treats modules differently, its options contain its groups as ``params``.

    Raises:
        ConfigError: The optimizer has no such option, its package is not installed, or the
            optimizer needs the model and none is given.
    """
    return MAKERS[args.optim](args, parse_options(args.optim_args), model)


def make_optimizer(
    args: TrainingArguments,
    model: nn.Module,
    recipe: Recipe,
    names: Iterable[str] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer for the parameters of ``model``, from a class and its options.

    Parameters with the given ``names`` form the decayed group; None: all parameters except biases
    and norms. If the options contain groups, these replace both groups.

    Raises:
        ConfigError: The model has no trainable parameter, or the options do not fit the class.
    """
    kind, options = recipe
    parameter_option = next((name for name in _GROUP_OPTIONS if name in options), None)
    other_options = {name: option for name, option in options.items() if name != parameter_option}
    if parameter_option is None:
        groups: Any = parameter_groups(model, args.weight_decay, names)
    else:
        groups = options[parameter_option]
    try:
        return kind(groups, **other_options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the options of `{kind.__name__}` do not fit: {error}") from error


def create_optimizer(args: TrainingArguments, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that ``args.optim`` names, for the parameters of ``model``.

    Raises:
        ConfigError: The model has no trainable parameter, the optimizer has no such option, or
            its package is not installed.
    """
    return make_optimizer(args, model, optimizer_recipe(args, model))


def set_mode(optimizer: Any, *, training: bool) -> None:
    """Switch a schedule-free optimizer, which trains and evaluates different weights.

    The switch changes the weights in place. Therefore every attempt of a run switches at the same
    steps: around evaluations and at the end, never for a save. Other optimizers have no modes and
    stay unchanged.
    """
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        switch()
