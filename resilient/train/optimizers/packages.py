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
    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.optimizers.own import Recipe


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


def lion(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return Lion (Chen et al. 2023) of lion-pytorch, with its own betas unless they are given."""
    found = package(args.optim, "lion_pytorch", "lion-pytorch")
    more = typed(args.optim, options, {"beta1": 0.9, "beta2": 0.99})
    betas = (more.get("beta1", 0.9), more.get("beta2", 0.99))
    return found.Lion, {"lr": args.learning_rate, "betas": betas}


def bitsandbytes(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW, Lion, RMSprop or AdEMAMix of bitsandbytes in 8 or 32 bits, paged or not."""
    name = args.optim
    found = package(name, "bitsandbytes.optim", "bitsandbytes")
    bits = {"optim_bits": 8 if "8bit" in name else 32}
    rate = {"lr": args.learning_rate}
    betas = (args.adam_beta1, args.adam_beta2)
    if "rmsprop" in name:
        more = typed(name, options, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0})
        return found.RMSprop, {**rate, **more, **bits}
    paged = {"is_paged": "paged" in name}
    if "ademamix" in name:
        return found.AdEMAMix, {**rate, **_ademamix(args, options), **bits, **paged}
    typed(name, options, {})
    if "lion" in name:
        return found.Lion, {**rate, "betas": betas, **bits, **paged}
    return found.AdamW, {**rate, **adam_options(args), **bits, **paged}


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


def torchao(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW of torchao with moments in 8 or 4 bits. It compiles its step."""
    found = package(args.optim, "torchao.optim", "torchao")
    known = {"block_size": 256 if "8bit" in args.optim else 128, "bf16_stochastic_round": False}
    more = {**known, **typed(args.optim, options, known)}
    kind = found.AdamW4bit if "4bit" in args.optim else found.AdamW8bit
    return kind, {"lr": args.learning_rate, **adam_options(args), **more}


def schedule_free(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
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
    if args.optim == "schedule_free_radam":
        return found.RAdamScheduleFree, {**more, **adam_options(args)}
    more["warmup_steps"] = absolute_steps(args.warmup_steps, max(args.max_steps, 0))
    if args.optim == "schedule_free_adamw":
        return found.AdamWScheduleFree, {**more, **adam_options(args)}
    return found.SGDScheduleFree, more


def stable_adamw(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return StableAdamW of torch-optimi."""
    found = package(args.optim, "optimi", "torch-optimi")
    known = {"decouple_lr": False, "max_lr": float, "kahan_sum": bool}
    more = typed(args.optim, options, known)
    return found.StableAdamW, {"lr": args.learning_rate, **adam_options(args), **more}
