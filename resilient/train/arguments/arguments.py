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
from resilient.train.arguments.choices import ENUMS, ParallelMode, as_choice
from resilient.train.arguments.deprecated import rename_deprecated
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
    from collections.abc import Iterator, Sequence
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
    DerivedArguments,
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
    unsupported argument is accepted with the value that turns it off (``push_to_hub=False``) and
    rejected with any other value.

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
