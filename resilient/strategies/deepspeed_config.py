"""DeepSpeed config: "auto" values, key checks and schedules.

DeepSpeed ignores an unknown key at the top level, so a misspelt key silently has no effect. This
module rejects an unknown key that resembles a known key, and keeps any other unknown key. Inside
``zero_optimization``, every unknown key is an error.

``"auto"`` is allowed for the same keys and has the same value as in Transformers
(integrations/deepspeed.py, 5.23). This module also fills missing values, and rejects values that
contradict the run's arguments. One error lists all contradictions, each with both values. The
Trainer creates the optimizer, so this module rejects an ``optimizer`` block with another optimizer.
If a ``scheduler`` block names a schedule, the Trainer follows this schedule.

The learning rate of ``WarmupLR`` rises from ``low`` to ``high`` and then stays constant. The rate
of ``WarmupDecayLR`` rises in the same way and then falls to ``low``. Let ``w`` be the number of
warm-up iterations and ``n`` the number of all iterations. Iteration ``i`` has the rate
``low + (high - low) f(i)``:

    f(i) = log(i + 1) / log(w)      warm-up, warmup_type "log", which is DeepSpeed's default
    f(i) = i / w                    warm-up, warmup_type "linear"
    f(i) = 1                        after the warm-up, WarmupLR
    f(i) = (n - i) / (n - w)        after the warm-up, WarmupDecayLR

DeepSpeed's engine starts a schedule before iteration 0 and steps it after each update, so the first
two updates have the rate ``low``. This module uses the operations of deepspeed.runtime.lr_schedules
0.19. Its rates are therefore bitwise equal to those of DeepSpeed.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Top-level keys that DeepSpeed 0.19 reads. DeepSpeed reads some of them only to reject them.
TOP = frozenset(
    {
        *("activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16"),
        *("checkpoint", "comet", "comms_logger", "communication_data_type", "compile"),
        *("compression_training", "csv_monitor", "curriculum_learning", "data_efficiency"),
        *("data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather"),
        *("disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel"),
        *("flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op"),
        *("gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine"),
        *("inference", "log_level", "managed_gradient_accumulation", "memory_breakdown"),
        *("nebula", "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop"),
        *("quantize_training", "scheduler", "seq_parallel_communication_data_type"),
        *("sequence_parallel_size", "sparse_attention", "sparse_gradients", "steps_per_print"),
        *("tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size"),
        *("train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism"),
        *("vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
    }
)
# Keys that DeepSpeed accepts with and without the stage as a prefix.
_OF_STAGE_3 = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters"),
    *("max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold"),
    *("param_persistence_threshold", "prefetch_bucket_size", "use_all_reduce_for_fetch_params"),
)
ZERO = frozenset(
    {
        *_OF_STAGE_3,
        *(f"stage3_{name}" for name in _OF_STAGE_3),
        *("allgather_bucket_size", "allgather_partitions", "compute_grad_norm"),
        *("contiguous_gradients", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
        *("elastic_checkpoint", "enable_sanity_checks", "ignore_unused_parameters", "leaf_module"),
        *("legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings"),
        *("memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size"),
        *("offload_optimizer", "offload_param", "overlap_comm", "override_module_apply"),
        *("parameter_alignment", "pipeline_loading_checkpoint", "reduce_bucket_size"),
        *("reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory"),
        *("stage", "stage3_gather_fp16_weights_on_model_save", "sub_group_size"),
        *("use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size"),
        *("zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        *("zero_quantized_weights", "zeropp_loco_param"),
    }
)
# A key of the user's own tool is not a misspelling. The misspelling `gradient_cliping` has a
# similarity of 0.97.
_ALIKE = 0.8


def find_misspelt_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the misspelt keys of a config, at its top level and in ``zero_optimization``."""
    for name in config:
        similar_names = get_close_matches(str(name), TOP, n=1, cutoff=_ALIKE)
        if name not in TOP and similar_names:
            yield f"{name} is not a key of it; did you mean `{similar_names[0]}`?"
    zero = config.get("zero_optimization")
    for name in zero if isinstance(zero, dict) else ():
        if name not in ZERO:
            similar_names = get_close_matches(str(name), ZERO, n=1)
            hint = f"; did you mean `{similar_names[0]}`?" if similar_names else ""
            yield f"zero_optimization.{name} is not a key of it{hint}"


# Schedule of DeepSpeed -> values of `lr_scheduler_type` that agree with it; "linear" is the
# default.
_KINDS = {"WarmupLR": ("linear", "constant_with_warmup"), "WarmupDecayLR": ("linear",)}
_TYPES = ("log", "linear")
_STEPS = 1000  # DeepSpeed's default length of a warm-up
_PARAMS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type")


@dataclass(frozen=True, slots=True)
class Warmup:
    """A warm-up schedule of DeepSpeed.

    Attributes:
        low: First rate.
        high: Rate after the warm-up; None for the first rate of a parameter group.
        steps: Steps of the warm-up, at least 2.
        total: Steps of the run; None if the rate stays constant.
        is_log: Whether the rate rises as a logarithm.
    """

    low: float
    high: float | None
    steps: int
    total: int | None
    is_log: bool

    def rate(self, step: int, base: float) -> float:
        """Return the rate of a group after ``step`` updates; ``base`` is its first rate."""
        high = base if self.high is None else self.high
        return self.low if step < 1 else self.low + (high - self.low) * self._factor(step - 1)

    def _factor(self, at: int) -> float:
        if at < self.steps:
            return 1.0 / math.log(self.steps) * math.log(at + 1) if self.is_log else at / self.steps
        if self.total is None:
            return 1.0
        return max(0.0, float(self.total - at) / float(max(1.0, self.total - self.steps)))


def contradictions(block: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unknown or contradicting entries of a ``scheduler`` block.

    Args:
        block: Block of the config.
        values: The run's arguments by name.
    """
    kind, params = block.get("type"), block.get("params", {})
    if kind not in _KINDS:
        yield f"scheduler.type={kind!r} is none of {', '.join(_KINDS)}"
    elif values["lr_scheduler_type"] not in _KINDS[kind]:
        yield f"scheduler.type={kind!r} where lr_scheduler_type={values['lr_scheduler_type']!r}"
    for name in params:
        if name not in _PARAMS:
            yield f"scheduler.params.{name} is none of {', '.join(_PARAMS)}"
    if params.get("warmup_type", "log") not in _TYPES:
        yield f"scheduler.params.warmup_type={params['warmup_type']!r} is none of {_TYPES}"
    low = params.get("warmup_min_lr", 0)
    if low != "auto" and not isinstance(low, int | float):
        yield f"scheduler.params.warmup_min_lr={low!r} is not a number"
    yield from _other_values(params, values)


def _other_values(params: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differing values, except lengths that depend on the length of the run."""
    argument_by_key = {"warmup_max_lr": "learning_rate"}
    if values["max_steps"] > 0:
        argument_by_key["total_num_steps"] = "max_steps"
    if values["warmup_steps"] >= 1:
        argument_by_key["warmup_num_steps"] = "warmup_steps"
    for name, argument in argument_by_key.items():
        value = values[argument]
        if params.get(name) not in (None, "auto", value):
            yield f"scheduler.params.{name}={params[name]!r} where {argument}={value!r}"
    if params.get("warmup_num_steps") == "auto" and not values["warmup_steps"]:
        yield "scheduler.params.warmup_num_steps='auto' where warmup_steps=0, which DeepSpeed lacks"


def read_warmup(block: Mapping[str, Any], rate: float, warmup: int, total: int) -> Warmup:
    """Return the schedule of a block, with "auto" filled.

    Args:
        block: Block without contradictions.
        rate: Learning rate of the run.
        warmup: Warm-up steps of the run; 0 if not set.
        total: Steps of the run.

    Raises:
        ConfigError: A length is not a positive number, or differs from the run's.
    """
    params = {name: value for name, value in block.get("params", {}).items() if value is not None}
    steps = params.get("warmup_num_steps", warmup or _STEPS)
    steps = warmup if steps == "auto" else steps
    if not isinstance(steps, int) or steps < 1 or (warmup and steps != warmup):
        raise ConfigError(
            f"scheduler.params.warmup_num_steps={steps!r} in the config of DeepSpeed is not the "
            f"length of a warm-up, or not that of `warmup_steps` ({warmup})",
            hint='write "auto" and set warmup_steps',
        )
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr")
    ends = params.get("total_num_steps", total)
    return Warmup(
        low=0.0 if low == "auto" else float(low),
        high=rate if high == "auto" else high,
        steps=max(2, steps),
        total=None if block["type"] == "WarmupLR" else total if ends == "auto" else int(ends),
        is_log=params.get("warmup_type", "log") == "log",
    )


Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeepSpeedInputs:
    """Arguments of the run that the config depends on.

    Attributes:
        values: Values by argument: the batch size, ``learning_rate``, ``bf16``, ...
        ranks: Number of ranks that train together.
        hidden_size: Width of the model, which sizes ZeRO's buckets; 0 if unknown.
    """

    values: Mapping[str, Any]
    ranks: int
    hidden_size: int = 0


# Key -> argument with the same meaning.
_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
_OPTIMIZER = {
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_betas",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}
# The only accepted value of each key, and the reason.
_FIXED: dict[str, tuple[Any, str]] = {
    "zero_optimization.offload_optimizer.device": (
        ("cpu", "none"),
        "state on NVMe cannot be saved from there",
    ),
    "zero_optimization.offload_param.device": (
        ("cpu", "none"),
        "parameters on NVMe cannot be saved from there",
    ),
    "zero_optimization.zero_hpz_partition_size": ((1,), "a second partition is not saved"),
    "zero_optimization.mics_shard_size": ((-1, 0), "MiCS keeps several copies of a partition"),
    "zero_optimization.stage": ((0, 1, 2, 3), "there is no other"),
}


def read_config(source: Mapping[str, Any] | str | None) -> Config:
    """Read a config into a new dict.

    Args:
        source: A dict, the path of a JSON file, or None for ZeRO 2.

    Raises:
        ConfigError: The file cannot be read or is not a JSON object.
    """
    if source is None or source == "":
        return {"zero_optimization": {"stage": 2}}
    if not isinstance(source, str):
        return deepcopy(dict(source))
    try:
        config = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"`deepspeed`={source!r} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"`deepspeed`={source!r} holds a {type(config).__name__}, not an object")
    return config


def complete(config: Mapping[str, Any], inputs: DeepSpeedInputs) -> Config:
    """Complete a config with the run's arguments, and reject contradictions.

    Args:
        config: The user's config, which is not changed.
        inputs: Arguments of the run.

    Raises:
        ConfigError: Keys contradict arguments, request unsupported or unsavable features, or are
            misspelt; the message names all of them.
    """
    unknown = [*find_misspelt_keys(config)]
    if unknown:
        raise ConfigError(f"the config of DeepSpeed: {'; '.join(unknown)}")
    full_config = deepcopy(dict(config))
    differences = [*_fill(full_config, inputs), *_unfit(full_config)]
    differences += [f"{key}='auto' is not known how to fill" for key in _left_auto(full_config)]
    if differences:
        raise ConfigError(
            f"the config of DeepSpeed and the arguments of the run differ: "
            f"{'; '.join(differences)}",
            hint='write "auto" for these keys, or omit them',
        )
    full_config.pop("optimizer", None)
    full_config.setdefault("steps_per_print", 100)
    full_config.setdefault("wall_clock_breakdown", False)
    # The training loop uses an optimizer of torch; DeepSpeed would require its own CPU optimizer.
    full_config["zero_force_ds_cpu_optimizer"] = False
    full_config["zero_allow_untested_optimizer"] = True
    return full_config


def stage_in(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage that a config requests."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _fill(config: Config, inputs: DeepSpeedInputs) -> Iterator[str]:
    """Fill values that are "auto" or missing; yield the contradictions."""
    values = inputs.values
    per_step = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    batch = per_step * inputs.ranks
    yield from _match(
        config, "train_batch_size", batch, f"{inputs.ranks} ranks take {batch} a step"
    )
    for key, argument in _SAME.items():
        yield from _match(config, key, values[argument], _says(argument, values[argument]))
    yield from _fill_optimizer(config, values)
    if "scheduler" in config:
        # Remove the schedule, because the training loop steps it
        # (resilient.train.schedules.factory).
        yield from contradictions(config.pop("scheduler"), values)
    _fill_zero(config, inputs.hidden_size)


def _fill_optimizer(config: Config, values: Mapping[str, Any]) -> Iterator[str]:
    if "optimizer" not in config:
        return
    kind = config["optimizer"].get("type", "AdamW")
    if kind not in ("Adam", "AdamW") or not str(values["optim"]).startswith("adamw_torch"):
        yield f"optimizer.type={kind!r} where optim={values['optim']!r}"
    for key, argument in _OPTIMIZER.items():
        if _get(config, key) is not None:
            yield from _match(config, key, values[argument], _says(argument, values[argument]))


def _fill_zero(config: Config, hidden_size: int) -> None:
    """Size the "auto" buckets by the model's width, as Transformers does, if the width is known."""
    squared = hidden_size * hidden_size
    sizes = {
        "reduce_bucket_size": squared,
        "stage3_prefetch_bucket_size": int(0.9 * squared),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero = config.get("zero_optimization", {})
    for name, size in sizes.items():
        if zero.get(name) != "auto":
            continue
        if hidden_size:
            zero[name] = size
        else:
            del zero[name]


def _unfit(config: Config) -> Iterator[str]:
    for key, (accepted, reason) in _FIXED.items():
        value = _get(config, key)
        if value is not None and value not in accepted:
            yield f"{key}={value!r} is not one of {accepted}: {reason}"


def _match(config: Config, key: str, value: Any, says: str) -> Iterator[str]:
    """Fill one key, or yield its contradiction."""
    config_value = _get(config, key)
    if config_value is None or config_value == "auto":
        _set(config, key, value)
    elif (list(config_value) if isinstance(config_value, list | tuple) else config_value) != value:
        yield f"{key}={config_value!r} where {says}"


def _says(argument: str, value: Any) -> str:
    return f"{argument}={value!r}"


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _set(config: Config, key: str, value: Any) -> None:
    *folders, leaf_key = key.split(".")
    for name in folders:
        config = config.setdefault(name, {})
    config[leaf_key] = value


def _left_auto(config: Any, path: str = "") -> Iterator[str]:
    if config == "auto":
        yield path
    elif isinstance(config, dict):
        for name, value in config.items():
            yield from _left_auto(value, f"{path}.{name}" if path else str(name))
