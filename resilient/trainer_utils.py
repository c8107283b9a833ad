"""Counterpart of ``transformers.trainer_utils``: enums, results, seeds and small functions.

A script that imports from ``transformers.trainer_utils`` may import from this module instead::

    from resilient.trainer_utils import get_last_checkpoint, set_seed

The enums of ``transformers.training_args`` are here too.

Names are loaded when they are first used. A name without a counterpart raises an error that names
the alternative.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

_CHOICES = "resilient.train.arguments.choices"
_LOOP = "resilient.train.evaluation.loop"
_STUDY = "resilient.train.search.study"
_HOMES = {
    "BestRun": _STUDY,
    "EvalLoopOutput": _LOOP,
    "EvalPrediction": _LOOP,
    "FSDPOption": _CHOICES,
    "HPSearchBackend": _CHOICES,
    "HubStrategy": _CHOICES,
    "IntervalStrategy": _CHOICES,
    "OptimizerNames": _CHOICES,
    "ParallelMode": _CHOICES,
    "PredictionOutput": _LOOP,
    "SaveStrategy": _CHOICES,
    "SchedulerType": _CHOICES,
    "TrainOutput": "resilient.train.trainer",
}
"""Module of each name that another module defines."""

_THEIRS = "from transformers.trainer_utils import {}"
NOT_PROVIDED = {
    "TrainerMemoryTracker": "set skip_memory_metrics=False: the metrics contain the memory",
    "align_special_tokens": "pass the tokenizer as `processing_class`: `train` aligns the tokens",
    "check_target_module_exists": "set `optim_target_modules`",
    "compare_trainer_and_checkpoint_args": "call `train()`: a resume compares the arguments",
    "default_hp_space_ray": "use `default_hp_space_optuna`",
    "default_hp_space_wandb": "use `default_hp_space_optuna`",
    "load_sharded_checkpoint": "call `trainer.load_model(checkpoint)` or `from_pretrained`",
    "rotate_checkpoints": "set `save_total_limit`",
    "sort_checkpoints": "run `resilient ckpt ls REPO`",
    "suppress_progress_bars": "set disable_tqdm=True",
    "unwrap_peft_model": "call `model.get_base_model()`",
    "validate_quantization_for_training": _THEIRS.format("validate_quantization_for_training"),
}
"""Names of ``transformers.trainer_utils`` without a counterpart, and the alternative."""

PREFIX_CHECKPOINT_DIR = "checkpoint"
_STEP = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


class ImportNotProvided(ConfigError, ImportError):
    """A name of Transformers has no counterpart here; the hint names the alternative."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in NOT_PROVIDED:
        raise ImportNotProvided(
            f"`{name}` of transformers.trainer_utils does not exist here", hint=NOT_PROVIDED[name]
        )
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def set_seed(seed: int, deterministic: bool = False) -> None:  # noqa: FBT001, FBT002 - the field's signature
    """Seed the global random numbers of Python, NumPy and torch.

    Args:
        seed: Seed.
        deterministic: Whether torch uses only deterministic algorithms.
    """
    from resilient.train.run import set_seed as seed_all

    seed_all(seed)
    if deterministic:
        import torch

        torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's signature


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:  # noqa: FBT001, FBT002 - the field's signature
    """Seed all random numbers, and restrict torch to deterministic algorithms.

    Args:
        seed: Seed.
        warn_only: Whether an operation without a deterministic algorithm only warns.
    """
    from resilient.train.session import compute_deterministically

    set_seed(seed)
    compute_deterministically(warn_only=warn_only)


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:  # noqa: ARG001 - the field's signature
    """Seed a process of a data loader, as Transformers' loaders do."""
    import torch

    set_seed(num_workers * rank + torch.initial_seed() % 2**32)


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint in a folder; None without a checkpoint.

    Checkpoints of this library take precedence over those of Transformers' trainer. If
    ``train(resume_from_checkpoint=...)`` gets the result, the trainer resumes the newest intact
    checkpoint, as without an argument.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    place = Path(folder)
    names = [entry.name for entry in place.iterdir() if entry.is_dir()]
    newest = _newest_of_repository(place) if any("-g" in name for name in names) else None
    if newest is None:
        steps = {int(found[1]): name for name in names if (found := _STEP.fullmatch(name))}
        return os.path.join(folder, steps[max(steps)]) if steps else None  # noqa: PTH118 - as the user wrote it
    from resilient.train.build_run import NewestCheckpoint

    return NewestCheckpoint(os.path.join(folder, newest))  # noqa: PTH118 - as above


def _newest_of_repository(place: Path) -> str | None:
    from resilient.checkpoint.catalog import lineage
    from resilient.storage.open import open_store

    candidates = lineage(open_store(str(place))).candidates
    return candidates[0].folder if candidates else None


def has_length(dataset: Any) -> bool:
    """Return whether ``len(dataset)`` works."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):
        return False


def denumpify_detensorize(metrics: Any) -> Any:
    """Return metrics with NumPy numbers and one-element tensors as plain numbers."""
    if isinstance(metrics, list | tuple):
        return type(metrics)(denumpify_detensorize(value) for value in metrics)
    if isinstance(metrics, dict):
        return type(metrics)({key: denumpify_detensorize(value) for key, value in metrics.items()})
    # Arrays have more than one element or a dimension; NumPy numbers have neither.
    is_number = type(metrics).__module__ == "numpy" and type(metrics).__name__ != "ndarray"
    is_scalar = callable(getattr(metrics, "numel", None)) and metrics.numel() == 1
    return metrics.item() if is_number or is_scalar else metrics


def number_of_arguments(func: Callable[..., Any]) -> int:
    """Return the number of arguments that a function, or a partial function, still takes."""
    if isinstance(func, functools.partial):
        total = len(inspect.signature(func.func).parameters)
        return total - len(func.args) - len(func.keywords)
    return len(inspect.signature(func).parameters)


def is_main_process(local_rank: int) -> bool:
    """Return whether a process with this local rank is the main process of its host."""
    return local_rank in (-1, 0)


def total_processes_number(local_rank: int) -> int:
    """Return the number of ranks; 1 for the local rank -1."""
    if local_rank == -1:
        return 1
    from resilient.distributed.launch_env import read_launch

    return read_launch(os.environ).world.size


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Return the duration and the speeds of an operation that ends now.

    Args:
        split: Prefix of the names, such as ``eval``.
        start_time: Result of ``time.time()`` at the start of the operation.
        num_samples: Samples of the operation.
        num_steps: Steps of the operation.
        num_tokens: Tokens of the operation.
    """
    runtime = time.time() - start_time  # noqa: TID251 - the caller has this clock's start
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return metrics
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    for name, count in counts.items():
        if count is not None:
            metrics[f"{split}_{name}_per_second"] = round(count / runtime, 3)
    return metrics


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the sum of the metrics, or the evaluation loss if there are no other metrics."""
    from resilient.train.search.study import default_objective

    return default_objective(metrics)


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Return the default search space: learning rate, epochs, seed and batch size."""
    from resilient.train.search.study import default_space

    return default_space(trial)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    auto_find_batch_size: bool = False,  # noqa: FBT001, FBT002 - the field's signature
) -> Callable[..., Any]:
    """Decorate a function of a batch size, which is tried again with smaller sizes.

    Args:
        function: Function whose first argument is the batch size; None returns a decorator.
        starting_batch_size: First batch size.
        auto_find_batch_size: Whether an out-of-memory error leads to another try.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if not auto_find_batch_size:
        return functools.partial(function, batch_size=starting_batch_size)
    try:
        from accelerate.utils import find_executable_batch_size as find
    except ImportError as error:
        raise ConfigError(
            "`find_executable_batch_size` needs accelerate", hint="pip install accelerate"
        ) from error
    decorated: Callable[..., Any] = find(function, starting_batch_size=starting_batch_size)
    return decorated


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Run a block first on the main process of each host, then on the other processes.

    Collective.

    Args:
        local_rank: Local rank of this process; -1 without ranks.
    """
    import torch.distributed as dist

    if local_rank not in (-1, 0):
        dist.barrier()
    yield
    if local_rank == 0 and dist.is_initialized():
        dist.barrier()


class RemoveColumnsCollator:
    """Collator that first drops the columns that a model does not take.

    Args:
        data_collator: Function from samples to a batch.
        signature_columns: Names that are kept.
        logger: Logger for one message about the dropped columns.
        model_name: Name of the model, for the message.
        description: Name of the dataset, for the message.
    """

    def __init__(
        self,
        data_collator: Callable[[Any], Any],
        signature_columns: Collection[str],
        logger: Any = None,
        model_name: str | None = None,
        description: str | None = None,
    ) -> None:
        self.data_collator = data_collator
        self.signature_columns = signature_columns
        self.logger = logger
        self.model_name = model_name
        self.description = description
        self.message_logged = False

    def __call__(self, features: Sequence[Any]) -> Any:
        """Collate samples; samples that are no dicts are not pruned."""
        return self.data_collator([self._pruned(feature) for feature in features])

    def _pruned(self, feature: Any) -> Any:
        if not isinstance(feature, dict):
            return feature
        dropped = [name for name in feature if name not in self.signature_columns]
        if dropped and self.logger and self.model_name and not self.message_logged:
            place = f" of the {self.description} set" if self.description else ""
            text = f"`{self.model_name}.forward` does not take {', '.join(dropped)}{place}"
            self.logger.info(text)
            self.message_logged = True
        return {name: value for name, value in feature.items() if name in self.signature_columns}
