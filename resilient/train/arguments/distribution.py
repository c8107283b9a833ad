"""What the arguments about several ranks say together (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.strategies.fsdp_options import FsdpOptions, read_fsdp
from resilient.strategies.recomputing import Recomputing, read_recomputing

if TYPE_CHECKING:
    from resilient.train.arguments.arguments import TrainingArguments


def layer_classes(args: TrainingArguments) -> tuple[str, ...]:
    """Return the names of the classes whose modules FSDP gathers one by one."""
    names = args.fsdp_transformer_layer_cls_to_wrap.split(",")
    return tuple(name.strip() for name in names if name.strip())


def parallelism_of(args: TrainingArguments) -> str:
    """Return how ranks share the model: what is said, or what the other arguments are about."""
    if args.parallelism == "ddp" and args.deepspeed:
        return "deepspeed"
    if args.parallelism == "ddp" and args.fsdp:
        return "fsdp"
    return args.parallelism


def fsdp_options(args: TrainingArguments) -> FsdpOptions:
    """Return how a model is sharded.

    Raises:
        ConfigError: names what is not accepted.
    """
    given: dict[str, Any] = {
        "layer_classes": layer_classes(args),
        "min_num_params": args.fsdp_min_num_params,
        "reshard_after_forward": args.fsdp_reshard_after_forward,
    }
    return read_fsdp(args.fsdp, args.fsdp_config, given)


def recomputing(args: TrainingArguments) -> Recomputing | None:
    """Return how activations are computed again; None if they are stored.

    Raises:
        ConfigError: names what is not accepted.
    """
    is_fsdp = args.parallelism == "fsdp"
    asked = args.activation_checkpointing or (
        is_fsdp and fsdp_options(args).activation_checkpointing
    )
    kwargs = args.activation_checkpointing_kwargs
    how = read_recomputing(None if isinstance(kwargs, str) else kwargs)
    if not asked:
        return None
    if is_fsdp and how.options["use_reentrant"]:
        raise ConfigError(
            "`use_reentrant`=True in activation_checkpointing_kwargs trains wrong under FSDP, "
            "without a word from torch: write False"
        )
    return how


def check_distribution(args: TrainingArguments) -> None:
    """Refuse what is not accepted of the arguments about several ranks.

    Raises:
        ConfigError: names it.
    """
    if args.deepspeed and args.parallelism != "deepspeed":
        raise ConfigError(
            f"`deepspeed` is given and `parallelism`={args.parallelism!r}: leave one of them out"
        )
    if args.fsdp and args.parallelism != "fsdp":
        raise ConfigError(
            f"`fsdp` is given and `parallelism`={args.parallelism!r}: leave one of them out"
        )
    if args.fsdp_config and args.parallelism != "fsdp":
        raise ConfigError(
            f"`fsdp_config` is given and `parallelism`={args.parallelism!r}: write fsdp=True"
        )
    fsdp_options(args)
    recomputing(args)
