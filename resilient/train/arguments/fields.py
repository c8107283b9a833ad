"""Fields of the training arguments in groups, with defaults and help texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from resilient.train.arguments.value_types import NONE, SecretHelp, TextOf

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")

# HfArgumentParser converts a command line's text by calling a field's type. It cannot call these
# types, or they do not read JSON.
if TYPE_CHECKING:
    Section = dict[str, Any] | None
    Switches = dict[str, bool] | None
    Mesh = Any
    Fsdp = bool | str | list[str] | None
    SpaceId = str | bool | None
else:
    Section = Switches = TextOf("JSON", dict, NONE)
    Mesh = TextOf("JSON")
    Fsdp = TextOf("text", bool, str, list, NONE)
    SpaceId = TextOf("text", str, bool, NONE)


def option(default: Value, help: str, *, is_secret: bool = False) -> Value:  # noqa: A002 - users of dataclasses know this key
    """Return a dataclass field with its help text as metadata.

    Args:
        default: Default value.
        help: One-line description of the effect.
        is_secret: The value is never shown and never saved.
    """
    metadata = {"help": SecretHelp(help) if is_secret else help}
    new_field: Value = field(default=default, repr=not is_secret, metadata=metadata)
    return new_field


def made_by(factory: Callable[[], Any], help: str) -> Any:  # noqa: A002 - as above
    """Return a field whose default is created for each object, as lists require."""
    return field(default_factory=factory, metadata={"help": help})


@dataclass
class SavingArguments:
    """Checkpoint arguments with Transformers' names."""

    save_strategy: str = option("steps", "when to save: no, steps, epoch, best")
    save_steps: float = option(500, "steps between checkpoints; below 1 a ratio of all steps")
    save_every: str = option(
        "",
        "500steps, 30s, 5m or auto (from the cost of saves and the failure rate); empty: "
        "save_strategy and save_steps; add memory=1step to cache each step in memory between saves",
    )
    save_total_limit: int | None = option(
        None,
        "checkpoints to keep, the best included; None: all; 1 keeps 2 if the best is an older one",
    )
    save_only_model: bool = option(
        default=False, help="save only the model; such a checkpoint cannot be resumed"
    )
    save_on_each_node: bool = option(default=False, help="save on every node")
    enable_jit_checkpoint: bool = option(default=False, help="save on SIGTERM; always on")
    ignore_data_skip: bool = option(
        default=False, help="on resume start the epoch's data again instead of continuing in it"
    )
    restore_callback_states_from_checkpoint: bool = option(
        default=True, help="on resume restore the state of callbacks; always on"
    )
    strict_resume: bool = option(
        default=False, help="refuse to resume a checkpoint that lost a part of its state"
    )
    resume_changes: list[str] | str | None = option(
        None,
        "arguments, and parts as part:NAME, that may differ from the checkpoint's although a "
        "resume rejects the difference; or all",
    )


@dataclass
class RepositoryArguments:
    """Checkpoint repository, durability, and the reaction to failed saves, NaN and loss spikes."""

    repo: str = option("", "URL of the checkpoint repository; empty: output_dir")
    near_repo: str = option(
        "", "URL of a near repository, usually on each host's own disk, that takes every save"
    )
    durable_every: int | None = option(
        None,
        "with near_repo: every n-th save is promoted to repo; None: all saves, or as "
        "durable_every_seconds says",
    )
    durable_every_seconds: float | None = option(
        None,
        "with near_repo: a save is promoted to repo if the last promotion is this many seconds ago",
    )
    near_total_limit: int = option(2, "with near_repo: checkpoints to keep there")
    storage_options: Section = option(
        None,
        "endpoint, credentials and other options of repo; never shown, never saved",
        is_secret=True,
    )
    save_retention: Section = option(None, "keep_best, keep_every, keep_hourly, ... (Retention)")
    save_parity: int = option(
        0,
        "files of each rank that can be lost and reconstructed; each costs the size of the "
        "longest file",
    )
    repair_on_restore: bool = option(
        default=True,
        help="reconstruct damaged files from parity instead of resuming an older checkpoint",
    )
    save_unchanged: str = option("refer", "bytes that are already stored: refer, write (again)")
    on_save_failure: str = option("stop", "reaction of training to a failed save: stop, continue")
    save_overlap: bool = option(
        default=True, help="copy the state that only the optimizer changes during the next step"
    )
    rollback_on: str = option(
        "off",
        "go back to the last checkpoint and skip the data since then: off, nan, spike (or nan)",
    )
    rollback_limit: int = option(3, "maximum number of rollbacks after NaN or a loss spike")
    loss_spike_deviations: float = option(
        8.0, "a loss this many deviations above the median of recent losses is a spike"
    )
    save_within_seconds: float = option(600.0, "seconds after which a save has failed")
    grace_seconds: float = option(
        20.0,
        "seconds from a request to stop until the exit; `resilient train` uses its --grace instead",
    )


@dataclass
class HubArguments:
    """Arguments for the Hugging Face Hub."""

    push_to_hub: bool = option(default=False, help="push the model to the Hub when it is saved")
    hub_model_id: str | None = option(None, "name of the repository on the Hub")
    hub_strategy: str = option(
        "every_save", "what to push: end, every_save, checkpoint, all_checkpoints"
    )
    hub_token: str | None = option(
        None, "token for the Hub; None: the token of the login; never saved", is_secret=True
    )
    hub_private_repo: bool | None = option(None, "make the repository private")
    hub_always_push: bool = option(default=False, help="push even while a push is running")
    hub_revision: str | None = option(None, "branch, tag or commit to push to")


@dataclass
class DistributedArguments:
    """Arguments for DDP, FSDP, DeepSpeed and meshes."""

    parallelism: str = option(
        "ddp",
        "how several ranks hold the model: ddp (replicas), fsdp (shards), deepspeed (ZeRO); auto: "
        "by size",
    )
    reduction: str = option(
        "native",
        "order in which gradients are added: native (the backend's, the fastest), canonical (one "
        "fixed order: the same bits at any world size)",
    )
    global_train_batch_size: int | None = option(
        None, "samples per step over all ranks; reduction canonical needs it"
    )
    shard_optimizer_state: bool = option(
        default=False, help="each rank holds a share of the optimizer's state (reduction canonical)"
    )
    threads_per_rank: int | None = option(
        None, "threads of torch on each rank; None: unchanged, and 1 with reduction canonical"
    )
    on_arithmetic_mismatch: str = option(
        "stop",
        "reaction to hosts that compute other bits, with reduction canonical: stop, continue",
    )
    ddp_backend: str | None = option(None, "gloo or nccl; None: as the device needs")
    ddp_timeout: float = option(1800, "seconds that a collective may take")
    ddp_find_unused_parameters: bool | None = option(None, "see torch's DDP; None: False")
    ddp_bucket_cap_mb: float | None = option(None, "size of DDP's buckets in MB; None: torch's")
    ddp_broadcast_buffers: bool | None = option(
        None, "see torch's DDP; None: True if gradients are aligned"
    )
    ddp_static_graph: bool | None = option(None, "see torch's DDP; None: False")
    ddp_comm_hook: str = option(
        "no", "how DDP sends gradients: no (unchanged), fp16, bf16, power_sgd"
    )
    ddp_comm_wrapper: str = option("no", "dtype in which PowerSGD sends: no, fp16, bf16")
    ddp_comm_state_option: dict[str, Any] | str | None = option(
        None, "options of PowerSGD: matrix_approximation_rank, start_powerSGD_iter, ..."
    )

    fsdp: Fsdp = option(
        None, "True, or full_shard, shard_grad_op, hybrid_shard with auto_wrap, offload"
    )
    fsdp_config: dict[str, Any] | str | None = option(
        None, "more options of FSDP: a dict or a JSON file"
    )
    fsdp_transformer_layer_cls_to_wrap: str = option(
        "", "classes of modules that are gathered separately: A,B"
    )
    fsdp_min_num_params: int = option(
        0, "least parameters of a module that is gathered separately; 0: off"
    )
    fsdp_reshard_after_forward: bool = option(
        default=True, help="free gathered parameters between forward and backward"
    )
    deepspeed: dict[str, Any] | str | None = option(
        None, "DeepSpeed's config, a dict or a JSON file; None with parallelism deepspeed: ZeRO 2"
    )
    accelerator_config: dict[str, Any] | str | None = option(
        None, "more options of accelerate: a dict or a JSON file"
    )
    parallelism_config: Mesh = option(
        None, "the mesh: dp_replicate_size, dp_shard_size, tp_size, tp_plan, pp_size, pp_schedule"
    )


@dataclass
class BasicArguments:
    """Output folder, run length, batch sizes and seeds."""

    output_dir: str = option("trainer_output", "folder for checkpoints, logs and models")
    do_train: bool = option(default=False, help="for scripts: whether to train")
    do_eval: bool = option(
        default=False, help="for scripts: whether to evaluate; set by `eval_strategy`"
    )
    do_predict: bool = option(default=False, help="for scripts: whether to predict")
    resume_from_checkpoint: str | None = option(None, "for scripts: what to give to `train`")

    num_train_epochs: float = option(3.0, "passes over the training data")
    max_steps: int = option(
        -1, "maximum number of optimizer steps; above 0 it overrides num_train_epochs"
    )
    per_device_train_batch_size: int = option(8, "samples per rank and micro-batch")
    per_device_eval_batch_size: int = option(8, "samples per rank and batch of evaluation")
    auto_find_batch_size: bool = option(
        default=False, help="after an out-of-memory error, continue with a smaller batch"
    )

    seed: int = option(42, "seed of Python's, NumPy's and torch's random numbers")
    data_seed: int | None = option(None, "seed of the order of samples; None: seed")
    random_numbers: str = option(
        "own", "own, or transformers: drawn as its Trainer draws them, for the same losses"
    )
    full_determinism: bool = option(
        default=False, help="deterministic algorithms only, and the environment that they need"
    )
    use_cpu: bool = option(default=False, help="train on the CPU even if a GPU exists")

    debug: str | list[str] = option("", "underflow_overflow, tpu_metrics_debug")
    skip_memory_metrics: bool = option(default=True, help="do not measure memory")
    torch_empty_cache_steps: int | None = option(
        None, "steps between emptying the device's cache of free memory; None: never"
    )

    @property
    def order_seed(self) -> int:
        """Seed of the sample order."""
        return self.seed if self.data_seed is None else self.data_seed


@dataclass
class ComputingArguments:
    """Precision, activation checkpointing and compilation."""

    fp16: bool = option(default=False, help="autocast to float16, with loss scaling")
    bf16: bool = option(default=False, help="autocast to bfloat16")
    fp8: bool = option(default=False, help="linear layers multiply in float8 (torchao)")
    fp8_recipe: str = option(
        "tensorwise", "how fp8 is scaled: tensorwise, rowwise, rowwise_with_gw_hp"
    )
    fp16_full_eval: bool = option(default=False, help="evaluate with weights in float16")
    bf16_full_eval: bool = option(default=False, help="evaluate with weights in bfloat16")
    tf32: bool | None = option(None, "allow TF32 in matrix products; None: torch's default")

    activation_checkpointing: bool | None = option(
        None, "compute activations again in the backward pass instead of storing them"
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "use_reentrant, preserve_rng_state, every_n_layers, offload"
    )

    torch_compile: bool = option(default=False, help="compile the model with torch.compile")
    torch_compile_backend: str | None = option(None, "compiler backend; enables torch_compile")
    torch_compile_mode: str | None = option(None, "compiler mode; enables torch_compile")
    use_liger_kernel: bool = option(default=False, help="fused kernels of liger-kernel")
    liger_kernel_config: Switches = option(
        None, "kernels of liger-kernel to use, each with true or false"
    )
    use_cache: bool = option(default=False, help="keep the cache of keys and values in training")

    @property
    def mixed_precision(self) -> str:
        """``fp16``, ``bf16`` or ``no``."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "no"

    @property
    def gradient_checkpointing(self) -> bool:
        """Deprecated name of ``activation_checkpointing``."""
        return bool(self.activation_checkpointing)

    @property
    def gradient_checkpointing_kwargs(self) -> Any:
        """Deprecated name of ``activation_checkpointing_kwargs``."""
        return self.activation_checkpointing_kwargs


@dataclass
class OptimizationArguments:
    """Optimizer, schedule, accumulation and loss."""

    optim: str = option("adamw_torch_fused", "name of the optimizer")
    optim_args: dict[str, Any] | str | None = option(
        None, 'options of the optimizer: "k=v,k=v" or a dict'
    )
    optim_target_modules: list[str] | str | None = option(
        None, "names or patterns of the modules that GaLore and APOLLO project"
    )
    learning_rate: float = option(5e-5, "peak learning rate")
    weight_decay: float = option(0.0, "weight decay; never applied to biases and norms")
    adam_beta1: float = option(0.9, "decay of AdamW's first moment")
    adam_beta2: float = option(0.999, "decay of AdamW's second moment")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon")
    max_grad_norm: float = option(
        1.0, "maximum norm of gradients, to which they are clipped; 0 only measures the norm"
    )

    lr_scheduler_type: str = option("linear", "name of the learning-rate schedule")
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, "options of the schedule, as a dict or JSON: lr_end, power, num_cycles, ..."
    )
    warmup_steps: float = option(0, "steps of linear warm-up; below 1 a ratio of all steps")

    gradient_accumulation_steps: int = option(1, "micro-batches per optimizer step")
    average_tokens_across_devices: bool = option(
        default=True, help="the loss is the mean over the tokens of all ranks"
    )
    label_smoothing_factor: float = option(0.0, "share of the target spread over all classes")
    neftune_noise_alpha: float | None = option(
        None, "strength of the noise on embeddings in training (NEFTune); None: no noise"
    )


@dataclass
class LoggingArguments:
    """Logs, progress and trackers."""

    logging_strategy: str = option("steps", "when to log: no, steps, epoch")
    logging_steps: float = option(500, "steps between logs; below 1 a ratio of all steps")
    logging_first_step: bool = option(default=False, help="log step 1 too")
    logging_nan_inf_filter: bool = option(
        default=True, help="do not log losses that are not finite"
    )
    logging_dir: str | None = option(None, "folder of TensorBoard's files; None: output_dir/runs")
    log_level: str = option(
        "passive", "lowest level that the coordinator shows: debug, info, warning, ..."
    )
    log_level_replica: str = option("warning", "lowest level that the other ranks show")
    log_on_each_node: bool = option(
        default=True, help="show logs on every node, not only on the first"
    )
    include_num_input_tokens_seen: bool | str = option(
        "no", "count the tokens trained on: no, all, non_padding"
    )
    disable_tqdm: bool | None = option(None, "None: a progress bar if stderr is a terminal")

    report_to: list[str] | str | None = option("none", "trackers to report to: none, all or names")
    run_name: str | None = option(None, "name of the run in trackers")
    project: str = option("huggingface", "name of the project in Trackio")
    trackio_space_id: str | None = option(None, "Space that shows Trackio's logs")
    trackio_bucket_id: str | None = option(None, "bucket of the Trackio Space")
    trackio_static_space_id: SpaceId = option(None, "read-only Space for the bucket; False: none")


@dataclass
class EvaluationArguments:
    """Evaluation and the best model."""

    eval_strategy: str = option("no", "when to evaluate: no, steps, epoch")
    eval_steps: float | None = option(None, "steps between evaluations; None: logging_steps")
    eval_delay: float = option(
        0, "steps or epochs, as eval_strategy counts, before the first evaluation"
    )
    eval_on_start: bool = option(default=False, help="evaluate before the first step")
    eval_accumulation_steps: int | None = option(
        None, "batches of predictions to keep on the device; None: all"
    )
    eval_do_concat_batches: bool = option(
        default=True, help="join predictions over batches; else give lists of batches"
    )
    eval_use_gather_object: bool = option(
        default=False,
        help="gather predictions as objects, for nested predictions that are not tensors",
    )
    prediction_loss_only: bool = option(default=False, help="compute only the loss in evaluations")
    include_for_metrics: list[str] = made_by(
        list, "additional inputs of compute_metrics: inputs, loss"
    )
    batch_eval_metrics: bool = option(
        default=False, help="call compute_metrics with each batch and `compute_result`"
    )

    load_best_model_at_end: bool = option(
        default=False, help="load the best saved weights at the end"
    )
    metric_for_best_model: str | None = option(None, "metric that selects the best model")
    greater_is_better: bool | None = option(
        None, "True if a higher metric is better; None: False if the metric's name ends in loss"
    )


@dataclass
class DataArguments:
    """Data loaders, columns and sample order."""

    dataloader_num_workers: int = option(0, "processes that load data; 0 loads in the loop")
    dataloader_drop_last: bool = option(default=False, help="drop an incomplete last batch")
    dataloader_pin_memory: bool = option(default=True, help="pin batches (CUDA only)")
    dataloader_prefetch_factor: int | None = option(None, "batches loaded ahead per worker")
    dataloader_persistent_workers: bool = option(default=False, help="keep workers over epochs")
    dataloader_multiprocessing_context: str | None = option(
        None, "start method of workers: fork, spawn, forkserver; None: torch's default"
    )
    dataloader_in_order: bool = option(
        default=True, help="return batches in the order of the requests"
    )
    remove_unused_columns: bool = option(
        default=True, help="drop columns that the model's forward does not accept by name"
    )
    label_names: list[str] | None = option(None, "keys of a batch that are labels")
    train_sampling_strategy: str = option(
        "random", "order of samples: random, sequential, group_by_length, batch_rebalance"
    )
    length_column_name: str = option("length", "column with the lengths, for group_by_length")
