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
    """Return the other parameters, then the weights of the target modules with their options.

    These are the two groups of Transformers. Transformers ignores `weight_decay` here. A decay
    that is not 0 splits the first group, so that biases and norms do not decay.

    Raises:
        ConfigError: no linear module is named by ``optim_target_modules``, or no model is given.
    """
    found = given(args, model)
    targets = target_weights(args, found)
    if not args.weight_decay:
        trained = [one for one in found.parameters() if one.requires_grad]
        groups: Groups = [{"params": trained, "weight_decay": 0.0}]
    else:
        groups = parameter_groups(found, args.weight_decay)
    rest = [{**one, "params": _outside(one["params"], targets)} for one in groups]
    chosen = [{**one, **options, "params": _inside(one["params"], targets)} for one in groups]
    return [one for one in (*rest, *chosen) if one["params"]]


def _inside(parameters: list[Any], targets: set[int]) -> list[Any]:
    return [one for one in parameters if id(one) in targets]


def _outside(parameters: list[Any], targets: set[int]) -> list[Any]:
    return [one for one in parameters if id(one) not in targets]


def target_weights(args: TrainingArguments, model: nn.Module) -> set[int]:
    """Return the ids of the weights of the linear modules that ``optim_target_modules`` names.

    A list holds parts of names or patterns for whole names, as in Transformers. A text is a
    pattern for whole names, and ``all-linear`` means all linear modules.
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
    return any(one in module or re.fullmatch(one, module) for one in wanted)
