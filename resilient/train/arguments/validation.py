"""Validation of arguments, and the tables of unsupported arguments and names.

Every argument of Transformers is a field of ``TrainingArguments``. If this package lacks the
feature of an argument, only the values that turn the feature off are accepted. No value is
therefore ever silently ignored.

To enable an argument once its feature exists:

* for all values of the argument: delete its line in :data:`NOT_YET`;
* for one name among several (an optimizer, a schedule, a tracker): delete it from
  :data:`NAMES_NOT_YET`;
* to use the default of Transformers: change the default in ``fields.py`` too;
* adapt its rule in ``resume_rules.py`` if a resume must treat it differently, and update the rows
  of ``docs/parity.md``.

Arguments that have no effect without another argument need no line in :data:`NOT_YET`. Examples are
the arguments that begin with ``hub_``, which depend on ``push_to_hub``, and
``liger_kernel_config``, which depends on ``use_liger_kernel``.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.retention import parse_retention
from resilient.errors import ConfigError
from resilient.format.parity import check_parity
from resilient.train.arguments.choices import CHOICES, did_you_mean, refused
from resilient.train.arguments.derived import check_distribution, check_every, check_reduction
from resilient.train.arguments.resume_rules import ALL, PART, RULES
from resilient.train.arguments.value_types import is_secret, kinds_of, require_kind

if TYPE_CHECKING:
    from resilient.train.arguments.arguments import TrainingArguments

# Argument -> values that turn it off; others are refused until the feature exists.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "use_liger_kernel": (False,),
}

# Argument -> names of Transformers that are refused until they are supported.
NAMES_NOT_YET: dict[str, set[str]] = {
    "report_to": {
        "azure_ml",
        "dagshub",
        "dvclive",
        "flyte",
        "kubeflow",
        "swanlab",
    },
}

# Argument -> the only values that will ever be accepted, and the reason.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "dataloader_in_order": (
        (True,),
        "batches in another order in every run cannot be resumed bit for bit",
    ),
    "ignore_data_skip": (
        (False,),
        "a resume within an epoch costs nothing here, and a restart would repeat samples",
    ),
    "restore_callback_states_from_checkpoint": (
        (True,),
        "a callback without its state would change the resumed run; use a callback without state",
    ),
    "trackio_static_space_id": (
        (None, False),
        "nothing freezes the Space at the end; call `trackio.freeze` after training",
    ),
    "save_on_each_node": (
        (False,),
        "all ranks write one checkpoint together; near_repo keeps a second copy nearby",
    ),
}
_LAYERWISE = (
    *("lomo", "adalomo", "apollo_adamw_layerwise", "galore_adamw_layerwise"),
    *("galore_adafactor_layerwise", "galore_adamw_8bit_layerwise"),
)
# Names that will never be supported, and the reason.
NEVER: dict[str, dict[str, str]] = {
    "optim": {
        **dict.fromkeys(
            _LAYERWISE, "it steps inside backward, where no save and no clipping is possible"
        ),
        "grokadamw": "it keeps its moments outside of its state (grokadamw 0.1.2), so a resume "
        "would lose them",
        "adamw_anyprecision": "it needs torchdistx, which is not maintained any more",
        "adamw_torch_npu_fused": "it needs torch_npu, which current torch does not support",
        "adamw_torch_xla": "it needs torch_xla, which current torch does not support",
    },
    "ddp_comm_hook": {
        "batched_power_sgd": "an assertion in it fails with torch 2.13; write power_sgd",
    },
    "debug": {"tpu_metrics_debug": "it needs torch_xla, which current torch does not support"},
}

# Alternative while an argument is refused.
INSTEAD = {
    "report_to": "or pass your own tracker as `callbacks=[Reporting(...)]`",
}

_AT_LEAST_ONE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("durable_every", "near_total_limit", "eval_accumulation_steps", "torch_empty_cache_steps"),
    *("dataloader_prefetch_factor", "global_train_batch_size", "threads_per_rank"),
    "rollback_limit",
)
_NOT_NEGATIVE = (
    *("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"),
    *("dataloader_num_workers", "grace_seconds", "fsdp_min_num_params", "eval_delay"),
    "neftune_noise_alpha",
)
_POSITIVE = (
    *("save_within_seconds", "ddp_timeout", "ddp_bucket_cap_mb", "durable_every_seconds"),
    "loss_spike_deviations",
)
# Values used in arithmetic; a bound such as max_grad_norm may be infinite.
_FINITE = (
    *("learning_rate", "weight_decay", "adam_epsilon", "warmup_steps", "num_train_epochs"),
    *("logging_steps", "eval_steps", "save_steps", "eval_delay", "neftune_noise_alpha"),
    *("ddp_timeout", "ddp_bucket_cap_mb"),
)
_BELOW_ONE = ("adam_beta1", "adam_beta2", "label_smoothing_factor")


def check(args: TrainingArguments) -> None:
    """Refuse unaccepted and contradicting arguments.

    Raises:
        ConfigError: Names the argument, its value and the accepted values.
    """
    _check_choices(args)
    _check_finite(args)
    _check_numbers(args)
    _check_limits(args)
    _check_support(args)
    _check_cadences(args)
    check_every(args)
    _check_combinations(args)
    check_reduction(args)
    check_distribution(args)
    # A misspelt policy must not fail only at the first save.
    parse_retention(args.save_retention or {}, args.save_total_limit)
    check_parity(args.save_parity)


def check_types(args: TrainingArguments) -> None:
    """Refuse text left by YAML or a command line before it is compared with a number."""
    kinds = kinds_of(type(args))
    for field in fields(args):
        kind, value = kinds.get(field.name, ()), getattr(args, field.name)
        require_kind(field.name, value, kind, is_hidden=is_secret(field))


def _names_in(args: TrainingArguments, name: str) -> list[str]:
    value = getattr(args, name)
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _check_choices(args: TrainingArguments) -> None:
    for name, choices in CHOICES.items():
        for value in _names_in(args, name):
            if value not in choices:
                refusing = {*NEVER.get(name, {}), *NAMES_NOT_YET.get(name, ())}
                supported_choices = ", ".join(item for item in choices if item not in refusing)
                raise refused(
                    name,
                    value,
                    f"use one of {supported_choices}{did_you_mean(str(value), choices)}",
                )


def _check_support(args: TrainingArguments) -> None:
    """Refuse values of Transformers that this library does not support, yet or ever."""
    for name, default in NOT_YET.items():
        value = getattr(args, name)
        if value not in default:
            raise _unsupported(name, value, f"omit it, or write {default[0]!r}")
    for name, (accepted, reason) in ONLY.items():
        if getattr(args, name) not in accepted:
            raise refused(name, getattr(args, name), f"{reason}; write {accepted[0]!r}")
    for name in {**NAMES_NOT_YET, **NEVER}:
        for value in _names_in(args, name):
            _check_name(name, value)


def _check_name(name: str, value: str) -> None:
    unsupported_names, reason_by_name = NAMES_NOT_YET.get(name, set()), NEVER.get(name, {})
    if value in reason_by_name:
        raise refused(name, value, reason_by_name[value])
    if value in unsupported_names:
        supported_choices = [
            choice
            for choice in CHOICES[name]
            if choice not in unsupported_names and choice not in reason_by_name
        ]
        advice = f"use one of {', '.join(supported_choices)}" if supported_choices else "omit it"
        raise _unsupported(name, value, advice)


def _unsupported(name: str, value: Any, instead: str) -> ConfigError:
    alternative_text = f" ({INSTEAD[name]})" if name in INSTEAD else ""
    return ConfigError(f"`{name}`={value!r} is not supported: {instead}{alternative_text}")


def _check_finite(args: TrainingArguments) -> None:
    for name in _FINITE:
        value = getattr(args, name)
        if value is not None and not math.isfinite(value):
            raise refused(name, value, "use a finite number")


def _check_numbers(args: TrainingArguments) -> None:
    for name in _AT_LEAST_ONE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise refused(name, value, "use a whole number of at least 1")
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise refused(name, value, "use a number of at least 0")
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise refused(name, value, "use a number above 0")


def _check_limits(args: TrainingArguments) -> None:
    for name in _BELOW_ONE:
        if not 0 <= getattr(args, name) < 1:
            raise refused(name, getattr(args, name), "use a number from 0 to below 1")
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        raise refused("num_train_epochs", args.num_train_epochs, "use a number above 0")
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise refused("save_total_limit", args.save_total_limit, "keep at least 1, or None for all")


def _check_cadences(args: TrainingArguments) -> None:
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        if value is None:
            continue
        if not value > 0 or (value >= 1 and value != int(value)):
            raise refused(name, value, "use a whole number of steps, or a ratio between 0 and 1")
    if args.warmup_steps >= 1 and args.warmup_steps != int(args.warmup_steps):
        raise refused("warmup_steps", args.warmup_steps, "use whole steps, or a ratio below 1")


def _check_combinations(args: TrainingArguments) -> None:
    if args.fp16 and args.bf16:
        raise ConfigError("`fp16` and `bf16` are both set: use one of them")
    if args.fp16_full_eval and args.bf16_full_eval:
        raise ConfigError("`fp16_full_eval` and `bf16_full_eval` are both set: use one of them")
    if args.dataloader_num_workers == 0 and (
        args.dataloader_prefetch_factor is not None or args.dataloader_persistent_workers
    ):
        raise ConfigError(
            "`dataloader_prefetch_factor` and `dataloader_persistent_workers` need workers: "
            "set `dataloader_num_workers` to at least 1"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise refused(
            "hub_strategy",
            args.hub_strategy,
            'with `push_to_hub` write hub_strategy="end": the calls of `save_model` and '
            "`push_to_hub` in the script push",
        )
    _check_best(args)
    change_names = args.resume_changes or []
    for name in [change_names] if isinstance(change_names, str) else change_names:
        if name not in (ALL, *RULES) and not name.startswith(PART):
            hint = f"use names of arguments, part:NAME, or all{did_you_mean(name, RULES)}"
            raise refused("resume_changes", name, hint)


def _check_best(args: TrainingArguments) -> None:
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError("`save_strategy`='best' needs `metric_for_best_model`")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ConfigError("`save_strategy`='best' needs `eval_strategy` steps or epoch")
    if args.load_best_model_at_end and args.save_strategy != "best":
        _check_every_evaluation_can_be_saved(args)


def _check_every_evaluation_can_be_saved(args: TrainingArguments) -> None:
    """Refuse arguments that leave the best model unsaved when it is found."""
    if args.eval_strategy == "no" or args.eval_strategy != args.save_strategy:
        raise ConfigError(
            f"`load_best_model_at_end` needs a checkpoint of every evaluated model: "
            f"`eval_strategy`={args.eval_strategy!r} and `save_strategy`={args.save_strategy!r} "
            "must be equal and not 'no', or `save_strategy` 'best'"
        )
    eval_steps = args.eval_steps if args.eval_steps is not None else args.logging_steps
    if args.eval_strategy == "steps" and not _is_multiple(args.save_steps, eval_steps):
        raise ConfigError(
            f"`load_best_model_at_end` needs `save_steps`={args.save_steps:g} to be a multiple of "
            f"`eval_steps`={eval_steps:g}"
        )


def _is_multiple(save_steps: float, eval_steps: float) -> bool:
    """Return whether every save falls on an evaluation; ratios are compared in millionths."""
    if (save_steps < 1) != (eval_steps < 1):
        return False
    unit = 1_000_000 if save_steps < 1 else 1
    return round(save_steps * unit) % round(eval_steps * unit) == 0
