"""Accepted values of arguments with a fixed set of values, and suggestions for typos.

The sets contain all values of Transformers, including those that this package does not support.
``validation`` lists and rejects the unsupported values.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from resilient.checkpoint.context import UNCHANGED
from resilient.errors import ConfigError
from resilient.strategies.gradient_compression import HOOKS, WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterable


class ChoiceText(str):
    """Text of an argument for which Transformers has an enum: ``value`` is the text too."""

    __slots__ = ()

    @property
    def value(self) -> str:
        """The text, as scripts for Transformers read it."""
        return str(self)


# Arguments for which Transformers has an enum.
ENUMS = (
    *("eval_strategy", "hub_strategy", "logging_strategy", "lr_scheduler_type", "optim"),
    "save_strategy",
)
INTERVALS = ("no", "steps", "epoch")
LEVELS = ("debug", "info", "warning", "error", "critical", "detail", "passive")
OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "adafactor",
    "adagrad",
    "adalomo",
    "adamw_8bit",
    "adamw_anyprecision",
    "adamw_bnb_8bit",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "ademamix",
    "ademamix_8bit",
    "apollo_adamw",
    "apollo_adamw_layerwise",
    "galore_adafactor",
    "galore_adafactor_layerwise",
    "galore_adamw",
    "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
    "galore_adamw_layerwise",
    "grokadamw",
    "lion",
    "lion_32bit",
    "lion_8bit",
    "lomo",
    "muon",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop",
    "rmsprop_bnb",
    "rmsprop_bnb_32bit",
    "rmsprop_bnb_8bit",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
    "stable_adamw",
    "adamw_torch_npu_fused",
    "adamw_torch_xla",
)
SCHEDULERS = (
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_warmup_with_min_lr",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "greedy",
    "inverse_sqrt",
    "polynomial",
    "reduce_lr_on_plateau",
    "warmup_stable_decay",
)
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
    "hub_strategy": ("end", "every_save", "checkpoint", "all_checkpoints"),
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
    "save_strategy": (*INTERVALS, "best"),
    "save_unchanged": UNCHANGED,
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
}


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean `x`?`` for the nearest known word, or an empty text."""
    similar_words = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean `{similar_words[0]}`?" if similar_words else ""


def refused(name: str, value: object, accepted: str) -> ConfigError:
    """Return the error for a refused value; ``accepted`` describes accepted values."""
    return ConfigError(f"`{name}`={value!r} is not accepted: {accepted}")
