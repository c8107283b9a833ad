"""GaLore (Zhao et al. 2024) and APOLLO (Zhu et al. 2024): moments of projected gradients."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from resilient.errors import ConfigError
from resilient.train.optimizers.groups import given, parameter_groups
from resilient.train.optimizers.options import typed
from resilient.train.optimizers.own import adam_options
from resilient.train.optimizers.packages import package

if TYPE_CHECKING:
    from resilient.train.arguments import TrainingArguments
    from resilient.train.optimizers.own import Groups, Recipe

_GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_APOLLO = {
    "rank": 128,
    "proj": "random",
    "scale_type": "channel",
    "update_proj_gap": 200,
    "scale": 1.0,
    "proj_type": "std",
}


def galore(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Recipe:
    """Return AdamW or Adafactor of galore-torch; the modules named are projected."""
    found = package(args.optim, "galore_torch", "galore-torch")
    more = {**_GALORE, **typed(args.optim, options, _GALORE)}
    made = {"params": project(args, more, model), "lr": args.learning_rate}
    if args.optim == "galore_adafactor":
        return found.GaLoreAdafactor, {**made, "scale_parameter": False, "relative_step": False}
    kind = found.GaLoreAdamW8bit if "8bit" in args.optim else found.GaLoreAdamW
    return kind, {**made, **adam_options(args)}


def apollo(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Recipe:
    """Return AdamW of apollo-torch; the modules named are projected."""
    found = package(args.optim, "apollo_torch", "apollo-torch")
    more = {**_APOLLO, **typed(args.optim, options, _APOLLO)}
    made = {"params": project(args, more, model), "lr": args.learning_rate}
    return found.APOLLOAdamW, {**made, **adam_options(args)}


def project(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Groups:
    """Return the groups with the weights of the target modules in groups of their own.

    Raises:
        ConfigError: no linear module is named by ``optim_target_modules``, or no model is given.
    """
    found = given(args, model)
    targets = target_weights(args, found)
    split = []
    for group in parameter_groups(found, args.weight_decay):
        chosen = [one for one in group["params"] if id(one) in targets]
        rest = [one for one in group["params"] if id(one) not in targets]
        split += [{**group, "params": rest}] if rest else []
        split += [{**group, **options, "params": chosen}] if chosen else []
    return split


def target_weights(args: TrainingArguments, model: nn.Module) -> set[int]:
    """Return the ids of the weights of the linear modules that ``optim_target_modules`` names.

    A list holds ends of names or patterns, a text is a pattern for whole names, ``all-linear``
    means all of them.
    """
    wanted = args.optim_target_modules
    if not wanted:
        raise ConfigError(
            f"`{args.optim}` needs `optim_target_modules`: which modules to project",
            hint='set optim_target_modules="all-linear", or ["q_proj", "v_proj"]',
        )
    linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    found = {id(one.weight) for name, one in linear.items() if _names(wanted, name)}
    if not found:
        raise ConfigError(
            f"no linear module of the model is named by `optim_target_modules`={wanted!r}; "
            f"it has {', '.join(linear) or 'none'}"
        )
    return found


def _names(wanted: list[str] | str, module: str) -> bool:
    if isinstance(wanted, str):
        everything = wanted.replace("_", "-") == "all-linear"
        return everything or re.fullmatch(wanted, module) is not None
    return any(
        module == one or module.endswith(f".{one}") or re.fullmatch(one, module) for one in wanted
    )
