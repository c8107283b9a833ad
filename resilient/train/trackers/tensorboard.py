"""TensorBoard tracker: event files in a folder."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import LoggedSteps, Tracker, as_json, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext


class TensorBoard(Tracker):
    """Tracker that writes TensorBoard event files.

    The folder is ``logging_dir``, ``TENSORBOARD_LOGGING_DIR`` or ``output_dir/runs/<date>_<host>``.
    The run's id is the name of the folder below ``output_dir/runs``. TensorBoard ignores repeated
    points when it reads the files (``purge_step``).
    """

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Write to the folder from step ``since`` on.

        TensorBoard then hides points that were written earlier for these steps.
        """
        is_resumed = bool(opening.run_id)
        self.run_id = opening.run_id or _new_name(Path(opening.args.output_dir) / "runs")
        folder = _folder(opening, self.run_id)
        is_gone = is_resumed and not _has_events(folder)
        self._writer = _writer_class()(folder, purge_step=opening.since)
        if is_gone or not is_resumed:
            self._writer.add_text("args", as_json(opening.args.to_dict()))
            config = getattr(opening.model, "config", None)
            if config is not None:
                self._writer.add_text("model_config", as_json(opening.config()))
        self._writer.flush()
        # On another machine the folder may be empty. Then the whole history is sent.
        return LoggedSteps() if is_gone else None

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Append scalars and texts, and flush the file."""
        for name, value in metrics.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)
        self._writer.flush()

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - the file is the same
        """Close the file."""
        self._writer.close()


def _folder(opening: TrackerContext, name: str) -> str:
    logging_dir = opening.args.logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if logging_dir:
        return str(Path(logging_dir).expanduser()) if "://" not in logging_dir else logging_dir
    folder = Path(opening.args.output_dir) / "runs" / name
    return str(folder / opening.trial_name if opening.trial_name else folder)


def _new_name(runs: Path) -> str:
    """Return the default name of a run that starts now, with a number if the name is taken."""
    name = f"{datetime.now(tz=UTC).astimezone():%b%d_%H-%M-%S}_{socket.gethostname()}"
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(candidate for candidate in names if not (runs / candidate).exists())


def _has_events(folder: str) -> bool:
    """Return whether the folder has events to continue from; a bucket is assumed to have some."""
    return "://" in folder or any(Path(folder).glob("*tfevents*"))


def _writer_class() -> Any:
    try:
        return load("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return load("tensorboardX").SummaryWriter
