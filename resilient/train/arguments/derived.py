"""Settings derived from several arguments: parallelism, reduction, save schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.environment import read_flag
from resilient.errors import ConfigError
from resilient.goodput.save_planning import parse_every
from resilient.strategies.activation_checkpointing import ActivationCheckpointing, read_recomputing
from resilient.strategies.fsdp_options import FsdpOptions, read_fsdp
from resilient.strategies.gradient_compression import Compression, check_compression
from resilient.strategies.parallelism_options import (
    MESH_KEYS,
    SPLIT_BACKWARD,
    check_mesh,
    check_micro_batches,
    model_parallel_size,
    read_pipeline,
    tensor_size,
)
from resilient.train.arguments.choices import did_you_mean, refused

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.train.arguments.arguments import TrainingArguments

AUTO = "auto"
# Arguments that only apply if each rank has all parameters of the model.
_REPLICAS = (
    *("fp16_full_eval", "bf16_full_eval", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
    *("ddp_static_graph", "ddp_comm_hook"),
)
# Optimizers that update each element independently, so they work on any shard.
BY_ELEMENT = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "lion")
# Argument -> its strategy, and the values that turn it off.
_OF_STRATEGIES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "deepspeed": ("deepspeed", (None, "", {})),
    "fsdp": ("fsdp", (None, False, "", [])),
    "fsdp_config": ("fsdp", (None, "", {})),
    "fsdp_min_num_params": ("fsdp", (0,)),
    "fsdp_reshard_after_forward": ("fsdp", (True,)),
}
_SWITCHES = {"USE_FSDP": "fsdp", "USE_DEEPSPEED": "deepspeed"}
# Keys of accelerate's configuration -> accepted values and the reason; others are refused.
_ACCELERATOR: dict[str, tuple[tuple[Any, ...], str]] = {
    "split_batches": ((False,), "a batch size is per rank, not for all ranks"),
    "dispatch_batches": ((None, False), "each rank loads its own batches"),
    "even_batches": ((True,), "ranks train together, so they have equal batches"),
    "use_seedable_sampler": ((True,), "only a reproducible order can be resumed"),
    "non_blocking": ((None, True, False), "True or False"),
    "use_configured_state": ((None, False), "accelerate keeps no state here"),
}


def expand_section(section: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the arguments of the ``parallelism`` section.

    Args:
        section: ``strategy``, sizes of the mesh and its plan, and arguments by name.
        names: Names of the distributed arguments.

    Raises:
        ConfigError: A key is none of these.
    """
    values: dict[str, Any] = {"parallelism": "ddp"}
    mesh: dict[str, Any] = {}
    for name, value in section.items():
        if name == "strategy":
            values["parallelism"] = value
        elif name in MESH_KEYS:
            mesh[name] = value
        elif name in names and name != "parallelism":
            values[name] = value
        else:
            hint = did_you_mean(name, ["strategy", *MESH_KEYS, *names])
            raise refused(f"parallelism.{name}", value, f"it is not a key of the section{hint}")
    return {**values, "parallelism_config": mesh} if mesh else values


def layer_classes(args: TrainingArguments) -> tuple[str, ...]:
    """Return the names of the classes whose modules FSDP gathers one by one."""
    names = args.fsdp_transformer_layer_cls_to_wrap.split(",")
    return tuple(name.strip() for name in names if name.strip())


def parallelism_of(args: TrainingArguments, environ: Mapping[str, str]) -> str:
    """Return ``parallelism`` as given, or as implied by other arguments.

    Args:
        args: Arguments. If none of them implies a parallelism, ``USE_FSDP`` and
            ``USE_DEEPSPEED`` decide.
        environ: Environment variables.

    Raises:
        ConfigError: Both variables are true, or one has a value that is not accepted.
    """
    if args.parallelism != "ddp":
        return args.parallelism
    if args.deepspeed:
        return "deepspeed"
    if args.fsdp:
        return "fsdp"
    switches = [name for name in _SWITCHES if read_flag(environ, name)]
    if len(switches) > 1:
        raise ConfigError(f"{' and '.join(switches)} are both set: use one of them")
    return _SWITCHES[switches[0]] if switches else "ddp"


def fsdp_options(args: TrainingArguments) -> FsdpOptions:
    """Return the options of FSDP.

    Raises:
        ConfigError: A value is not accepted. The message names it.
    """
    values: dict[str, Any] = {
        "layer_classes": layer_classes(args),
        "min_num_params": args.fsdp_min_num_params,
        "reshard_after_forward": args.fsdp_reshard_after_forward,
    }
    return read_fsdp(args.fsdp, args.fsdp_config, values)


def recomputing(args: TrainingArguments) -> ActivationCheckpointing | None:
    """Return the options of activation checkpointing; None if activations are stored.

    Raises:
        ConfigError: A value is not accepted.
    """
    is_fsdp = args.parallelism == "fsdp"
    option = args.activation_checkpointing or (
        is_fsdp and fsdp_options(args).activation_checkpointing
    )
    kwargs = args.activation_checkpointing_kwargs
    options = read_recomputing(None if isinstance(kwargs, str) else kwargs)
    if not option:
        return None
    if is_fsdp and options.options["use_reentrant"]:
        raise ConfigError(
            "`use_reentrant`=True in activation_checkpointing_kwargs gives wrong gradients under "
            "FSDP, and torch does not report it: write False"
        )
    return options


def compression_of(args: TrainingArguments) -> Compression:
    """Return DDP's gradient compression."""
    options = args.ddp_comm_state_option
    options = {} if options is None or isinstance(options, str) else options
    return Compression(args.ddp_comm_hook, args.ddp_comm_wrapper, options)


def syncs_each_batch(args: TrainingArguments) -> bool:
    """Return whether gradients are reduced over ranks after each micro-batch.

    Raises:
        ConfigError: A key of ``accelerator_config`` is unknown, or its value is not supported.
    """
    config = args.accelerator_config
    options = dict(config) if isinstance(config, dict) else {}
    accumulation = dict(options.pop("gradient_accumulation_kwargs", None) or {})
    support = {
        **_ACCELERATOR,
        "num_steps": ((None, args.gradient_accumulation_steps), "set gradient_accumulation_steps"),
        "adjust_scheduler": ((True,), "the schedule counts steps, not micro-batches"),
        "sync_with_dataloader": ((True,), "the last window of an epoch is a step"),
        "sync_each_batch": ((True, False), "use True or False"),
    }
    for name, value in {**options, **accumulation}.items():
        if name not in support:
            hint = did_you_mean(name, support)
            raise refused(f"accelerator_config.{name}", value, f"it is not a key of it{hint}")
        if value not in support[name][0]:
            raise refused(f"accelerator_config.{name}", value, support[name][1])
    return bool(accumulation.get("sync_each_batch"))


def copies_ahead(args: TrainingArguments) -> bool:
    """Return whether a batch is copied to the device while the device computes the last one."""
    config = args.accelerator_config
    return not isinstance(config, dict) or config.get("non_blocking") is not False


def check_distribution(args: TrainingArguments) -> None:
    """Refuse unaccepted values of the distributed arguments.

    Raises:
        ConfigError: A value is not accepted. The message names the argument.
    """
    for name, (strategy, default) in _OF_STRATEGIES.items():
        if getattr(args, name) not in default and args.parallelism != strategy:
            raise ConfigError(
                f"`{name}` is given and `parallelism`={args.parallelism!r}: omit one of them, or "
                f"write parallelism={strategy!r}"
            )
    if fsdp_options(args).version == 1:
        _check_flat(args)
    recomputing(args)
    check_compression(compression_of(args))
    _check_overflow(args)
    _check_mesh(args)
    _check_pipeline(args)
    _check_ddp(args)


def _check_flat(args: TrainingArguments) -> None:
    """Refuse arguments that fail with flat parameter shards (FSDP1).

    Raises:
        ConfigError: An argument fails. The message names it.
    """
    conflicts = {
        "optim": (
            args.optim not in BY_ELEMENT,
            f"needs whole tensors ({', '.join(BY_ELEMENT)} do not)",
        ),
        "torch_compile": (args.torch_compile, "would compile gathered parameters"),
        "parallelism_config": (
            model_parallel_size(args.parallelism_config) > 1,
            "cuts flat parameters",
        ),
    }
    for name, (is_told, reason) in conflicts.items():
        if is_told:
            value = getattr(args, name)
            raise ConfigError(
                f"`{name}`={value!r} with FSDP1, whose parameters are flat shards: it {reason}",
                hint="omit it, or write version=2 in fsdp_config",
            )


def _check_overflow(args: TrainingArguments) -> None:
    """Refuse a gradient compression that would keep infinite values after an overflow."""
    if args.fp16 and compression_of(args).remembers:
        raise ConfigError(
            "`ddp_comm_hook`='power_sgd' with `fp16`: gradients of a step that overflows, which "
            "fp16 skips, would stay in PowerSGD's error feedback and warm start, and all later "
            "gradients would be infinite",
            hint="write bf16=True, or use_error_feedback=False and warm_start=False in "
            "ddp_comm_state_option",
        )


def _check_mesh(args: TrainingArguments) -> None:
    check_mesh(args.parallelism_config)
    config = args.parallelism_config or {}
    if args.parallelism == AUTO and config:
        raise ConfigError(
            "`parallelism_config` is given, but `parallelism`='auto' chooses it: omit one of them"
        )
    if args.parallelism != "fsdp" and (config.get("dp_shard_size") or 1) > 1:
        raise ConfigError(
            "`parallelism_config.dp_shard_size` is above 1, but "
            f"`parallelism`={args.parallelism!r} shards nothing: write fsdp=True"
        )
    if args.parallelism == "deepspeed" and tensor_size(config) > 1:
        raise ConfigError("`tp_size` of parallelism_config cannot be combined with DeepSpeed here")


# Arguments that a pipeline does not support, and the reason.
_NOT_IN_PIPELINES = {
    "fp16": "stages would have to agree on the scale inside a step; write bf16=True",
    "fp8": "layers on other ranks would be converted",
    "torch_compile": "a pass can leave the model in the middle, which compiled code cannot",
    "predict_with_generate": "a model generates only as a whole; evaluate it in another process",
    "auto_find_batch_size": "ranks compute each pass together; halve the batch by hand",
}


def _check_pipeline(args: TrainingArguments) -> None:
    """Refuse arguments that a pipeline does not support."""
    options = read_pipeline(args.parallelism_config)
    if options.ranks == 1:
        return
    if args.parallelism == "deepspeed":
        raise ConfigError("`pp_size` of parallelism_config cannot be combined with DeepSpeed here")
    for name, reason in _NOT_IN_PIPELINES.items():
        if getattr(args, name, False):
            raise ConfigError(f"`{name}` cannot be combined with `pp_size`: {reason}")
    if args.parallelism == "fsdp" and any(fsdp_options(args).dtypes):
        raise ConfigError(
            "`mixed_precision` in fsdp_config cannot be combined with `pp_size`: stages send "
            "tensors of the dtypes that the model computes in",
            hint="omit it and write bf16=True",
        )
    if options.schedule in SPLIT_BACKWARD and recomputing(args) is not None:
        raise ConfigError(
            f"`pp_schedule`={options.schedule!r} halves the backward pass, and "
            "`activation_checkpointing` would compute activations in each half: use another "
            "schedule"
        )
    check_micro_batches(options, args.gradient_accumulation_steps)


def _check_ddp(args: TrainingArguments) -> None:
    """Refuse arguments that need complete replicas if the model is split over ranks."""
    by_ddp = args.parallelism in ("ddp", AUTO) and model_parallel_size(args.parallelism_config) == 1
    for name in _REPLICAS:
        if getattr(args, name) not in (None, False, "no") and not by_ddp:
            raise ConfigError(
                f"`{name}`={getattr(args, name)!r} needs whole replicas, but the model is cut "
                f"over ranks (`parallelism`={args.parallelism!r}, `tp_size` or `pp_size`): omit it"
            )
    if syncs_each_batch(args) or not args.ddp_static_graph or args.gradient_accumulation_steps == 1:
        return
    raise ConfigError(
        "`ddp_static_graph` with `gradient_accumulation_steps` above 1: torch wants the very "
        "first backward pass to reduce",
        hint="set sync_each_batch of gradient_accumulation_kwargs in accelerator_config",
    )


CANONICAL = "canonical"
# Argument -> accepted values with canonical reduction, and the reason.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallelism": (
        ("ddp",),
        "its ranks add gradients in their own order; write shard_optimizer_state=True",
    ),
    "parallelism_config": ((None,), "a mesh ties ranks to parts of a step"),
    "gradient_accumulation_steps": (
        (1,),
        "global_train_batch_size determines how many micro-batches a rank computes",
    ),
    "ddp_comm_hook": (("no",), "compressed gradients depend on the ranks that send them"),
    "ddp_static_graph": ((None, False), "there is no DDP whose graph could be static"),
    "ddp_broadcast_buffers": ((None, True), "no pass may change a buffer"),
    "auto_find_batch_size": (
        (False,),
        "the micro-batch is fixed for the run; find its size with a short native run",
    ),
    "average_tokens_across_devices": (
        (True,),
        "the tokens of a rank depend on the number of ranks",
    ),
    "random_numbers": (("own",), "each micro-batch has its own random numbers"),
    "torch_compile": (
        (False,),
        "compiled code depends on the shapes that a rank has seen before, and so on its position",
    ),
}
# Arguments that need canonical reduction.
_NEEDING = ("global_train_batch_size", "shard_optimizer_state")


def is_canonical(args: TrainingArguments) -> bool:
    """Return whether gradients are reduced in one fixed order."""
    return args.reduction == CANONICAL


def micro_batches(args: TrainingArguments) -> int:
    """Return the number of micro-batches of a step with canonical reduction."""
    assert args.global_train_batch_size is not None, "it was validated"  # noqa: S101
    return args.global_train_batch_size // args.per_device_train_batch_size


def check_reduction(args: TrainingArguments) -> None:
    """Refuse arguments that contradict canonical reduction, or that need it while it is off.

    Raises:
        ConfigError: The message names the argument and the reason.
    """
    if not is_canonical(args):
        for name in _NEEDING:
            if getattr(args, name):
                raise ConfigError(
                    f"`{name}`={getattr(args, name)!r} belongs to reduction='canonical', but "
                    f"`reduction`={args.reduction!r}: write 'canonical', or omit it"
                )
        return
    for name, (accepted, reason) in _ONLY.items():
        value = getattr(args, name)
        if value not in accepted:
            raise _refused(name, value, reason)
    if syncs_each_batch(args):
        raise _refused("sync_each_batch", "True", "gradients are added once a step")
    _check_batch(args)
    _check_shards(args)


def _refused(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"`{name}`={value!r} cannot be combined with reduction='canonical': {why}")


def _check_batch(args: TrainingArguments) -> None:
    per_device, all_together = args.per_device_train_batch_size, args.global_train_batch_size
    if all_together is None:
        raise ConfigError(
            "`reduction`='canonical' needs `global_train_batch_size`: the number of samples of a "
            "step, whatever the number of ranks",
            hint=f"write a multiple of per_device_train_batch_size={per_device}, the size of one "
            "micro-batch",
        )
    if all_together % per_device:
        raise ConfigError(
            f"`global_train_batch_size`={all_together} is not a multiple of "
            f"`per_device_train_batch_size`={per_device}, the size of one micro-batch"
        )


def _check_shards(args: TrainingArguments) -> None:
    if not args.shard_optimizer_state:
        return
    if args.optim not in BY_ELEMENT:
        raise ConfigError(
            f"`optim`={args.optim!r} needs whole tensors, but with `shard_optimizer_state` a rank "
            f"steps pieces of them: use one of {', '.join(BY_ELEMENT)}"
        )
    if args.fp16:
        raise ConfigError(
            "`fp16` cannot be combined with `shard_optimizer_state`: ranks would have to agree on "
            "an overflow that only one rank sees; write bf16=True"
        )


def normalize_save_every(args: TrainingArguments) -> None:
    """Convert a number of steps to the equivalent ``save_steps``.

    Raises:
        ConfigError: ``save_every`` has no known form.
    """
    if args.save_every:
        args.save_steps = parse_every(args.save_every, "`save_every`").steps or args.save_steps


def is_planned(args: TrainingArguments) -> bool:
    """Return whether measurements determine the steps of saves."""
    if not args.save_every:
        return False
    schedule = parse_every(args.save_every, "`save_every`")
    return schedule.says_saves and not schedule.steps


def is_auto(args: TrainingArguments) -> bool:
    """Return whether the cost of saves determines the save interval."""
    return bool(args.save_every) and parse_every(args.save_every, "`save_every`").is_auto


def memory_steps(args: TrainingArguments) -> int:
    """Return the number of steps between steps cached in memory; 0 for never."""
    return parse_every(args.save_every, "`save_every`").memory_steps if args.save_every else 0


def check_every(args: TrainingArguments) -> None:
    """Refuse arguments that contradict ``save_every``.

    Raises:
        ConfigError: The message names the contradicting argument.
    """
    if not args.save_every:
        return
    option = f"`save_every`={args.save_every!r} (or --every)"
    schedule = parse_every(args.save_every, "`save_every`")
    if schedule.memory_steps:
        _check_memory(args, option)
    if args.save_strategy != "steps" and schedule.says_saves:
        raise ConfigError(
            f"{option} contradicts `save_strategy`={args.save_strategy!r}: omit one of them"
        )
    if args.load_best_model_at_end and is_planned(args):
        raise ConfigError(
            f"`load_best_model_at_end` needs a checkpoint of every evaluated model, but {option} "
            "saves by time: set the interval in steps, or use `save_strategy`='best' without it"
        )


def _check_memory(args: TrainingArguments, option: str) -> None:
    """Refuse a step cache without resume state, or beside a near tier that takes every save.

    Raises:
        ConfigError: The message names the argument.
    """
    if args.save_only_model:
        raise ConfigError(
            f"{option} needs the state of a resume, which `save_only_model` leaves out"
        )
    if args.near_repo:
        raise ConfigError(
            f"{option} caches steps for `repo` only, but `near_repo` takes every save: use one of "
            "them"
        )
    if args.save_strategy == "no":
        raise ConfigError(f"{option} contradicts `save_strategy`='no': cached steps may be saved")
