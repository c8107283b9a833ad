"""Names of Transformers' Trainer: ``trainer.accelerator``, the Hub, refused names and overrides.

A script may override a method of the Trainer that this package never calls. Such an override would
be silently ignored, so this module refuses it. Each method of the Trainer in the pinned
Transformers version is in one of three lists of this module. The lists name methods that training
calls, methods that only scripts call, and methods that no code calls. A test compares the lists
with Transformers. A public name without a counterpart raises an error that names the alternative.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from resilient.errors import ConfigError
from resilient.strategies.parallelism_options import model_parallel_size, tensor_size
from resilient.train.arguments.choices import refuse_names
from resilient.train.arguments.derived import is_canonical
from resilient.train.evaluation.gather import gather_rows, nested
from resilient.train.model.batch import returns_loss_alone
from resilient.train.model.card import listed
from resilient.train.search.study import call_model_init

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.callbacks.base import CallbackHandler
    from resilient.train.state import TrainerState
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
    *("create_optimizer_and_scheduler", "evaluate", "evaluation_loop", "floating_point_ops"),
    "get_batch_samples",
    *("get_decay_parameter_names", "get_eval_dataloader", "get_optimizer_cls_and_kwargs"),
    *("get_test_dataloader", "get_train_dataloader", "log", "prediction_step", "training_step"),
)
"""Methods that training, evaluation and prediction call."""

ASKED = (
    *("add_callback", "create_model_card", "end", "get_learning_rates", "get_optimizer_group"),
    *("get_num_trainable_parameters", "hyperparameter_search", "init_hf_repo", "log_metrics"),
    *("metrics_format", "pop_callback", "predict", "push_to_hub", "remove_callback"),
    *("save_metrics", "save_state", "train"),
)
"""Methods that only scripts call, so their overrides take effect."""

_EVALUATING = "override `prediction_step`, `evaluation_loop` or `get_eval_dataloader`"
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
    "prediction_loop": "override `evaluation_loop`, which `evaluate` and `predict` call",
    "_evaluate": _EVALUATING,
    "_nested_gather": _EVALUATING,
    "_pad_tensors_to_max_len": _GENERATING,
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


# Public attributes of Transformers' Trainer that have no counterpart.
NOT_PROVIDED = {
    "compute_objective": "pass `compute_objective` to `hyperparameter_search`",
    "create_accelerator_and_postprocess": _RANKS,
    "current_flos": "read `trainer.state.total_flos`",
    "gather_function": "return the outputs from `prediction_step`: the trainer gathers them",
    "hp_search_backend": "read `trainer.state.is_hyper_param_search`",
    "hp_space": "pass `hp_space` to `hyperparameter_search`",
    "model_preparation_time": "the trainer prepares a model once: read `train_runtime` or "
    "`eval_runtime` of the metrics",
    "neftune_hook_handle": "set `neftune_noise_alpha`: the noise is removed when training ends",
    "objective": "read `objective` of the result of `hyperparameter_search`",
    "set_initial_training_values": "read `max_steps` and `num_train_epochs` of `trainer.state` "
    "in `on_train_begin`",
    "store_flos": "read `trainer.state.total_flos`, which each log and save updates",
}


# Files of the output folder that are no part of the model: checkpoints and the repository.
_NOT_PUSHED = (
    *("_*", "checkpoint-*", "generations/*", "heartbeats/*", "tags/*", "ledger/*", "events/*"),
    *("log.jsonl", "store-abilities.json"),
)


def hub_api() -> Any:
    """Return the client of the Hugging Face Hub.

    Raises:
        ConfigError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(
            "the Hub needs the package huggingface_hub, which is not installed",
            hint="pip install huggingface_hub",
        ) from error
    return HfApi()


class TransformersNames:
    """Methods and attributes of Transformers' Trainer that only scripts use.

    Attributes:
        hub_model_id: Repository on the Hub; None until ``init_hf_repo``.
        push_in_progress: Push that runs in the background, or None.
        is_in_train: Whether ``train`` runs.
    """

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    model_init: Callable[..., nn.Module] | None = None
    callback_handler: CallbackHandler
    state: TrainerState

    hub_model_id: str | None = None
    push_in_progress: Any = None
    is_in_train: bool = False
    is_fsdp_xla_enabled: bool = False
    is_fsdp_xla_v1_enabled: bool = False
    is_fsdp_xla_v2_enabled: bool = False
    is_distributed_loading_by_transformers: bool = False

    @property
    def can_return_loss(self) -> bool:
        """True if the model computes a loss without labels."""
        return returns_loss_alone(self.model)

    @property
    def neftune_noise_alpha(self) -> float | None:
        """Strength of the noise on embeddings: the argument of that name."""
        return self.args.neftune_noise_alpha

    @property
    def place_model_on_device(self) -> bool:
        """True if the trainer moves the model to the device."""
        return self.args.place_model_on_device is not False

    @property
    def is_model_parallel(self) -> bool:
        """True if ``from_pretrained(device_map=...)`` placed the model on several devices."""
        places: Any = getattr(self.model, "hf_device_map", None) or {}
        return len({str(device) for device in places.values()} - {"cpu", "disk"}) > 1

    @property
    def deepspeed(self) -> nn.Module | None:
        """DeepSpeed's engine around the model; None without DeepSpeed or before training."""
        is_wrapped = self.model_wrapped is not self.model
        return self.model_wrapped if is_wrapped and self.args.parallelism == "deepspeed" else None

    def get_tp_size(self) -> int:
        """Return the number of ranks that share a layer."""
        return tensor_size(self.args.parallelism_config)

    def get_cp_size(self) -> int:
        """Return 1: sequences are not split over ranks."""
        return 1

    def get_sp_size(self) -> int:
        """Return 1: sequences are not split over ranks."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of an optimizer step over all ranks."""
        if args.global_train_batch_size:
            return args.global_train_batch_size
        ranks = args.world_size // model_parallel_size(args.parallelism_config)
        return args.train_batch_size * args.gradient_accumulation_steps * ranks

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model of ``model_init``, made with the trial if ``model_init`` takes one.

        Raises:
            ConfigError: ``model_init`` was not passed, or returned no model.
        """
        if self.model_init is None:
            raise ConfigError(
                "the trainer has no `model_init`", hint="pass the Trainer `model_init`"
            )
        model: nn.Module = call_model_init(self.model_init, trial)
        return model

    def end(self) -> None:
        """Close callbacks and trackers, and leave the process group. Collective.

        Call this method once, at the end of the script.
        """
        self.callback_handler.close()
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:  # noqa: FBT001 - the field's signature
        """Create the repository of the model on the Hub unless it exists, on rank 0.

        Args:
            token: Token with write permission; None: ``hub_token``, else the token of the login.
            private: Whether a new repository is private; None: ``hub_private_repo``.

        Raises:
            ConfigError: huggingface_hub is not installed.
        """
        if not self.state.is_world_process_zero:
            return
        args = self.args
        created = hub_api().create_repo(
            args.hub_model_id or Path(args.output_dir).absolute().name,
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            exist_ok=True,
        )
        self.hub_model_id, self.push_in_progress = created.repo_id, None

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,  # noqa: FBT001, FBT002 - the field's signature
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,  # noqa: FBT001 - the field's signature
        **kwargs: Any,
    ) -> Any:
        """Upload the model, the processing class and a model card to the Hub. Collective.

        ``save_model`` writes the model into ``output_dir``, and rank 0 uploads this folder without
        its checkpoints.

        Args:
            commit_message: Message of the commit.
            blocking: Whether to return after the upload; otherwise the result is a future.
            token: Token with write permission; None: ``hub_token``, else the token of the login.
            revision: Branch to push to; None: ``hub_revision``, else the default branch.
            private: Whether a new repository is private; None: ``hub_private_repo``.
            **kwargs: Arguments of ``create_model_card``.

        Returns:
            The commit, or its future; None on ranks other than 0.

        Raises:
            ConfigError: huggingface_hub is not installed.
        """
        trainer: Any = self
        args = self.args
        hub = hub_api() if self.state.is_world_process_zero else None
        self.callback_handler.fire("on_push_begin")
        token = args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        trainer.save_model(_internal_call=True)
        if hub is None:
            return None
        name = (args.hub_model_id or Path(args.output_dir).absolute().name).rpartition("/")[2]
        tags = [*listed(kwargs.pop("tags", None)), *listed(getattr(self.model, "model_tags", None))]
        card = {"model_name": name, "tags": list(dict.fromkeys(tags)) or None, **kwargs}
        trainer.create_model_card(**card)
        return hub.upload_folder(
            repo_id=self.hub_model_id,
            folder_path=args.output_dir,
            commit_message=commit_message,
            token=token,
            run_as_future=not blocking,
            ignore_patterns=list(_NOT_PUSHED),
            revision=args.hub_revision if revision is None else revision,
        )


refuse_names(TransformersNames, NOT_PROVIDED, "Trainer")
