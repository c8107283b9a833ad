"""DeepSpeed's config, completed from what the run was told: "auto" filled, contradictions refused.

What may be ``"auto"`` and what it becomes is Transformers' rule (integrations/deepspeed.py, 5.23).
Here a value that is left out is filled as well, and a value of any key that says something else
than the run's arguments is refused, all of them at once, with both values. The optimizer is the
Trainer's: a block that asks for the same is taken, any other is refused. A block that names a
schedule is honoured by the Trainer (:mod:`resilient.strategies.deepspeed_warmup`).
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.strategies.deepspeed_keys import misspelt
from resilient.strategies.deepspeed_warmup import contradictions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """What the arguments of the run say, in their words.

    Attributes:
        values: by argument: the batch size, ``learning_rate``, ``bf16``, ...
        ranks: how many train together.
        hidden_size: of the model, 0 if it does not say one; it sizes ZeRO's buckets.
    """

    values: Mapping[str, Any]
    ranks: int
    hidden_size: int = 0


# Key -> argument that says the same.
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
# What these keys have in common with our way of training, and no other value has.
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


def read_config(given: Mapping[str, Any] | str | None) -> Config:
    """Return a config as a dict of one's own.

    Args:
        given: a dict, the path of a JSON file, or None for ZeRO 2.

    Raises:
        ConfigError: the file cannot be read or is no JSON object.
    """
    if given is None or given == "":
        return {"zero_optimization": {"stage": 2}}
    if not isinstance(given, str):
        return deepcopy(dict(given))
    try:
        config = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"`deepspeed`={given!r} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"`deepspeed`={given!r} holds a {type(config).__name__}, not an object")
    return config


def complete(config: Mapping[str, Any], told: Told) -> Config:
    """Return a config that says all that DeepSpeed must know, and nothing else than the run.

    Args:
        config: what the user gave; it stays as it is.
        told: the run's arguments.

    Raises:
        ConfigError: keys contradict arguments, or ask for what cannot be saved or is not ours to
            give, or are misspelt; all of them are named.
    """
    unknown = [*misspelt(config)]
    if unknown:
        raise ConfigError(f"the config of DeepSpeed: {'; '.join(unknown)}")
    made = deepcopy(dict(config))
    wrong = [*_fill(made, told), *_unfit(made)]
    wrong += [f"{key}='auto' is not known how to fill" for key in _left_auto(made)]
    if wrong:
        raise ConfigError(
            f"the config of DeepSpeed and the arguments of the run differ: {'; '.join(wrong)}",
            hint='write "auto" for these keys, or leave them out',
        )
    made.pop("optimizer", None)
    made.setdefault("steps_per_print", 100)
    made.setdefault("wall_clock_breakdown", False)
    # The loop's optimizer is torch's, which DeepSpeed would rather have replaced by its own.
    made["zero_force_ds_cpu_optimizer"] = False
    made["zero_allow_untested_optimizer"] = True
    return made


def stage_in(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage that a config asks for."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _fill(config: Config, told: Told) -> Iterator[str]:
    """Fill what is "auto" or left out; yield what says something else."""
    values = told.values
    per_step = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    batch = per_step * told.ranks
    yield from _match(config, "train_batch_size", batch, f"{told.ranks} ranks take {batch} a step")
    for key, argument in _SAME.items():
        yield from _match(config, key, values[argument], _says(argument, values[argument]))
    yield from _fill_optimizer(config, values)
    if "scheduler" in config:
        # Taken out here: the loop steps it (resilient.train.schedules.deepspeed).
        yield from contradictions(config.pop("scheduler"), values)
    _fill_zero(config, told.hidden_size)


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
    """Size the buckets of "auto" by the model's width, as Transformers does, or not at all."""
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
    for key, (accepted, why) in _FIXED.items():
        value = _get(config, key)
        if value is not None and value not in accepted:
            yield f"{key}={value!r} is not one of {accepted}: {why}"


def _match(config: Config, key: str, value: Any, says: str) -> Iterator[str]:
    """Fill one key, or yield what is wrong with it."""
    found = _get(config, key)
    if found is None or found == "auto":
        _set(config, key, value)
    elif (list(found) if isinstance(found, list | tuple) else found) != value:
        yield f"{key}={found!r} where {says}"


def _says(argument: str, value: Any) -> str:
    return f"{argument}={value!r}"


def _get(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def _set(config: Config, key: str, value: Any) -> None:
    *folders, last = key.split(".")
    for name in folders:
        config = config.setdefault(name, {})
    config[last] = value


def _left_auto(config: Any, path: str = "") -> Iterator[str]:
    if config == "auto":
        yield path
    elif isinstance(config, dict):
        for name, one in config.items():
            yield from _left_auto(one, f"{path}.{name}" if path else str(name))
