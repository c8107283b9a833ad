"""Methods of Transformers' Trainer that scripts override: what is called here, and what is not.

An override that nothing calls would be ignored without a word, so it is refused. All methods of
the Trainer of the pinned version are in one of the three lists, and a test holds them against it.
"""

from __future__ import annotations

from resilient.errors import ConfigError

CALLED = (
    *("_prepare_input", "_prepare_inputs", "_wrap_model", "autocast_smart_context_manager"),
    *("compute_loss", "compute_loss_context_manager", "create_optimizer", "create_scheduler"),
    *("create_optimizer_and_scheduler", "evaluate", "floating_point_ops", "get_batch_samples"),
    *("get_decay_parameter_names", "get_eval_dataloader", "get_optimizer_cls_and_kwargs"),
    *("get_test_dataloader", "get_train_dataloader", "log", "prediction_step", "training_step"),
)
"""What training, evaluation and prediction call."""

ASKED = (
    *("add_callback", "create_model_card", "end", "get_learning_rates", "get_optimizer_group"),
    *("get_num_trainable_parameters", "hyperparameter_search", "init_hf_repo", "log_metrics"),
    *("pop_callback", "predict", "push_to_hub", "remove_callback", "save_metrics", "save_state"),
    "train",
)
"""What scripts alone call; an override is theirs to call."""

_EVALUATING = "override `prediction_step`, `evaluate` or `get_eval_dataloader`"
_SAVING = "what a checkpoint holds more is said by `trainer.register(name, thing)`"
_STEPPING = "override `training_step` or `compute_loss`, or use callbacks"
_COLUMNS = "set `remove_unused_columns` to False, or choose columns in your `data_collator`"
_LOADING = "override `get_train_dataloader` or `get_eval_dataloader`"
_RESUMING = "a run goes on from its newest checkpoint by itself; add to it with `trainer.register`"
_RANKS = "arguments say how ranks train together"
_CLIPPING = "set `max_grad_norm`; a callback's `on_pre_optimizer_step` may change gradients"
_HUB = "what is pushed is said by a callback's `on_save`"
_SEARCHING = "give `hyperparameter_search` a `backend` of your own"
_GENERATING = "override `prediction_step`"
NOT_CALLED = {
    "evaluation_loop": _EVALUATING,
    "prediction_loop": _EVALUATING,
    "_evaluate": _EVALUATING,
    "_nested_gather": _EVALUATING,
    "_pad_tensors_to_max_len": _GENERATING,
    "load_generation_config": "set `generation_config`",
    "_save": _SAVING,
    "_save_checkpoint": _SAVING,
    "_save_optimizer_and_scheduler": _SAVING,
    "_save_rng_state": _SAVING,
    "_save_scaler": _SAVING,
    "_load_optimizer_and_scheduler": _SAVING,
    "_load_from_checkpoint": _SAVING,
    "_load_rng_state": _SAVING,
    "_load_scaler": _SAVING,
    "save_model": "a checkpoint holds the whole model without it: write more beside one in a "
    "callback's `on_save`, and give what your script calls at its end another name",
    "_rotate_checkpoints": "what stays is said by `save_total_limit` and `save_retention`",
    "_get_output_dir": "set `output_dir`, or `repo`",
    "_issue_warnings_after_load": _RESUMING,
    "_load_callback_state": "a callback that has `state_dict` and `load_state_dict` is saved",
    "_init_training_state": _RESUMING,
    "_load_best_model": "`load_best_model_at_end` says so; `trainer.load_model(...)` loads another",
    "_determine_best_metric": "set `metric_for_best_model` and `greater_is_better`",
    "_inner_training_loop": _STEPPING,
    "_run_epoch": _STEPPING,
    "_prepare_for_training": _STEPPING,
    "_finalize_training": _STEPPING,
    "set_initial_training_values": "set `num_train_epochs` or `max_steps`",
    "_maybe_log_save_evaluate": "callbacks say when to log, evaluate and save",
    "_get_num_items_in_batch": "override `get_batch_samples`",
    "_track_num_input_tokens": "set `include_num_input_tokens_seen`",
    "store_flos": "override `floating_point_ops`",
    "_get_learning_rate": "override `create_scheduler`",
    "_clip_grad_norm": _CLIPPING,
    "_get_grad_norm": _CLIPPING,
    "_has_mixed_mesh_grads": _CLIPPING,
    "_mixed_mesh_grad_norm": _CLIPPING,
    "_get_train_sampler": "override `train_sampling`, which returns an order (`sequential` and "
    "others are names of `train_sampling_strategy`), or `get_train_dataloader`",
    "_get_eval_sampler": "an evaluation takes each sample once, in order; override "
    "`get_eval_dataloader` for others",
    "_get_dataloader": _LOADING,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_remove_unused_columns": _COLUMNS,
    "_set_signature_columns_if_needed": _COLUMNS,
    "num_examples": "how many samples there are is said by the dataset's `__len__`",
    "num_tokens": "set `include_num_input_tokens_seen`",
    "call_model_init": "give `model_init`",
    "_move_model_to_device": "move it in an override of `_wrap_model`",
    "_validate_args": "override `__init__`",
    "_update_auto_batch_size": "set `auto_find_batch_size`",
    "get_total_train_batch_size": "set `per_device_train_batch_size` and "
    "`gradient_accumulation_steps`",
    "create_accelerator_and_postprocess": _RANKS,
    "propagate_args_to_deepspeed": _RANKS,
    "_build_accelerator_args": _RANKS,
    "_defer_fsdp_gradient_reduction": _RANKS,
    "_prepare_context_parallel_inputs": _RANKS,
    "_sync_replicated_trainable_parameters": _RANKS,
    "get_cp_size": _RANKS,
    "get_sp_size": _RANKS,
    "get_tp_size": _RANKS,
    "is_world_process_zero": _RANKS,
    "is_local_process_zero": _RANKS,
    "_hp_search_setup": _SEARCHING,
    "_report_to_hp_search": _SEARCHING,
    "_tune_save_checkpoint": _SEARCHING,
    "_finish_current_push": _HUB,
    "_push_from_checkpoint": _HUB,
    "metrics_format": "override `log_metrics`",
}
"""Each with what does the same here; some are of older versions."""


def require_called(kind: type) -> None:
    """Raise if a subclass of our trainer overrides what nothing calls, instead of ignoring it.

    Raises:
        ConfigError: names the method, and what to do instead.
    """
    own = [vars(one) for one in kind.__mro__ if not one.__module__.startswith("resilient.")]
    found = next((name for name in NOT_CALLED if any(name in one for one in own)), None)
    if found is not None:
        raise ConfigError(
            f"`{kind.__name__}.{found}` would never be called: Transformers' Trainer calls a "
            "method of that name, and this one does not",
            hint=NOT_CALLED[found],
        )
