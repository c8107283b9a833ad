"""The names of arguments: what others call what we have, and what we can do without (pure)."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# What Transformers once had, and what it and we have in its place.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "warmup_ratio": "warmup_steps",
}
# Transformers' arguments that we lack, with the values that ask for nothing.
NO_OPS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("auto_find_batch_size", "average_tokens_across_devices", "batch_eval_metrics"),
            *("bf16_full_eval", "eval_on_start", "eval_use_gather_object", "fp16_full_eval"),
            *("full_determinism", "gradient_checkpointing", "group_by_length"),
            *("hub_always_push", "ignore_data_skip", "include_inputs_for_metrics"),
            *("jit_mode_eval", "logging_nan_inf_filter", "overwrite_output_dir"),
            *("prediction_loss_only", "push_to_hub", "save_on_each_node", "save_only_model"),
            *("torch_compile", "use_liger_kernel", "use_mps_device"),
        ),
        (False, None),
    ),
    **dict.fromkeys(("eval_delay", "label_smoothing_factor"), (0,)),
    **dict.fromkeys(("dataloader_in_order", "save_safetensors"), (True,)),
    **dict.fromkeys(
        (
            *("accelerator_config", "debug", "deepspeed", "eval_accumulation_steps", "fsdp"),
            *("fsdp_config", "gradient_checkpointing_kwargs", "hub_model_id", "hub_token"),
            *("label_names", "lr_scheduler_kwargs", "neftune_noise_alpha", "optim_args"),
            *("resume_from_checkpoint", "tf32", "torch_compile_backend", "torch_compile_mode"),
            "torch_empty_cache_steps",
        ),
        (None, "", [], {}),
    ),
    "report_to": ("none", ["none"], [], None),
    "train_sampling_strategy": ("random",),
}
# They change nothing in Transformers' loop, or only what a tracker shows.
IGNORED = {
    *("do_eval", "do_predict", "do_train", "log_level", "log_level_replica", "log_on_each_node"),
    *("logging_dir", "run_name", "skip_memory_metrics"),
}
_INSTEAD = {
    "report_to": "trackers are callbacks here: give them as `callbacks` of the Trainer",
    "gradient_checkpointing": "switch it on in the model",
    "torch_compile": "compile parts of the model before the Trainer gets it",
    "resume_from_checkpoint": "give it to `train`",
    "warmup_ratio": "below 1 it is a ratio of all steps",
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean `x`?`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def only_known(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options that are known, without those that ask for nothing.

    Raises:
        ConfigError: an option is known by another name, asks for what we cannot do, or is
            unknown.
    """
    for name in options.keys() - known - IGNORED:
        value = options[name]
        if not any(value == nothing for nothing in NO_OPS.get(name, ())):
            raise _unknown(name, value, known)
    return {name: value for name, value in options.items() if name in known}


def _unknown(name: str, value: Any, known: Collection[str]) -> ConfigError:
    more = f" ({_INSTEAD[name]})" if name in _INSTEAD else ""
    if name in RENAMED:
        now = RENAMED[name]
        return ConfigError(f"`{name}` is called `{now}` now: write `{now}={value!r}`{more}")
    if name in NO_OPS:
        nothing = NO_OPS[name][0]
        return ConfigError(
            f"`{name}`={value!r} is not supported: leave it out, or write {nothing!r}{more}"
        )
    return ConfigError(f"`{name}`={value!r} is no argument of training{did_you_mean(name, known)}")
