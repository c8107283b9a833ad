"""TrainingArguments: everything a run can be told, with the names and defaults of the field."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from resilient.errors import ConfigError
from resilient.format.parity import check_parity
from resilient.train.names import did_you_mean, only_known
from resilient.vault.desk import UNCHANGED
from resilient.vault.retention import parse_retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.vault.retention import Retention

Value = TypeVar("Value")

INTERVALS = ("no", "steps", "epoch")
SAVE_STRATEGIES = ("no", "steps", "epoch", "best")
SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
SAVE_FAILURES = ("stop", "continue")
BACKENDS = ("gloo", "nccl")
PARALLELISMS = ("ddp", "fsdp")

_CHOICES = {
    "logging_strategy": INTERVALS,
    "eval_strategy": INTERVALS,
    "save_strategy": SAVE_STRATEGIES,
    "lr_scheduler_type": SCHEDULERS,
    "optim": OPTIMIZERS,
    "on_save_failure": SAVE_FAILURES,
    "save_unchanged": UNCHANGED,
    "parallelism": PARALLELISMS,
}
_AT_LEAST_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "durable_every",
    "near_total_limit",
)
_NOT_NEGATIVE = (
    "learning_rate",
    "weight_decay",
    "adam_epsilon",
    "max_grad_norm",
    "warmup_steps",
    "dataloader_num_workers",
    "grace_seconds",
    "fsdp_min_num_params",
)
_POSITIVE = ("save_within_seconds", "ddp_timeout")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "True or False"),
    "float": ((int, float), "a number"),
    "int": (int, "a whole number"),
    "str": (str, "text"),
}


class _Named(type):
    """Looks at the names of arguments before a dataclass fails on them, in subclasses too."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return super().__call__(
            *args, **only_known(options, {one.name for one in fields(cast("Any", cls))})
        )


def _option(default: Value, help: str) -> Value:  # noqa: A002 - the key users of dataclasses know
    """Return a dataclass field with its help text as metadata."""
    option: Value = field(default=default, metadata={"help": help})
    return option


@dataclass
class TrainingArguments(metaclass=_Named):
    """What a run is told.

    Every field carries its help as metadata (``dataclasses.fields(...)[i].metadata["help"]``).
    A number of steps below 1 is a ratio of all steps of the run.

    ``load_best_model_at_end`` ends with the best model that a checkpoint holds, as in
    Transformers: with ``save_steps`` a multiple of ``eval_steps``, the best that was evaluated
    may be none of them, which is told. ``save_strategy="best"`` saves each.

    Transformers' arguments that are not here are accepted with the value that asks for nothing
    (``report_to="none"``).

    Raises:
        ConfigError: a name is unknown, a value is not accepted, or two contradict each other.
    """

    output_dir: str = _option("trainer_output", "folder for checkpoints, logs and models")
    num_train_epochs: float = _option(3.0, "passes over the training data")
    max_steps: int = _option(-1, "optimizer steps in all; above 0 it overrides num_train_epochs")
    per_device_train_batch_size: int = _option(8, "samples per rank and micro-batch")
    per_device_eval_batch_size: int = _option(8, "samples per rank and batch of evaluation")
    gradient_accumulation_steps: int = _option(1, "micro-batches per optimizer step")
    learning_rate: float = _option(5e-5, "peak learning rate")
    weight_decay: float = _option(0.0, "decay of weights; never of biases and norms")
    adam_beta1: float = _option(0.9, "decay of AdamW's first moment")
    adam_beta2: float = _option(0.999, "decay of AdamW's second moment")
    adam_epsilon: float = _option(1e-8, "AdamW's epsilon")
    max_grad_norm: float = _option(1.0, "norm to clip gradients to; 0 only measures it")
    lr_scheduler_type: str = _option("linear", f"one of {', '.join(SCHEDULERS)}")
    warmup_steps: float = _option(0, "steps of linear warm-up; below 1 a ratio of all steps")
    optim: str = _option("adamw_torch", f"one of {', '.join(OPTIMIZERS)}")

    logging_strategy: str = _option("steps", "when to log: no, steps, epoch")
    logging_steps: float = _option(500, "steps between logs; below 1 a ratio of all steps")
    logging_first_step: bool = _option(default=False, help="log step 1 too")
    eval_strategy: str = _option("no", "when to evaluate: no, steps, epoch")
    eval_steps: float | None = _option(None, "steps between evaluations; None: logging_steps")
    save_strategy: str = _option("steps", "when to save: no, steps, epoch, best")
    save_steps: float = _option(500, "steps between checkpoints; below 1 a ratio of all steps")
    save_total_limit: int | None = _option(
        None,
        "checkpoints to keep, the best among them; None keeps all; 1 is 2 if the best is older",
    )
    save_retention: Mapping[str, Any] | None = _option(
        None, "keep_best, keep_every, keep_hourly, ... (Retention)"
    )
    save_parity: int = _option(
        0, "files of each rank that may be lost and are computed back; each costs the longest one"
    )
    repair_on_restore: bool = _option(
        default=True, help="compute damaged files back from parity instead of going further back"
    )
    load_best_model_at_end: bool = _option(default=False, help="end with the best weights saved")
    metric_for_best_model: str | None = _option(None, "metric that says which model is best")
    greater_is_better: bool | None = _option(None, "None: unless the metric's name ends in loss")

    seed: int = _option(42, "seed of Python's, NumPy's and torch's random numbers")
    data_seed: int | None = _option(None, "seed of the order of samples; None: seed")
    fp16: bool = _option(default=False, help="autocast to float16, with loss scaling")
    bf16: bool = _option(default=False, help="autocast to bfloat16")
    use_cpu: bool = _option(default=False, help="train on the CPU though a GPU is there")

    dataloader_num_workers: int = _option(0, "processes that load data; 0 loads in the loop")
    dataloader_drop_last: bool = _option(default=False, help="drop an incomplete last round")
    dataloader_pin_memory: bool = _option(default=True, help="pin batches (CUDA only)")
    dataloader_prefetch_factor: int | None = _option(None, "batches loaded ahead per worker")
    remove_unused_columns: bool = _option(
        default=True, help="keep from the model what its forward does not take by name"
    )
    dataloader_persistent_workers: bool = _option(default=False, help="keep workers over epochs")
    disable_tqdm: bool | None = _option(None, "None: a progress bar if stderr is a terminal")

    parallelism: str = _option("ddp", "what several ranks hold: ddp (replicas), fsdp (shards)")
    fsdp_transformer_layer_cls_to_wrap: str = _option("", "classes to gather one by one: A,B")
    fsdp_min_num_params: int = _option(0, "parameters of a module to gather it by itself; 0: off")
    fsdp_reshard_after_forward: bool = _option(
        default=True, help="free gathered parameters between forward and backward"
    )
    ddp_backend: str | None = _option(None, "gloo or nccl; None: what the device needs")
    ddp_timeout: float = _option(1800, "seconds that a collective may take")
    ddp_find_unused_parameters: bool = _option(default=False, help="see torch's DDP")
    ddp_bucket_cap_mb: float | None = _option(None, "size of DDP's buckets in MB; None: torch's")

    repo: str = _option("", "URL of the checkpoint repository; empty: output_dir")
    near_repo: str = _option("", "URL of a near repository that takes every save; empty: none")
    durable_every: int = _option(1, "with near_repo: every n-th save goes on to repo")
    near_total_limit: int = _option(2, "with near_repo: checkpoints that stay there")
    storage_options: dict[str, Any] | None = field(
        default=None,
        repr=False,
        metadata={"help": "endpoint, credentials and the like of repo; never shown, never saved"},
    )
    save_unchanged: str = _option("refer", "bytes that are stored already: refer, write (again)")
    on_save_failure: str = _option("stop", "what a failed save does to training: stop, continue")
    save_overlap: bool = _option(
        default=True, help="copy what only the optimizer changes beside the next step"
    )
    save_within_seconds: float = _option(600.0, "time after which a save has failed")
    grace_seconds: float = _option(
        20.0,
        "from a request to stop to leaving at once; under `resilient train` its --grace counts",
    )

    def __post_init__(self) -> None:
        self.output_dir, self.repo = os.fspath(self.output_dir), os.fspath(self.repo)
        self.near_repo = os.fspath(self.near_repo)
        _check_types(self)
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        _check_choices(self)
        _check_numbers(self)
        _check_limits(self)
        _check_cadences(self)
        _check_combinations(self)
        # Spelt wrongly it must not be found out at the first save.
        parse_retention(self.save_retention or {}, self.save_total_limit)
        check_parity(self.save_parity)

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return parse_retention(self.save_retention or {}, self.save_total_limit)

    @property
    def order_seed(self) -> int:
        """The seed of the order of samples."""
        return self.seed if self.data_seed is None else self.data_seed

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold, without the storage options.

        Checkpoints, loggers and events take a run's configuration from here, and credentials
        must reach none of them.
        """
        return {name: value for name, value in asdict(self).items() if name != "storage_options"}

    def to_json_string(self) -> str:
        """Return the fields as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)


def layer_classes(args: TrainingArguments) -> tuple[str, ...]:
    """Return the names of the classes whose modules FSDP gathers one by one."""
    names = args.fsdp_transformer_layer_cls_to_wrap.split(",")
    return tuple(name.strip() for name in names if name.strip())


def _refuse(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"`{name}`={value!r} is not accepted: {accepted}")


def _check_types(args: TrainingArguments) -> None:
    """Refuse what YAML or a command line leave as text, before it is compared with a number."""
    for one in fields(args):
        kind, _, other = str(one.type).partition(" | ")
        value = getattr(args, one.name)
        if kind not in _KINDS or (value is None and other):
            continue
        wanted, words = _KINDS[kind]
        if not isinstance(value, wanted) or (kind != "bool" and isinstance(value, bool)):
            raise _refuse(one.name, value, f"use {words}, not {type(value).__name__}")


def _check_choices(args: TrainingArguments) -> None:
    choices = dict(_CHOICES)
    if args.ddp_backend is not None:
        choices["ddp_backend"] = BACKENDS
    for name, accepted in choices.items():
        value = getattr(args, name)
        if value not in accepted:
            hint = did_you_mean(str(value), accepted)
            raise _refuse(name, value, f"use one of {', '.join(accepted)}{hint}")


def _check_numbers(args: TrainingArguments) -> None:
    for name in _AT_LEAST_ONE:
        value = getattr(args, name)
        if not isinstance(value, int) or value < 1:
            raise _refuse(name, value, "use a whole number of at least 1")
    for name in _NOT_NEGATIVE:
        if not getattr(args, name) >= 0:
            raise _refuse(name, getattr(args, name), "use a number of at least 0")
    for name in _POSITIVE:
        if not getattr(args, name) > 0:
            raise _refuse(name, getattr(args, name), "use a number above 0")


def _check_limits(args: TrainingArguments) -> None:
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise _refuse(name, getattr(args, name), "use a number from 0 to below 1")
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        raise _refuse("num_train_epochs", args.num_train_epochs, "use a number above 0")
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise _refuse("save_total_limit", args.save_total_limit, "keep at least 1, or None for all")


def _check_cadences(args: TrainingArguments) -> None:
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        if value is None:
            continue
        if not value > 0 or (value >= 1 and value != int(value)):
            raise _refuse(name, value, "use a whole number of steps, or a ratio between 0 and 1")
    if args.warmup_steps >= 1 and args.warmup_steps != int(args.warmup_steps):
        raise _refuse("warmup_steps", args.warmup_steps, "use whole steps, or a ratio below 1")


def _check_combinations(args: TrainingArguments) -> None:
    if args.fp16 and args.bf16:
        raise ConfigError("`fp16` and `bf16` are both set: use one of them")
    if args.dataloader_num_workers == 0 and (
        args.dataloader_prefetch_factor is not None or args.dataloader_persistent_workers
    ):
        raise ConfigError(
            "`dataloader_prefetch_factor` and `dataloader_persistent_workers` need workers: "
            "set `dataloader_num_workers` to at least 1"
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError("`save_strategy`='best' needs `metric_for_best_model`")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ConfigError("`save_strategy`='best' needs `eval_strategy` steps or epoch")
    if args.load_best_model_at_end and args.save_strategy != "best":
        _check_every_evaluation_can_be_saved(args)


def _check_every_evaluation_can_be_saved(args: TrainingArguments) -> None:
    """The best model can only be loaded at the end if it was saved when it was found."""
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
    """Say whether every save falls on an evaluation; ratios are compared in millionths."""
    if (save_steps < 1) != (eval_steps < 1):
        return False
    unit = 1_000_000 if save_steps < 1 else 1
    return round(save_steps * unit) % round(eval_steps * unit) == 0
