"""From arguments to an optimizer."""

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
"""Name -> a function that returns its class and its options."""


# By what names an option holds the groups themselves.
_HELD = ("params", "model", "optimizer_dict")


def optimizer_recipe(args: TrainingArguments, model: nn.Module | None = None) -> Recipe:
    """Return the class that ``args.optim`` names, and its options but for the parameters.

    An optimizer that treats modules differently has its groups among the options, as ``params``.

    Raises:
        ConfigError: an option is not the optimizer's, the package that it comes from is not
            installed, or it needs the model and none is given.
    """
    return MAKERS[args.optim](args, parse_options(args.optim_args), model)


def make_optimizer(
    args: TrainingArguments,
    model: nn.Module,
    recipe: Recipe,
    names: Iterable[str] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of a class and its options over ``model``'s parameters.

    They are in two groups, of which that of ``names`` decays (None: all but biases and norms),
    unless the options hold others.

    Raises:
        ConfigError: the model has nothing to train, or the options do not fit the class.
    """
    kind, options = recipe
    held = next((name for name in _HELD if name in options), None)
    rest = {name: one for name, one in options.items() if name != held}
    if held is None:
        groups: Any = parameter_groups(model, args.weight_decay, names)
    else:
        groups = options[held]
    try:
        return kind(groups, **rest)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the options of `{kind.__name__}` do not fit: {error}") from error


def create_optimizer(args: TrainingArguments, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that ``args.optim`` names over ``model``'s parameters.

    Raises:
        ConfigError: the model has nothing to train, an option is not the optimizer's, or the
            package that it comes from is not installed.
    """
    return make_optimizer(args, model, optimizer_recipe(args, model))


def set_mode(optimizer: Any, *, training: bool) -> None:
    """Switch an optimizer that trains other weights than it gives away (schedule-free).

    Its weights are changed in place, so this is done at the same steps in every life of a run:
    around evaluations and at the end, never for a save. Others have no modes and stay as they are.
    """
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        switch()
