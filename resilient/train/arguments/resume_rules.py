"""Rules for a resume whose arguments differ from those in the checkpoint.

Each argument has one of four rules. The rule applies if the value differs from the value in the
checkpoint:

* *free*: the difference does not affect training.
* *reported*: an event reports the difference, and the run continues. The new value affects the run,
  or the checkpoint's value is used instead.
* *refused*: the resume fails, because training would continue as a different run. To allow the
  difference, list the argument's name in ``resume_changes``.
* *fixed*: the resume fails, because the saved state does not fit the new value. ``resume_changes``
  cannot allow the difference.

All differences are reported before any state is loaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FREE, REPORTED, REFUSED, FIXED = "free", "reported", "refused", "fixed"
ALL = "all"
PART = "part:"
"""Prefix in ``resume_changes`` of a part of the checkpoint, such as ``part:scheduler``."""


class Rule(NamedTuple):
    """Reaction of a resume to a difference, and the reason."""

    kind: str
    reason: str


class Change(NamedTuple):
    """One argument that differs: the checkpoint's value and the current value."""

    old: Any
    new: Any
    rule: Rule

    def shown(self, name: str) -> str:
        """Return one line with both values and the consequence."""
        return f"{name} {self.old!r} -> {self.new!r}: {self.rule.reason}"


def _each(kind: str, reason: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule(kind, reason))


# Argument -> treatment of another value. Every argument has an entry.
RULES: dict[str, Rule] = {
    **_each(
        *(FREE, "it sets where things are written"),
        *("output_dir", "repo", "near_repo", "logging_dir"),
    ),
    **_each(
        *(FREE, "it is only for scripts"),
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "resume_changes"),
    ),
    **_each(
        *(FREE, "it sets when and how checkpoints are made, not their content"),
        *(
            "save_strategy",
            "save_steps",
            "save_every",
            "save_total_limit",
            "save_retention",
            "save_parity",
        ),
        *("save_on_each_node", "save_unchanged", "save_overlap", "save_within_seconds"),
        *("rollback_on", "rollback_limit", "loss_spike_deviations"),
        *("on_save_failure", "repair_on_restore", "durable_every", "near_total_limit"),
        "durable_every_seconds",
        *("enable_jit_checkpoint", "grace_seconds", "storage_options", "save_only_model"),
        *("restore_callback_states_from_checkpoint", "strict_resume"),
    ),
    **_each(
        *(FREE, "it sets what is shown, and to whom"),
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
        *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "report_to"),
        *("run_name", "project", "trackio_space_id", "trackio_bucket_id"),
        *("trackio_static_space_id", "debug", "skip_memory_metrics"),
        "include_num_input_tokens_seen",
    ),
    **_each(
        *(FREE, "it concerns only the Hub"),
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
        *("hub_always_push", "hub_revision"),
    ),
    **_each(
        *(FREE, "it sets how samples are fetched, not which samples"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        *("dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        "dataloader_in_order",
    ),
    **_each(
        *(FREE, "it sets how a model is evaluated, not how it is trained"),
        *("per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches"),
        *("eval_use_gather_object", "prediction_loss_only", "include_for_metrics"),
        *("batch_eval_metrics", "fp16_full_eval", "bf16_full_eval"),
    ),
    **_each(
        *(FREE, "it concerns only memory and deadlines"),
        *("torch_empty_cache_steps", "ddp_timeout"),
    ),
    **_each(
        *(FREE, "it sets the reaction to hosts that compute other bits"),
        "on_arithmetic_mismatch",
    ),
    **_each(
        *(REPORTED, "evaluations fall on other steps from here on"),
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
    ),
    **_each(
        *(REPORTED, "another model may become the best from here on"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    **_each(
        *(
            REPORTED,
            "the run ends at another step; a schedule over its length covers the new length",
        ),
        *("num_train_epochs", "max_steps"),
    ),
    **_each(
        *(REPORTED, "samples are counted, none is lost or repeated; the bits differ from here on"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_drop_last"),
        *("auto_find_batch_size", "global_train_batch_size"),
    ),
    **_each(
        *(REPORTED, "the checkpoint's value is used: it is part of the optimizer's state"),
        *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    ),
    **_each(
        *(REPORTED, "the checkpoint's values are used: they are part of its state"),
        "random_numbers",
    ),
    **_each(
        *(REPORTED, "the rate follows the new schedule from here on"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    ),
    **_each(
        *(REPORTED, "the loss and its gradients differ from here on"),
        *("max_grad_norm", "average_tokens_across_devices", "label_smoothing_factor"),
        *("neftune_noise_alpha", "remove_unused_columns", "label_names"),
    ),
    **_each(
        *(
            REPORTED,
            "values are computed in another way; the scale of the loss starts or ends here",
        ),
        "fp16",
    ),
    **_each(
        *(REPORTED, "values are computed in another way; the bits differ from here on"),
        *(
            "bf16",
            "fp8",
            "fp8_recipe",
            "tf32",
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
        ),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel"),
        *("liger_kernel_config", "use_cache", "use_cpu", "full_determinism"),
    ),
    **_each(
        *(REPORTED, "the state is sharded again; sums are made in another order from here on"),
        *("reduction", "shard_optimizer_state", "threads_per_rank"),
        *("parallelism", "ddp_backend", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
        *("ddp_broadcast_buffers", "ddp_static_graph", "ddp_comm_hook", "ddp_comm_wrapper"),
        *("ddp_comm_state_option", "fsdp", "fsdp_config", "deepspeed"),
        *("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"),
        *("fsdp_reshard_after_forward", "accelerator_config", "parallelism_config"),
    ),
    **_each(
        *(REFUSED, "the run continues with the checkpoint's random numbers and order of samples"),
        *("seed", "data_seed"),
    ),
    **_each(
        *(REFUSED, "samples of this epoch would be skipped and others repeated"),
        *("train_sampling_strategy", "length_column_name", "ignore_data_skip"),
    ),
    **_each(
        *(FIXED, "the saved optimizer state belongs to another optimizer"),
        *("optim", "optim_args", "optim_target_modules"),
    ),
}
# Optimizers with equal states: either continues from the other's.
_SAME_STATE = ({"adamw_torch", "adamw_torch_fused"},)
_SAME = Rule(REPORTED, "both have the same state, and the checkpoint's state is loaded")
# In the loop a dataset draws from the run's stream, in a worker from one stream per sample.
_WORKERS = "dataloader_num_workers"
_OTHER_DRAWS = Rule(REPORTED, "a dataset that draws random numbers draws others from here on")
_YOURS = Rule(REPORTED, "it is an argument of your own")


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Arguments of a Transformers run that an import compares, with another reason if the general one
# does not apply there. Values that Transformers and this package complete differently are left out.
_OF_IMPORT: dict[str, str] = {
    **dict.fromkeys(
        ("max_steps", "num_train_epochs"),
        "the run ends at another step; a schedule over its length is the new one at once, but "
        "Transformers makes the first step at the saved rate",
    ),
    **dict.fromkeys(
        _BATCH,
        "training continues at the same sample, but Transformers counts batches and continues at "
        "another sample",
    ),
    **dict.fromkeys(
        ("seed", "data_seed"),
        "the order of the samples is that of the new seed, and the random states are the "
        "checkpoint's",
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name", "ignore_data_skip"),
        "samples of this epoch are skipped and others repeated",
    ),
    **dict.fromkeys(
        (
            *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
            *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
            *("dataloader_drop_last", "max_grad_norm", "label_smoothing_factor"),
            *("neftune_noise_alpha", "average_tokens_across_devices", "bf16", "fp16", "tf32"),
            *("torch_compile", "use_liger_kernel", "full_determinism", "eval_strategy"),
            *("eval_delay", "load_best_model_at_end"),
        ),
        "",
    ),
}
_SAME_BATCH = "each step has the same samples; its sums are made in another order"


def changes_at_import(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """Return the arguments of a Transformers run that differ here and can change the result.

    Args:
        old: Arguments of the run, as far as they are plain values.
        new: Arguments of this run.
    """
    old = dict(old)
    if not old.get("warmup_steps") and old.get("warmup_ratio"):
        old["warmup_steps"] = old["warmup_ratio"]  # Transformers before version 5
    names = set(_OF_IMPORT)
    if all(_is_positive(arguments.get("max_steps")) for arguments in (old, new)):
        names.discard("num_train_epochs")
    if new.get("global_train_batch_size"):
        names.discard("gradient_accumulation_steps")  # the number of ranks determines it
    reasons = dict(_OF_IMPORT)
    if _global_batch(old) == _global_batch(new):
        reasons |= dict.fromkeys(_BATCH, _SAME_BATCH)
    return {
        name: change._replace(rule=Rule(REPORTED, reasons[name] or change.rule.reason))
        for name, change in changes_between(old, new).items()
        # None, an empty dict and False all mean that an option is not set.
        if name in names and (change.old or change.new)
    }


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _global_batch(arguments: Mapping[str, Any]) -> Any:
    """Return the samples of a step and rank; None if they are unknown."""
    sizes: list[Any] = [arguments.get(name) for name in _BATCH]
    return math.prod(sizes) if all(map(_is_positive, sizes)) else None


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """Return the arguments that both configurations have and that differ, with their rules."""
    return {
        name: Change(old[name], value, _rule(name, old[name], value))
        for name, value in new.items()
        if name in old and old[name] != value
    }


def _rule(name: str, old: Any, new: Any) -> Rule:
    if name == "optim" and any({old, new} <= equivalents for equivalents in _SAME_STATE):
        return _SAME
    if name == _WORKERS and bool(old) != bool(new):
        return _OTHER_DRAWS
    return RULES.get(name, _YOURS)


def require_resumable(changes: Mapping[str, Change], allowed: Iterable[str] | str | None) -> None:
    """Refuse differences that a resume does not accept, unless they are allowed by name.

    Args:
        changes: Differences by argument.
        allowed: ``resume_changes``: names, or ``all``.

    Raises:
        ConfigError: Names each difference, the reason, and the way to allow it.
    """
    names = {allowed} if isinstance(allowed, str) else set(allowed or ())
    fixed = [name for name, change in changes.items() if change.rule.kind == FIXED]
    refused_names = [
        name
        for name, change in changes.items()
        if change.rule.kind == REFUSED and name not in names and ALL not in names
    ]
    if not fixed and not refused_names:
        return
    lines = "; ".join(changes[name].shown(name) for name in [*fixed, *refused_names])
    hint = f"use the checkpoint's value, or TrainingArguments(resume_changes={refused_names})"
    if fixed:
        hint = "use the checkpoint's value, or train its model in another repository"
    raise ConfigError(f"cannot resume with other arguments: {lines}", hint=hint)
