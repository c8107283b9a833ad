"""Former names of arguments, accepted with a warning and converted to current names.

An old argument is converted to its current name, or to values of current arguments. An old argument
that requests only the default behavior is dropped. A value without an equivalent is refused with
the reason.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.errors import ConfigError
from resilient.train.arguments.choices import did_you_mean, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

# Old name -> current name with the same values.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
    "warmup_ratio": "warmup_steps",
    "xpu_backend": "ddp_backend",
}


class OldArgument(NamedTuple):
    """Meaning of an old argument.

    Attributes:
        written: Function from the old value to current arguments; empty result if the value changes
            nothing.
        accepted: Values that can be converted; empty: all values.
        why: Reason or alternative, in a few words.
    """

    written: Callable[[Any], dict[str, Any]]
    accepted: tuple[Any, ...]
    why: str


# DeepSpeed's settings for a config that gives only the stage.
_FROM_STAGE_2 = {
    "allgather_partitions": True,
    "allgather_bucket_size": 200_000_000,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 200_000_000,
    "contiguous_gradients": True,
}
_FROM_STAGE_3 = {
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def zero_of(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's ``zero_optimization`` for a stage, with the usual sizes."""
    stage_options = {**(_FROM_STAGE_2 if stage > 1 else {}), **(_FROM_STAGE_3 if stage > 2 else {})}  # noqa: PLR2004 - ZeRO's stages
    return {"stage": stage, **stage_options}


def _warmup(ratio: Any) -> dict[str, Any]:
    """Convert a ratio of all steps to ``warmup_steps``, where 1 would mean one step."""
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not is_number or not 0 <= ratio <= 1:
        raise refused("warmup_ratio", ratio, "use a number from 0 to 1, or write warmup_steps=N")
    return {"warmup_steps": math.nextafter(1.0, 0.0) if ratio == 1 else ratio}


def _no_arguments(_value: Any) -> dict[str, Any]:
    return {}


# Old name -> its meaning, for names that were not only renamed.
MEANT = {
    "adafactor": OldArgument(
        lambda value: {"optim": "adafactor"} if value else {}, (), 'write optim="adafactor"'
    ),
    "deepspeed_zero_stage": OldArgument(
        lambda value: {"deepspeed": {"zero_optimization": zero_of(value)}},
        (0, 1, 2, 3),
        'write deepspeed={"zero_optimization": {"stage": N}}',
    ),
    "dispatch_batches": OldArgument(
        _no_arguments, (None, False), "each rank loads its own batches"
    ),
    "fp16_backend": OldArgument(
        _no_arguments,
        ("auto", "native", "amp"),
        "fp16 is part of torch; apex is not supported any more",
    ),
    "fp16_opt_level": OldArgument(
        _no_arguments, (), "it belonged to apex, which is not supported any more"
    ),
    "group_by_length": OldArgument(
        lambda value: {"train_sampling_strategy": "group_by_length"} if value else {},
        (),
        'write train_sampling_strategy="group_by_length"',
    ),
    "half_precision_backend": OldArgument(
        _no_arguments,
        ("auto", "native", "amp", "cuda_amp", "cpu_amp"),
        "fp16 and bf16 are part of torch",
    ),
    "include_inputs_for_metrics": OldArgument(
        lambda value: {"include_for_metrics": ["inputs"]} if value else {},
        (),
        'write include_for_metrics=["inputs"]',
    ),
    "jit_mode_eval": OldArgument(_no_arguments, (False, None), "write torch_compile=True"),
    "learning_rate_end": OldArgument(
        lambda value: {"lr_scheduler_kwargs": {"lr_end": value}},
        (),
        'write lr_scheduler_kwargs={"lr_end": N}',
    ),
    "local_rank": OldArgument(
        _no_arguments, (), "the launcher sets it; `args.local_rank` shows it"
    ),
    "overwrite_output_dir": OldArgument(
        _no_arguments,
        (False, None),
        "nothing is overwritten: train(resume_from_checkpoint=False) starts from scratch",
    ),
    "parallel_mode": OldArgument(
        _no_arguments, (), "the launcher sets it; `args.parallel_mode` shows it"
    ),
    "past_index": OldArgument(
        _no_arguments, (-1,), "pass the remembered state to the model in `compute_loss`"
    ),
    "power": OldArgument(
        lambda value: {"lr_scheduler_kwargs": {"power": value}},
        (),
        'write lr_scheduler_kwargs={"power": N}',
    ),
    "save_safetensors": OldArgument(
        _no_arguments, (True, None), "checkpoints are safetensors, always"
    ),
    "sharded_ddp": OldArgument(_no_arguments, ("", None, False, []), 'write parallelism="fsdp"'),
    "split_batches": OldArgument(
        _no_arguments, (None, False), "a batch size is per rank, not for all ranks"
    ),
    "tpu_num_cores": OldArgument(
        _no_arguments, (None,), "current torch does not support torch_xla"
    ),
    "use_ipex": OldArgument(_no_arguments, (False, None), "its function is part of torch; omit it"),
    "use_mps_device": OldArgument(_no_arguments, (False, None), "omit it"),
}
# Names that are not training arguments -> the place where they belong.
ELSEWHERE = {
    "data_collator": "pass it to the Trainer",
    "dropout": "it belongs to the model: set it in the model or in its config",
    "model_init": "pass it to the Trainer",
    "processing_class": "pass it to the Trainer",
    "task_name": "it belongs to the script: `compute_metrics` can be a partial",
    "tokenizer": "pass it to the Trainer as `processing_class`",
}
OLD_NAMES = frozenset({*RENAMED, *MEANT})


def rename_deprecated(
    options: Mapping[str, Any], field_names: Collection[str], *, depth: int = 3
) -> dict[str, Any]:
    """Return the options under current names, and warn about each old name.

    Args:
        options: Arguments by name.
        field_names: Names of the class's own fields; own fields take precedence over old names.
        depth: Frames between this call and the user's line, for the warning.

    Raises:
        ConfigError: A name is unknown, an old value has no equivalent, or an old and a current name
            have different values.
    """
    current_options = {name: value for name, value in options.items() if name in field_names}
    for name, value in options.items():
        if name in field_names:
            continue
        new_values = _as_current(name, value, field_names)
        warnings.warn(_deprecation_text(name, new_values), FutureWarning, stacklevel=depth)
        for new_name, new_value in new_values.items():
            current_options[new_name] = _merged_value(name, new_name, new_value, current_options)
    return current_options


def _as_current(name: str, value: Any, field_names: Collection[str]) -> dict[str, Any]:
    """Return an old argument as current arguments.

    Raises:
        ConfigError: The value has no equivalent.
    """
    if name == "warmup_ratio":
        return _warmup(value)
    if name in RENAMED:
        return {RENAMED[name]: value}
    if name in MEANT:
        deprecation = MEANT[name]
        if deprecation.accepted and value not in deprecation.accepted:
            raise ConfigError(f"`{name}`={value!r} has no equivalent any more: {deprecation.why}")
        return deprecation.written(value)
    if name in ELSEWHERE:
        raise ConfigError(f"`{name}`={value!r} is not an argument of training: {ELSEWHERE[name]}")
    hint = did_you_mean(name, [*field_names, *OLD_NAMES])
    raise ConfigError(f"`{name}`={value!r} is not an argument of training{hint}")


def warn_of_old_name(old: str, new: str) -> None:
    """Warn that the caller's caller used an old name of an argument."""
    warnings.warn(f"`{old}` is deprecated: write {new}", FutureWarning, stacklevel=3)


def _deprecation_text(name: str, written: Mapping[str, Any]) -> str:
    replacement_text = ", ".join(f"{today}={value!r}" for today, value in written.items())
    if name == "warmup_ratio":
        replacement_text += " (below 1 it is a ratio of all steps)"
    if replacement_text:
        return f"`{name}` is deprecated: write {replacement_text}"
    return f"`{name}` is deprecated and has no effect: {MEANT[name].why}"


def _merged_value(old: str, now: str, value: Any, taken: Mapping[str, Any]) -> Any:
    """Return the value of ``now`` when its old name is also given.

    Raises:
        ConfigError: Both names are given and their values differ.
    """
    if now not in taken or taken[now] is None:
        return value
    if isinstance(value, dict) and isinstance(taken[now], dict):
        return {**value, **taken[now]}
    # Transformers' rule: a given number of steps overrides the ratio.
    if old == "warmup_ratio" and taken[now] != 0:
        return taken[now]
    if old == "warmup_ratio" or value == taken[now]:
        return value
    raise ConfigError(
        f"`{old}` is an old name of `{now}`, and both are set: {value!r} and {taken[now]!r}; omit "
        f"`{old}`"
    )
