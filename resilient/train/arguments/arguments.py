"""TrainingArguments, and properties derived from the arguments and the launcher's variables.

The derived properties give this process's rank, device and log level. Arguments have the names and
defaults of Transformers.
"""

from __future__ import annotations

import inspect
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Self, cast

from resilient.checkpoint.retention import parse_retention
from resilient.distributed.launch_env import read_launch
from resilient.errors import ConfigError
from resilient.train.arguments.choices import ENUMS, ParallelMode, as_choice, refuse_names
from resilient.train.arguments.deprecated import rename_deprecated, warn_of_old_name
from resilient.train.arguments.derived import expand_section, normalize_save_every, parallelism_of
from resilient.train.arguments.fields import (
    BasicArguments,
    ComputingArguments,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    HubArguments,
    LoggingArguments,
    OptimizationArguments,
    RepositoryArguments,
    SavingArguments,
)
from resilient.train.arguments.json_values import json_value
from resilient.train.arguments.parsing import from_file, parse_arguments
from resilient.train.arguments.validation import check, check_types
from resilient.train.arguments.value_types import is_secret
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from resilient.checkpoint.retention import Retention
    from resilient.distributed.launch_env import World

# Levels of the logging module. Transformers adds `detail`, which shows all messages.
_LOUDNESS = {"detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class DerivedArguments(
    DistributedArguments,
    SavingArguments,
    RepositoryArguments,
    LoggingArguments,
    OptimizationArguments,
    BasicArguments,
):
    """Derived properties as in Transformers. Launcher variables identify this process."""

    @property
    def _world(self) -> World:
        return read_launch(os.environ).world

    @property
    def world_size(self) -> int:
        """Number of ranks that train together."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """Rank of this process among all."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its host."""
        return self._world.local_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its host; 0 without a launcher."""
        return self._world.local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        """``distributed`` if several ranks train together, else ``not_parallel``."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        import torch

        if self.n_gpu == 0:
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank)

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: 1 or 0; more GPUs need more processes."""
        import torch

        return 0 if self.use_cpu or not torch.cuda.is_available() else 1

    @property
    def train_batch_size(self) -> int:
        """Samples of this process per micro-batch of training."""
        return self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def eval_batch_size(self) -> int:
        """Samples of this process per batch of evaluation."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

    @property
    def place_model_on_device(self) -> bool | None:
        """None: the trainer moves the model to the device. False in a subclass: it does not."""
        return None

    @property
    def should_save(self) -> bool:
        """True if this process writes the files of the whole job: models, states, metrics."""
        return self._world.is_coordinator

    @property
    def should_log(self) -> bool:
        """True if this process shows logs."""
        return self.local_process_index == 0 if self.log_on_each_node else self.process_index == 0

    def get_process_log_level(self) -> int:
        """Return the minimum level of events that this process shows (numbers of ``logging``).

        ``log_level`` applies to processes that show logs, and ``log_level_replica`` applies to the
        others. ``passive`` is ``info`` on the first rank of all and ``warning`` on the others.
        """
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            name = "info" if self.process_index == 0 else "warning"
        return _LOUDNESS[name]

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """Time limit of a collective."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def retention(self) -> Retention:
        """Retention policy for checkpoints."""
        return parse_retention(self.save_retention or {}, self.save_total_limit)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return a run's number of warm-up steps; a ratio is rounded up."""
        return absolute_steps(self.warmup_steps, num_training_steps)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:  # noqa: FBT001, FBT002, ARG002 - the field's signature
        """Run a block first on one process, then on the others, which reuse its cached results.

        Without a process group the block runs at once. Collective.

        Args:
            local: True: the first rank of each host runs first. False: only rank 0 runs first.
            desc: Description of the work, for readers of the script.
        """
        import torch.distributed as dist

        is_main = self.local_process_index == 0 if local else self.process_index == 0
        is_distributed = dist.is_available() and dist.is_initialized()
        if is_distributed and not is_main:
            dist.barrier()
        try:
            yield
        finally:
            if is_distributed and is_main:
                dist.barrier()


# Public attributes of Transformers' arguments that have no counterpart.
NOT_PROVIDED = {
    "deepspeed_plugin": "read `args.deepspeed`",
    "default_optim": "read `args.optim`",
    "distributed_state": "read `args.process_index`, `args.world_size` and `args.device`",
    "fsdp_plugin_args": "read `args.fsdp` and `args.fsdp_config`",
    "hf_deepspeed_config": "read `args.deepspeed`",
    "is_torch_greater_or_equal_than_2_8": "read `torch.__version__`",
    "xla_fsdp_config": "write fsdp=True: torch_xla is not supported",
}


class _GroupedArguments(DerivedArguments):
    """Setters of several arguments at once, as in Transformers; a refused value changes nothing."""

    def _changed(self, values: Mapping[str, Any]) -> Self:
        """Set arguments, and check all arguments like the constructor.

        Raises:
            ConfigError: A value is not accepted, or it contradicts another argument.
        """
        old_values = dict(vars(self))
        try:
            for name, value in values.items():
                setattr(self, name, value)
            self.__post_init__()  # type: ignore[attr-defined]  # of the class with all arguments
        except ConfigError:
            vars(self).clear()
            vars(self).update(old_values)
            raise
        return self

    def set_training(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,  # noqa: FBT001, FBT002 - as above
        gradient_checkpointing: bool | None = None,  # noqa: FBT001 - as above
    ) -> Self:
        """Set the basic arguments of training, and ``do_train``."""
        recomputes = activation_checkpointing
        if gradient_checkpointing is not None:
            warn_of_old_name("gradient_checkpointing", "activation_checkpointing")
            recomputes = gradient_checkpointing
        return self._changed(
            {
                "do_train": True,
                "learning_rate": learning_rate,
                "per_device_train_batch_size": batch_size,
                "weight_decay": weight_decay,
                "num_train_epochs": num_epochs,
                "max_steps": max_steps,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "seed": seed,
                "activation_checkpointing": recomputes,
            }
        )

    def set_evaluate(
        self,
        strategy: str = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> Self:
        """Set the arguments of evaluation, and ``do_eval`` unless ``strategy`` is ``no``."""
        return self._changed(
            {
                "eval_strategy": strategy,
                "do_eval": strategy != "no",
                "eval_steps": steps,
                "per_device_eval_batch_size": batch_size,
                "eval_accumulation_steps": accumulation_steps,
                "eval_delay": 0 if delay is None else delay,
                "prediction_loss_only": loss_only,
            }
        )

    def set_testing(
        self,
        batch_size: int = 8,
        loss_only: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> Self:
        """Set the arguments of prediction, and ``do_predict``."""
        return self._changed(
            {
                "do_predict": True,
                "per_device_eval_batch_size": batch_size,
                "prediction_loss_only": loss_only,
            }
        )

    def set_save(
        self,
        strategy: str = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> Self:
        """Set the arguments of checkpoints."""
        return self._changed(
            {
                "save_strategy": strategy,
                "save_steps": steps,
                "save_total_limit": total_limit,
                "save_on_each_node": on_each_node,
            }
        )

    def set_logging(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        strategy: str = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,  # noqa: FBT001, FBT002 - as above
        nan_inf_filter: bool = False,  # noqa: FBT001, FBT002 - as above
        on_each_node: bool = False,  # noqa: FBT001, FBT002 - as above
        replica_level: str = "passive",
    ) -> Self:
        """Set the arguments of logs."""
        return self._changed(
            {
                "logging_strategy": strategy,
                "logging_steps": steps,
                "report_to": report_to,
                "log_level": level,
                "logging_first_step": first_step,
                "logging_nan_inf_filter": nan_inf_filter,
                "log_on_each_node": on_each_node,
                "log_level_replica": replica_level,
            }
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,  # noqa: FBT001 - as above
        always_push: bool = False,  # noqa: FBT001, FBT002 - as above
        revision: str | None = None,
    ) -> Self:
        """Set the arguments of the Hugging Face Hub, and ``push_to_hub``."""
        return self._changed(
            {
                "push_to_hub": True,
                "hub_model_id": model_id,
                "hub_strategy": strategy,
                "hub_token": token,
                "hub_private_repo": private_repo,
                "hub_always_push": always_push,
                "hub_revision": revision,
            }
        )

    def set_optimizer(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its arguments."""
        return self._changed(
            {
                "optim": name,
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "adam_beta1": beta1,
                "adam_beta2": beta2,
                "adam_epsilon": epsilon,
                "optim_args": args,
            }
        )

    def set_lr_scheduler(
        self,
        name: str = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Self:
        """Set the learning-rate schedule and its length."""
        return self._changed(
            {
                "lr_scheduler_type": name,
                "num_train_epochs": num_epochs,
                "max_steps": max_steps,
                "warmup_steps": warmup_steps,
            }
        )

    def set_dataloader(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as above
        num_workers: int = 0,
        pin_memory: bool = True,  # noqa: FBT001, FBT002 - as above
        persistent_workers: bool = False,  # noqa: FBT001, FBT002 - as above
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,  # noqa: FBT001, FBT002 - as above
        auto_find_batch_size: bool = False,  # noqa: FBT001, FBT002 - as above
        ignore_data_skip: bool = False,  # noqa: FBT001, FBT002 - as above
        sampler_seed: int | None = None,
    ) -> Self:
        """Set the arguments of data loaders."""
        return self._changed(
            {
                "per_device_train_batch_size": train_batch_size,
                "per_device_eval_batch_size": eval_batch_size,
                "dataloader_drop_last": drop_last,
                "dataloader_num_workers": num_workers,
                "dataloader_pin_memory": pin_memory,
                "dataloader_persistent_workers": persistent_workers,
                "dataloader_prefetch_factor": prefetch_factor,
                "dataloader_multiprocessing_context": multiprocessing_context,
                "dataloader_in_order": in_order,
                "auto_find_batch_size": auto_find_batch_size,
                "ignore_data_skip": ignore_data_skip,
                "data_seed": sampler_seed,
            }
        )


# Fields that accept a dict as JSON text.
_DICTS = (
    *("accelerator_config", "activation_checkpointing_kwargs", "deepspeed", "fsdp_config"),
    *("ddp_comm_state_option", "parallelism_config"),
    *("lr_scheduler_kwargs", "optim_args"),
)
# Schedules driven by the best model's metric.
_METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_PATHS = ("output_dir", "repo", "near_repo", "logging_dir", "resume_from_checkpoint")


class _Named(type):
    """Metaclass that checks argument names before the dataclass rejects them, in subclasses too."""

    if not TYPE_CHECKING:  # else a type checker would not check the arguments of the fields

        def __call__(cls, *args: Any, **options: Any) -> Any:
            names = {field.name for field in fields(cls)}
            return super().__call__(*args, **rename_deprecated(options, names))


@dataclass
class TrainingArguments(  # Fields of the last base come first: `output_dir`.
    HubArguments,
    DataArguments,
    ComputingArguments,
    EvaluationArguments,
    _GroupedArguments,
    metaclass=_Named,
):
    """Configuration of a training run.

    Every field carries its help as metadata (``dataclasses.fields(...)[i].metadata["help"]``).
    A number of steps below 1 is a ratio of all steps of the run.

    At the end, ``load_best_model_at_end`` loads the best model that a checkpoint contains, as in
    Transformers. Even if ``save_steps`` is a multiple of ``eval_steps``, the best evaluated model
    may be in no checkpoint, and an event reports this fact. ``save_strategy="best"`` saves each
    best model.

    Former names of Transformers are accepted with a ``FutureWarning`` that gives today's name. An
    unsupported argument is accepted with the value that turns it off (``use_liger_kernel=False``)
    and rejected with any other value.

    Raises:
        ConfigError: A name is unknown, a value is not accepted, or two values contradict.
    """

    if not TYPE_CHECKING:  # else a type checker would accept any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute; the text of a choice becomes a member of the enum."""
            object.__setattr__(self, name, as_choice(name, value) if name in ENUMS else value)

    def __post_init__(self) -> None:
        self._normalize()
        check_types(self)
        self._derive_values()
        check(self)
        self.to_dict()

    def _normalize(self) -> None:
        """Normalize equivalent spellings: enums, paths, JSON, single names.

        Fields of a subclass outside of this library stay unchanged.
        """
        for name in _own_names(type(self)):
            setattr(self, name, _plain(name, getattr(self, name)))
        for name in _PATHS:
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, os.path.expanduser(value))  # noqa: PTH111 - it may be a URL
        self._expand_section()
        for name in _DICTS:
            setattr(self, name, _decoded_json(name, getattr(self, name)))
        self.fsdp = self.fsdp or None
        self.debug = _as_names(self.debug, " ")
        self.report_to = [item for item in _as_names(self.report_to, ",") if item != "none"]

    def _expand_section(self) -> None:
        """Expand the ``parallelism`` section, which may hold all distributed arguments."""
        section: Any = self.parallelism
        if isinstance(section, dict):
            names = {field.name for field in fields(DistributedArguments)}
            for name, value in expand_section(section, names).items():
                setattr(self, name, value)

    def _derive_values(self) -> None:
        """Fill in values that follow from other arguments."""
        normalize_save_every(self)
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = (
                "all" if self.include_num_input_tokens_seen else "no"
            )
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        if self.eval_strategy != "no":
            self.do_eval = True
        self.parallelism = parallelism_of(self, os.environ)
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type in _METRIC_SCHEDULES
        if needs_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> Self:
        """Return the arguments of a TOML, YAML or JSON file, overridden by ``changes``.

        Raises:
            ConfigError: The file cannot be read, or a value is not accepted. The message names the
                line.
        """
        arguments: Self = from_file(cls, path, changes)
        return arguments

    @classmethod
    def from_command_line(cls, argv: Sequence[str] | None = None) -> Self:
        """Return the arguments of a command line: ``--config FILE --learning-rate 1e-4``.

        The command line overrides the file. ``resilient.parse_arguments`` also accepts your own
        dataclasses.

        Args:
            argv: Words after the script's name; None: the words of this process.

        Raises:
            UsageError: An option is unknown, or lacks its value.
            ConfigError: A value is not accepted.
        """
        arguments: Self = parse_arguments(cls, argv=argv)[0]
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, without secrets.

        Checkpoints, loggers and events use the result as the run's configuration, so it must not
        contain credentials. A subclass field whose name ends with ``_token`` is masked, and a field
        with ``init=False`` is left out, as in Transformers.

        Raises:
            ConfigError: JSON cannot represent the value of a field.
        """
        kind = cast("Any", type(self))
        return {name: _to_json(name, getattr(self, name)) for name in open_names(kind)} | {
            name: f"<{name.upper()}>" for name in _hidden_names(kind)
        }

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """Return the fields as plain values for trackers; convert other values to text."""
        plain = (bool, int, float, str)
        return {
            name: value if isinstance(value, plain) else str(value)
            for name, value in self.to_dict().items()
        }

    def to_json_string(self) -> str:
        """Return the fields as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)


refuse_names(TrainingArguments, NOT_PROVIDED, "TrainingArguments")


@cache
def open_names(kind: Any) -> tuple[str, ...]:
    """Return the names of an arguments class's fields that are neither secret nor masked."""
    hidden = _hidden_names(kind)
    return tuple(
        field.name
        for field in fields(kind)
        if field.init and field.name not in hidden and not is_secret(field)
    )


@cache
def _own_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields that this library defines."""
    own_classes = [cls for cls in kind.__mro__ if cls.__module__.startswith("resilient.")]
    names = {name for cls in own_classes for name in inspect.get_annotations(cls)}
    return tuple(field.name for field in fields(kind) if field.name in names)


@cache
def _hidden_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a subclass's fields whose values may be credentials."""
    own_names = _own_names(kind)
    return tuple(
        field.name
        for field in fields(kind)
        if field.init and field.name.endswith("_token") and field.name not in own_names
    )


def _to_json(name: str, value: Any) -> Any:
    try:
        return json_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the argument `{name}` cannot be saved with a checkpoint: {error}",
            hint=f"give `{name}` as text, a number, a list or a dict, or make it a field with "
            "`init=False`",
        ) from error


def _plain(name: str, value: Any) -> Any:
    """Return the text of an enum's member or of a path; any other value unchanged."""
    value = as_choice(name, value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _decoded_json(name: str, value: Any) -> Any:
    """Return the dict that a JSON text encodes; return any other value unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"`{name}` is not valid JSON: {error}") from error


def _as_names(value: Any, separator: str) -> Any:
    """Return a list of names from a text with one or several names, a list or None."""
    if value is None:
        return []
    if isinstance(value, str):
        return [
            word.strip() for word in value.replace(",", separator).split(separator) if word.strip()
        ]
    return list(value) if isinstance(value, tuple) else value
