"""``trainer.accelerator`` for Transformers scripts, and refusal of overrides without effect.

A script may override a method of the Trainer that this package never calls. Such an override would
be silently ignored, so this module refuses it. Each method of the Trainer in the pinned
Transformers version is in one of three lists of this module. The lists name methods that training
calls, methods that only scripts call, and methods that no code calls. A test compares the lists
with Transformers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from resilient.errors import ConfigError
from resilient.train.arguments.derived import is_canonical
from resilient.train.evaluation.gather import gather_rows, nested

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from resilient.train.trainer_hooks import TrainerHooks

_INSTEAD = {
    "clip_grad_norm_": "the trainer clips before each step: set `max_grad_norm`",
    "clip_grad_value_": "clip in a callback's `on_pre_optimizer_step`",
    "prepare": "the trainer prepares model, optimizer and data: override `create_optimizer`, "
    "`get_train_dataloader` or `_wrap_model`",
    "prepare_model": "a second model is moved with `.to(trainer.args.device)`",
    "accumulate": "`gradient_accumulation_steps` says how many micro-batches a step has",
    "no_sync": "`gradient_accumulation_steps` says how many micro-batches a step has",
    "save_state": "the trainer saves: `save_steps`, or `control.should_save` in a callback",
    "load_state": "`train()` resumes from the newest checkpoint by itself",
    "register_for_checkpointing": "write `trainer.register(name, thing)`",
    "state": "arguments set how ranks train together: read `trainer.args`",
    "scaler": "read `trainer.precision.scaler`",
    "log": "write `trainer.log(...)`",
}
_SYNC = "micro-batches are added in one fixed order, all at the end of the step (`reduction`)"


class Accelerator:
    """Facade with the accelerator methods of Hugging Face that scripts use.

    Args:
        trainer: Trainer that owns the step.
    """

    def __init__(self, trainer: TrainerHooks) -> None:
        self._trainer = trainer

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Back-propagate the loss of a micro-batch, as ``training_step`` does.

        Args:
            loss: Loss, already divided by the number of micro-batches of its step if needed.
            **options: Only a false ``scale_wrt_gas`` is accepted: the default behavior.

        Raises:
            ConfigError: Another option is given.
        """
        unsupported = sorted(set(options) - {"scale_wrt_gas"})
        if unsupported or options.get("scale_wrt_gas"):
            name = unsupported[0] if unsupported else "scale_wrt_gas"
            raise ConfigError(
                f"`accelerator.backward` does not accept `{name}`",
                hint="call `loss.backward(...)` for tensors that only this rank needs, or omit it",
            )
        self._trainer.make_backward(loss)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in the run's precision."""
        return self._trainer.precision.autocast()

    def unwrap_model(self, model: nn.Module, **_options: bool) -> nn.Module:
        """Return the model without the wrappers of a strategy or a compiler."""
        strategy = getattr(self._trainer, "strategy", None)
        unwrapped: nn.Module = model if strategy is None else strategy.unwrap(model)
        compiled: Any = getattr(unwrapped, "_orig_mod", None)
        return unwrapped if compiled is None else compiled

    def wait_for_everyone(self) -> None:
        """Wait until all ranks arrive. Collective."""
        if self.num_processes > 1:
            dist.barrier()

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks, in rank order. Collective.

        Ranks may have different numbers of rows. The scalar of a rank becomes one row. Mappings and
        lists keep their structure.

        Raises:
            ConfigError: Called in an evaluation, where ranks may have different numbers of batches.
        """
        if self.num_processes == 1:
            return tensor
        if not self._trainer.model.training:
            raise ConfigError(
                "`accelerator.gather` waits for all ranks, but in an evaluation some ranks may "
                "have one batch less",
                hint="return it from `prediction_step`: the trainer gathers it, each sample once",
            )
        ranks = self.num_processes
        return nested(
            lambda tensor_of_rank: gather_rows(
                tensor_of_rank if tensor_of_rank.dim() else tensor_of_rank[None], ranks
            ),
            tensor,
        )

    def gather_for_metrics(self, input_data: Any) -> Any:
        """Gather like :meth:`gather`. Only the last round of training repeats samples as padding.

        Raises:
            ConfigError: As in :meth:`gather`.
        """
        return self.gather(input_data)

    def print(self, *values: Any, **options: Any) -> None:
        """Write to standard output, on the first rank of each host."""
        if self.is_local_main_process:
            end = options.get("end", "\n")
            (options.get("file") or sys.stdout).write(
                options.get("sep", " ").join(map(str, values)) + end
            )

    @property
    def sync_gradients(self) -> bool:
        """True if this micro-batch is the last of its step.

        Raises:
            ConfigError: The reduction is canonical, so a step has no such micro-batch.
        """
        if is_canonical(self._trainer.args):
            raise ConfigError(f"`accelerator.sync_gradients` is unknown: {_SYNC}")
        return self._trainer.is_last_micro_batch

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._trainer.session.device

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._trainer.session.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process among all."""
        return self._trainer.session.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its host."""
        return self._trainer.session.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True if this is the first of all ranks."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this is the first rank of its host."""
        return self.local_process_index == 0

    @property
    def mixed_precision(self) -> str:
        """``fp16``, ``bf16`` or ``no``."""
        args = self._trainer.args
        return "fp16" if args.fp16 else "bf16" if args.bf16 else "no"

    @property
    def distributed_type(self) -> str:
        """Parallel mode of the run; equal to a ``DistributedType`` of accelerate."""
        kind = self._trainer.args.parallelism
        if kind in ("deepspeed", "fsdp"):
            return kind.upper()
        if self.num_processes == 1:
            return "NO"
        return "MULTI_CPU" if self.device.type == "cpu" else f"MULTI_{_maker(self.device)}"

    def __getattr__(self, name: str) -> NoReturn:
        advice = _INSTEAD.get(name, "arguments set what the trainer does by itself")
        raise AttributeError(f"`accelerator.{name}` does not exist: {advice}", name=name, obj=self)


def _maker(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else device.type.upper()


CALLED = (
    *("_prepare_input", "_prepare_inputs", "_wrap_model", "autocast_smart_context_manager"),
    *("compute_loss", "compute_loss_context_manager", "create_optimizer", "create_scheduler"),
    *("create_optimizer_and_scheduler", "evaluate", "floating_point_ops", "get_batch_samples"),
    *("get_decay_parameter_names", "get_eval_dataloader", "get_optimizer_cls_and_kwargs"),
    *("get_test_dataloader", "get_train_dataloader", "log", "prediction_step", "training_step"),
)
"""Methods that training, evaluation and prediction call."""

ASKED = (
    *("add_callback", "create_model_card", "end", "get_learning_rates", "get_optimizer_group"),
    *("get_num_trainable_parameters", "hyperparameter_search", "init_hf_repo", "log_metrics"),
    *("pop_callback", "predict", "push_to_hub", "remove_callback", "save_metrics", "save_state"),
    "train",
)
"""Methods that only scripts call, so their overrides take effect."""

_EVALUATING = "override `prediction_step`, `evaluate` or `get_eval_dataloader`"
_SAVING = "`trainer.register(name, thing)` adds state to a checkpoint"
_STEPPING = "override `training_step` or `compute_loss`, or use callbacks"
_COLUMNS = "set `remove_unused_columns` to False, or choose columns in your `data_collator`"
_LOADING = "override `get_train_dataloader` or `get_eval_dataloader`"
_RESUMING = "a run resumes from its newest checkpoint by itself; add state with `trainer.register`"
_RANKS = "arguments set how ranks train together"
_CLIPPING = "set `max_grad_norm`; a callback's `on_pre_optimizer_step` may change gradients"
_HUB = "a callback's `on_save` decides what is pushed"
_SEARCHING = "pass your own `backend` to `hyperparameter_search`"
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
    "save_model": "a checkpoint holds the whole model without it: write more files in a callback's "
    "`on_save`, and rename the method that your script calls at its end",
    "_rotate_checkpoints": "`save_total_limit` and `save_retention` set which checkpoints stay",
    "_get_output_dir": "set `output_dir`, or `repo`",
    "_issue_warnings_after_load": _RESUMING,
    "_load_callback_state": "a callback that has `state_dict` and `load_state_dict` is saved",
    "_init_training_state": _RESUMING,
    "_load_best_model": "`load_best_model_at_end` does it; `trainer.load_model(...)` loads another",
    "_determine_best_metric": "set `metric_for_best_model` and `greater_is_better`",
    "_inner_training_loop": _STEPPING,
    "_run_epoch": _STEPPING,
    "_prepare_for_training": _STEPPING,
    "_finalize_training": _STEPPING,
    "set_initial_training_values": "set `num_train_epochs` or `max_steps`",
    "_maybe_log_save_evaluate": "callbacks decide when to log, evaluate and save",
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
    "_get_eval_sampler": "an evaluation takes each sample once, in order; for another order "
    "override `get_eval_dataloader`",
    "_get_dataloader": _LOADING,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_remove_unused_columns": _COLUMNS,
    "_set_signature_columns_if_needed": _COLUMNS,
    "num_examples": "the dataset's `__len__` gives the number of samples",
    "num_tokens": "set `include_num_input_tokens_seen`",
    "call_model_init": "pass `model_init`",
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
"""Refused methods with their alternative; some exist only in older versions of Transformers."""


def refuse_uncalled_overrides(kind: type) -> None:
    """Raise if a trainer subclass overrides a method that no code here calls.

    Raises:
        ConfigError: Names the method and the alternative.
    """
    own_attributes = [
        vars(cls) for cls in kind.__mro__ if not cls.__module__.startswith("resilient.")
    ]
    override = next(
        (name for name in NOT_CALLED if any(name in attributes for attributes in own_attributes)),
        None,
    )
    if override is not None:
        raise ConfigError(
            f"`{kind.__name__}.{override}` would never be called: Transformers' Trainer calls a "
            "method of that name, and this Trainer does not",
            hint=NOT_CALLED[override],
        )
