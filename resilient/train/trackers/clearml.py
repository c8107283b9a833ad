"""ClearML: one task by its id, continued; with ``CLEARML_OFFLINE_MODE`` in a local folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import SINGLE_VALUES, LocalStateTracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext


class ClearML(LocalStateTracker):
    """Reports to ``CLEARML_PROJECT`` and ``CLEARML_TASK`` (``run_name``, else ``Trainer``).

    A task that the script made is used and left open. Without a network all lives of a run write
    into one offline session, which ``Task.import_offline_session`` uploads as one task; what is
    there is read from its file, because ClearML writes some time after it was told.
    """

    name = "clearml"

    def __init__(self) -> None:
        super().__init__()
        self._task: Any = None
        self._is_ours = True
        self._before: dict[str, int] | None = None

    def open(self, opening: TrackerContext) -> None:
        """Make the task, or go on with it."""
        task = load("clearml").Task
        found = task.current_task()
        self._is_ours = found is None
        if task.is_offline() and opening.run_id:
            self._before = _written(opening.run_id)
        self._task = found or task.init(
            project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
            task_name=os.environ.get("CLEARML_TASK") or opening.args.run_name or "Trainer",
            # 0: go on at our steps, not after its last one.
            reuse_last_task_id=opening.run_id or False,
            continue_last_task=0 if opening.run_id else False,
            auto_connect_frameworks={"tensorboard": False, "pytorch": False},
        )
        self.run_id = self._task.id
        said = {f"Transformers/{name}": value for name, value in opening.config().items()}
        self._task.set_parameters_as_dict(said)

    def known(self) -> Mapping[str, int] | None:
        """Return what an offline session has, or else what was handed over."""
        return super().known() if self._before is None else self._before

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Report scalars under the title before the ``/``, and what is said once as such."""
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if isinstance(value, str):
                logger.report_text(f"{step} {name}: {value}", print_console=False)
            elif series in SINGLE_VALUES:
                logger.report_single_value(series, value)
            else:
                logger.report_scalar(title, series, value=value, iteration=step)

    def finish(self, *, completed: bool) -> None:
        """Send the rest; a task that was cut off is stopped, not completed."""
        if not self._is_ours:
            return
        self._task.flush(wait_for_uploads=True)
        if not completed and not load("clearml").Task.is_offline():
            self._task.mark_stopped()
        self._task.close()


def _written(run_id: str) -> dict[str, int]:
    """Return the last step of each metric that earlier lives wrote into an offline session."""
    config = load("clearml.config")
    return session_steps(Path(config.get_offline_dir(run_id)) / "metrics.jsonl")


def session_steps(file: Path) -> dict[str, int]:
    """Return the last step of each metric in a session's file, and cut off half a line at its end.

    A life that was killed while it wrote leaves one, and the next would write on in it.
    """
    if not file.exists():
        return {}
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with file.open("r+b") as opened:
            opened.truncate(len(whole))
    last: dict[str, int] = {}
    for line in whole.splitlines():
        for one in json.loads(line):
            name, step = f"{one['metric']}/{one['variant']}", int(one.get("iter", -1))
            last[name] = max(step, last.get(name, -1))
    return last
