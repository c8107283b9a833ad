"""What the arguments about several ranks say together (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.strategies.compression import Compression, check_compression
from resilient.strategies.fsdp_options import FsdpOptions, read_fsdp
from resilient.strategies.recomputing import Recomputing, read_recomputing
from resilient.train.arguments.words import did_you_mean, refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments.arguments import TrainingArguments


_SWITCHES = {"USE_FSDP": "fsdp", "USE_DEEPSPEED": "deepspeed"}
# Keys of accelerate's configuration -> what is done here; any other value is refused.
_ACCELERATOR: dict[str, tuple[tuple[Any, ...], str]] = {
    "split_batches": ((False,), "a batch size is that of a rank, not of all of them"),
    "dispatch_batches": ((None, False), "each rank loads its own batches"),
    "even_batches": ((True,), "ranks train together, so they have equal batches"),
    "use_seedable_sampler": ((True,), "only an order that can be drawn again can be resumed"),
    "non_blocking": ((None, True, False), "True or False"),
    "use_configured_state": ((None, False), "there is no state of accelerate's"),
}


def layer_classes(args: TrainingArguments) -> tuple[str, ...]:
    """Return the names of the classes whose modules FSDP gathers one by one."""
    names = args.fsdp_transformer_layer_cls_to_wrap.split(",")
    return tuple(name.strip() for name in names if name.strip())


def parallelism_of(args: TrainingArguments, environ: Mapping[str, str]) -> str:
    """Return how ranks share the model: what is said, or what the other arguments are about.

    Args:
        args: if they say nothing, ``USE_FSDP`` and ``USE_DEEPSPEED`` do.
        environ: the environment.

    Raises:
        ConfigError: both of these are set.
    """
    if args.parallelism != "ddp":
        return args.parallelism
    if args.deepspeed:
        return "deepspeed"
    if args.fsdp:
        return "fsdp"
    asked = [name for name in _SWITCHES if environ.get(name, "").lower() in ("1", "true", "yes")]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are both set: use one of them")
    return _SWITCHES[asked[0]] if asked else "ddp"


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


def compression_of(args: TrainingArguments) -> Compression:
    """Return how DDP sends gradients."""
    options = args.ddp_comm_state_option
    options = {} if options is None or isinstance(options, str) else options
    return Compression(args.ddp_comm_hook, args.ddp_comm_wrapper, options)


def syncs_each_batch(args: TrainingArguments) -> bool:
    """Say whether gradients are added up over ranks after each micro-batch.

    Raises:
        ConfigError: a key of ``accelerator_config`` is unknown, or asks for what is not done.
    """
    config = args.accelerator_config
    told = dict(config) if isinstance(config, dict) else {}
    accumulation = dict(told.pop("gradient_accumulation_kwargs", None) or {})
    known = {
        **_ACCELERATOR,
        "num_steps": ((None, args.gradient_accumulation_steps), "set gradient_accumulation_steps"),
        "adjust_scheduler": ((True,), "the schedule counts steps, not micro-batches"),
        "sync_with_dataloader": ((True,), "the last window of an epoch is a step"),
        "sync_each_batch": ((True, False), "use True or False"),
    }
    for name, value in {**told, **accumulation}.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise refused(f"accelerator_config.{name}", value, f"it is no key of it{hint}")
        if value not in known[name][0]:
            raise refused(f"accelerator_config.{name}", value, known[name][1])
    return bool(accumulation.get("sync_each_batch"))


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
    if (args.fp16_full_eval or args.bf16_full_eval) and args.parallelism != "ddp":
        raise ConfigError(
            f"`fp16_full_eval` and `bf16_full_eval` need whole weights, and `parallelism` is "
            f"{args.parallelism!r}: leave them out; bf16=True evaluates in bf16 too"
        )
    fsdp_options(args)
    recomputing(args)
    check_compression(compression_of(args))
    if (
        args.ddp_static_graph
        and args.gradient_accumulation_steps > 1
        and not syncs_each_batch(args)
    ):
        raise ConfigError(
            "`ddp_static_graph` with `gradient_accumulation_steps` above 1: torch wants the very "
            "first backward pass to reduce",
            hint="set sync_each_batch of gradient_accumulation_kwargs in accelerator_config",
        )
    syncs_each_batch(args)
    if args.parallelism != "ddp" and args.ddp_comm_hook != "no":
        raise ConfigError(
            f"`ddp_comm_hook`={args.ddp_comm_hook!r} is DDP's, and `parallelism` is "
            f"{args.parallelism!r}: leave one of them out"
        )
