"""Optimizers of maintained packages, with the options that Transformers gives them.

A package that is absent is an error with the command that installs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.optimizers.options import typed
from resilient.train.optimizers.own import adam_options
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    import torch
    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.optimizers.own import Groups


def package(name: str, module: str, wheel: str) -> Any:
    """Return a module of a package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the optimizer `{name}` needs the package {wheel}, which cannot be imported: {error}",
            hint=f"pip install {wheel}",
        ) from error


def lion(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return Lion (Chen et al. 2023) of lion-pytorch, with its own betas unless they are given."""
    found = package(args.optim, "lion_pytorch", "lion-pytorch")
    more = typed(args.optim, options, {"beta1": 0.9, "beta2": 0.99})
    betas = (more.get("beta1", 0.9), more.get("beta2", 0.99))
    made: torch.optim.Optimizer = found.Lion(groups, lr=args.learning_rate, betas=betas)
    return made


def bitsandbytes(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return AdamW, Lion, RMSprop or AdEMAMix of bitsandbytes in 8 or 32 bits, paged or not."""
    name = args.optim
    found = package(name, "bitsandbytes.optim", "bitsandbytes")
    bits = {"optim_bits": 8 if "8bit" in name else 32}
    rate = {"lr": args.learning_rate}
    betas = (args.adam_beta1, args.adam_beta2)
    made: torch.optim.Optimizer
    if "rmsprop" in name:
        more = typed(name, options, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0})
        made = found.RMSprop(groups, **rate, **more, **bits)
        return made
    paged = {"is_paged": "paged" in name}
    if "ademamix" in name:
        made = found.AdEMAMix(groups, **rate, **_ademamix(args, options), **bits, **paged)
        return made
    typed(name, options, {})
    if "lion" in name:
        made = found.Lion(groups, **rate, betas=betas, **bits, **paged)
    else:
        made = found.AdamW(groups, **rate, **adam_options(args), **bits, **paged)
    return made


def _ademamix(args: TrainingArguments, options: dict[str, Any]) -> dict[str, Any]:
    known = {
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "beta3": 0.9999,
        "alpha": 5.0,
        "eps": args.adam_epsilon,
        "t_alpha": int,
        "t_beta3": int,
    }
    given = typed(args.optim, options, known)
    merged = {**{key: value for key, value in known.items() if value is not int}, **given}
    betas = (merged.pop("beta1"), merged.pop("beta2"), merged.pop("beta3"))
    return {"betas": betas, **merged}


def torchao(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return AdamW of torchao with moments in 8 or 4 bits. It compiles its step."""
    found = package(args.optim, "torchao.optim", "torchao")
    known = {"block_size": 256 if "8bit" in args.optim else 128, "bf16_stochastic_round": False}
    more = {**known, **typed(args.optim, options, known)}
    kind = found.AdamW4bit if "4bit" in args.optim else found.AdamW8bit
    made: torch.optim.Optimizer = kind(groups, lr=args.learning_rate, **adam_options(args), **more)
    return made


def schedule_free(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return AdamW, SGD or RAdam of schedulefree (Defazio et al. 2024).

    It has a warm-up of its own: give a schedule that stays constant.

    Raises:
        ConfigError: the schedule does not stay constant, or the best model shall be loaded, which
            was evaluated at other weights than those that training goes on from.
    """
    found = package(args.optim, "schedulefree", "schedulefree")
    if args.lr_scheduler_type != "constant":
        raise ConfigError(
            f"`{args.optim}` has no use for `lr_scheduler_type`={args.lr_scheduler_type!r}",
            hint='set lr_scheduler_type="constant"',
        )
    if args.load_best_model_at_end:
        raise ConfigError(
            f"`load_best_model_at_end` cannot be used with `{args.optim}`: a checkpoint holds the "
            "weights that training goes on from, and those that were evaluated are an average"
        )
    more = typed(args.optim, options, {"weight_lr_power": 2.0, "r": 0.0})
    more |= {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    made: torch.optim.Optimizer
    if args.optim == "schedule_free_radam":
        made = found.RAdamScheduleFree(groups, **more, **adam_options(args))
        return made
    more["warmup_steps"] = absolute_steps(args.warmup_steps, max(args.max_steps, 0))
    if args.optim == "schedule_free_adamw":
        made = found.AdamWScheduleFree(groups, **more, **adam_options(args))
    else:
        made = found.SGDScheduleFree(groups, **more)
    return made


def stable_adamw(
    args: TrainingArguments, groups: Groups, options: dict[str, Any], _: nn.Module
) -> torch.optim.Optimizer:
    """Return StableAdamW of torch-optimi."""
    found = package(args.optim, "optimi", "torch-optimi")
    known = {"decouple_lr": False, "max_lr": float, "kahan_sum": bool}
    more = typed(args.optim, options, known)
    made: torch.optim.Optimizer = found.StableAdamW(
        groups, lr=args.learning_rate, **adam_options(args), **more
    )
    return made
