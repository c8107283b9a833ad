"""Weights & Biases tracker, and a reader for the history in offline ``.wandb`` files.

A ``.wandb`` file is a log in LevelDB's format. After a header of 7 bytes, blocks of 32 KiB contain
chunks of ``crc32 (4), length (2), kind (1), bytes``. A record is one full chunk, or a first chunk,
middle chunks and a last chunk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import string
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resilient.environment import FALSE, read_choice
from resilient.train.trackers.base import SINGLE_VALUES, LoggedSteps, Tracker, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from resilient.train.hf_interop.saved_models import SavedModel
    from resilient.train.trackers.base import TrackerContext

_FILE_HEAD, _BLOCK = 7, 32 * 1024
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def history_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the history, each with ``_step``; a truncated last record is ignored."""
    for record in _parsed(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items
            }


def last_steps(files: Iterable[Path]) -> dict[str, int]:
    """Return the last step of each metric over several files."""
    last_step_by_name: dict[str, int] = {}
    for file in files:
        for row in history_rows(file):
            step = int(row["_step"])
            last_step_by_name |= {name: max(step, last_step_by_name.get(name, -1)) for name in row}
    return last_step_by_name


def has_ended(path: Path) -> bool:
    """Return whether the file contains the record that ends a run."""
    return any(record.WhichOneof("record_type") == "exit" for record in _parsed(path))


def _parsed(path: Path) -> Iterator[Any]:
    record_type = load("wandb.proto.wandb_internal_pb2").Record
    for content in _records(path.read_bytes()):
        record = record_type()
        record.ParseFromString(content)
        yield record


def _records(content: bytes) -> Iterator[bytes]:
    at, record = _FILE_HEAD, b""
    while at + _CHUNK.size <= len(content):
        block_bytes_left = _BLOCK - at % _BLOCK
        if block_bytes_left < _CHUNK.size:
            at += block_bytes_left
            continue
        _, length, kind = _CHUNK.unpack_from(content, at)
        at += _CHUNK.size
        chunk, at = content[at : at + length], at + length
        if len(chunk) < length:
            return
        record = chunk if kind in (_FULL, _FIRST) else record + chunk
        if kind in (_FULL, _LAST):
            yield record


_NO_NAME = r"[^A-Za-z0-9._-]"  # Characters that the name of an artifact must not contain.
_AXIS = "train/global_step"
_POLLS, _POLL_SECONDS = 100, 0.02


class WeightsAndBiases(Tracker):
    """Tracker for Weights & Biases: one run, continued by its id.

    The project is ``WANDB_PROJECT`` (default ``huggingface``); W&B's own variables apply as well.
    The service or its local files give the steps that W&B already has. A run that the script
    opened is used and left open. W&B has its own step counter, which must not go back. To log
    other values, use ``wandb.log(..., step=state.global_step)``.

    ``WANDB_LOG_MODEL`` uploads models as the artifact ``model-<run name or id>``. With
    ``checkpoint`` it uploads the model of each committed checkpoint. The last one gets the alias
    ``final_model``. With ``end`` only the final model is uploaded.

    Raises:
        ConfigError: ``WANDB_LOG_MODEL`` or ``WANDB_WATCH`` has an invalid value.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None
        self._is_own_run = True
        self._model_name = ""
        # Read the variables here, because an error in the tracker's thread would not end training.
        self._logs_models = read_choice(
            os.environ, "WANDB_LOG_MODEL", ("checkpoint", "end", *FALSE), "false"
        )
        self._watches = read_choice(
            os.environ, "WANDB_WATCH", ("all", "parameters", "gradients", *FALSE), "false"
        )

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Open or continue the run; W&B rejects steps that it already has."""
        wandb = load("wandb")
        self._is_own_run = wandb.run is None
        self.run_id = opening.run_id or os.environ.get("WANDB_RUN_ID") or _new_id()
        self._run = wandb.run or wandb.init(
            project=os.environ.get("WANDB_PROJECT", "huggingface"),
            id=self.run_id,
            resume="allow",
            **_run_name_option(opening),
        )
        self.run_id = self._run.id
        self._model_name = opening.args.run_name or self.run_id
        self._run.config.update(opening.config(), allow_val_change=True)
        self._run.define_metric(_AXIS)
        self._run.define_metric("*", step_metric=_AXIS, step_sync=True)
        self._watch(opening)
        if not opening.run_id:
            return None
        files = _other_files(self._run)
        return LoggedSteps(last_steps(files), floor=int(self._run.step) - 1)

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Add values to the row of this step; once-per-run values go to the summary."""
        row: dict[str, float | str] = {}
        for name, value in metrics.items():
            short_name = name.removeprefix("train/")
            if short_name in SINGLE_VALUES:
                self._run.summary[short_name] = value
            else:
                row[name] = value
        if row:
            self._run.log({**row, _AXIS: step}, step=step)

    def wants_models(self) -> Literal["never", "end", "checkpoint"]:
        """Return ``checkpoint``, ``end`` or ``never``, by ``WANDB_LOG_MODEL``."""
        if self._logs_models == "checkpoint":
            return "checkpoint"
        return "end" if self._logs_models == "end" else "never"

    def log_model(self, model: SavedModel) -> None:
        """Log the model as a new version of the run's artifact; W&B stores equal files once."""
        step = model.checkpoint.step
        artifact = load("wandb").Artifact(
            f"model-{re.sub(_NO_NAME, '-', self._model_name)}",
            type="model",
            metadata={
                "checkpoint": model.checkpoint.folder,
                "final_model": model.is_final,
                **model.metrics,
            },
        )
        # The default policy "mutable" copies the files, because W&B uploads them later.
        artifact.add_dir(str(model.folder))
        steps = [f"epoch_{round(model.epoch, 2)}", f"checkpoint_global_step_{step}"]
        self._run.log_artifact(artifact, aliases=steps + ["final_model"] * model.is_final)

    def finish(self, *, completed: bool) -> None:
        """Upload the remaining points; an interrupted run is marked as preempting."""
        if not self._is_own_run:
            return
        if not completed:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if completed else 1)
        if self._run.offline:
            _await_end(Path(self._run.settings.sync_file))

    def _watch(self, opening: TrackerContext) -> None:
        if self._watches not in FALSE and opening.model is not None:
            interval_steps = max(100, int(opening.args.logging_steps))
            self._run.watch(opening.model, log=self._watches, log_freq=interval_steps)


def _run_name_option(opening: TrackerContext) -> dict[str, str]:
    args = opening.args
    if opening.trial_name is not None:
        return {"name": opening.trial_name, "group": args.run_name or args.output_dir}
    return {"name": args.run_name} if args.run_name else {}


def _new_id() -> str:
    letters = string.ascii_lowercase + string.digits
    return "".join(secrets.choice(letters) for _ in range(8))


def _await_end(file: Path) -> None:
    """Wait until W&B's process has written the end record.

    The next attempt in this process reads the file.
    """
    for _ in range(_POLLS):
        if has_ended(file):
            return
        time.sleep(_POLL_SECONDS)


def _other_files(run: Any) -> list[Path]:
    """Return the offline files that earlier attempts wrote for this run, oldest first."""
    own_file = Path(str(run.settings.sync_file))
    files = own_file.parent.parent.glob(f"offline-run-*/run-{run.id}.wandb")
    return sorted(path for path in files if path != own_file)
