"""Accepted values of arguments with a fixed set of values, and suggestions for typos.

The sets contain all values of Transformers, including those that this package does not support.
``validation`` lists and rejects the unsupported values.
"""

from __future__ import annotations

import difflib
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from resilient.checkpoint.context import UNCHANGED
from resilient.errors import ConfigError
from resilient.strategies.gradient_compression import HOOKS, WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class ChoiceEnum(str, Enum):  # noqa: UP042 - StrEnum formats as the text, unlike Transformers
    """Base class of enums with Transformers' names and values; a member equals its text.

    As in Transformers, ``str()`` and ``format()`` give ``IntervalStrategy.STEPS``. ``repr()`` gives
    the text, because arguments are shown as they are written.
    """

    __repr__ = str.__repr__

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = [member.value for member in cls]
        raise refused(
            cls.__name__,
            value,
            f"use one of {', '.join(known)}{did_you_mean(str(value), known)}",
        )


class IntervalStrategy(ChoiceEnum):
    """Points in training at which the trainer logs or evaluates."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(ChoiceEnum):
    """Points in training at which the trainer saves."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(ChoiceEnum):
    """Contents of a push to the Hub."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class SchedulerType(ChoiceEnum):
    """Learning-rate schedules."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    GREEDY = "greedy"
    INVERSE_SQRT = "inverse_sqrt"
    POLYNOMIAL = "polynomial"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class OptimizerNames(ChoiceEnum):
    """Optimizers. Transformers has neither ``lion`` nor ``muon``."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    ADAGRAD = "adagrad"
    ADALOMO = "adalomo"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    ADEMAMIX_8BIT = "ademamix_8bit"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GROKADAMW = "grokadamw"
    LION_PYTORCH = "lion"
    LION = "lion_32bit"
    LION_8BIT = "lion_8bit"
    LOMO = "lomo"
    MUON = "muon"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    STABLE_ADAMW = "stable_adamw"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"


class ParallelMode(ChoiceEnum):
    """Ways in which the processes of a run train together."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"

    # The enum of Transformers is no text, so its members would differ from these members.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum) and type(other).__name__ == "ParallelMode":
            return bool(self.value == other.value)
        return str.__eq__(self, other) is True

    __hash__ = str.__hash__


class HPSearchBackend(ChoiceEnum):
    """Tools for a hyper-parameter search; only Optuna is supported."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"


class FSDPOption(ChoiceEnum):
    """Words of ``fsdp``."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


# Argument -> its enum.
ENUMS: dict[str, type[ChoiceEnum]] = {
    "eval_strategy": IntervalStrategy,
    "hub_strategy": HubStrategy,
    "logging_strategy": IntervalStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "save_strategy": SaveStrategy,
}


def as_choice(name: str, value: Any) -> Any:
    """Return the enum's member for a text or a member of Transformers' enum.

    A value that is no choice stays as it is; the validation refuses it.
    """
    text = value.value if isinstance(value, Enum) else value
    if name not in ENUMS or not isinstance(text, str):
        return text
    return _MEMBERS[name].get(text, text)


def text_of(choice: str) -> str:
    """Return the text of a choice for a message; ``format()`` of a member gives its name."""
    return str.__str__(choice)


_MEMBERS = {name: {member.value: member for member in kind} for name, kind in ENUMS.items()}
INTERVALS, OPTIMIZERS, SCHEDULERS = (
    tuple(member.value for member in kind)
    for kind in (IntervalStrategy, OptimizerNames, SchedulerType)
)
LEVELS = ("debug", "info", "warning", "error", "critical", "detail", "passive")
TRACKERS = (
    "none",
    "all",
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "kubeflow",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)

CHOICES: dict[str, tuple[str, ...]] = {
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "ddp_backend": ("gloo", "nccl"),
    "ddp_comm_hook": HOOKS,
    "ddp_comm_wrapper": WRAPPERS,
    "debug": ("underflow_overflow", "tpu_metrics_debug"),
    "eval_strategy": INTERVALS,
    "fp8_recipe": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "hub_strategy": tuple(member.value for member in HubStrategy),
    "include_for_metrics": ("inputs", "loss"),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "log_level": LEVELS,
    "log_level_replica": LEVELS,
    "logging_strategy": INTERVALS,
    "lr_scheduler_type": SCHEDULERS,
    "on_arithmetic_mismatch": ("stop", "continue"),
    "on_save_failure": ("stop", "continue"),
    "optim": OPTIMIZERS,
    "parallelism": ("ddp", "fsdp", "deepspeed", "auto"),
    "random_numbers": ("own", "transformers"),
    "reduction": ("native", "canonical"),
    "report_to": TRACKERS,
    "rollback_on": ("off", "nan", "spike"),
    "save_strategy": tuple(member.value for member in SaveStrategy),
    "save_unchanged": UNCHANGED,
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
}


class NameNotProvided(ConfigError, AttributeError):
    """An attribute of Transformers' classes has no counterpart; the hint names the alternative."""


class _NotProvided:
    """Descriptor of a public name of Transformers without a counterpart."""

    def __init__(self, name: str, instead: str) -> None:
        self._message = f"`{name}` of Transformers does not exist here"
        self._instead = instead

    def __get__(self, owner: object, kind: type) -> NoReturn:
        raise NameNotProvided(self._message, hint=self._instead)


def refuse_names(kind: type, names: Mapping[str, str], owner: str) -> None:
    """Make the names of a class raise an error with the alternative.

    Descriptors leave the access to other attributes as fast as before, unlike ``__getattr__``.

    Args:
        kind: Class that gets the names; an object may set its own attribute of the name.
        names: Alternative by name.
        owner: Class of Transformers that has the names.
    """
    for name, instead in names.items():
        setattr(kind, name, _NotProvided(f"{owner}.{name}", instead))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean `x`?`` for the nearest known word, or an empty text."""
    similar_words = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean `{similar_words[0]}`?" if similar_words else ""


def refused(name: str, value: object, accepted: str) -> ConfigError:
    """Return the error for a refused value; ``accepted`` describes accepted values."""
    return ConfigError(f"`{name}`={value!r} is not accepted: {accepted}")
