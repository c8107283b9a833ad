"""ClearML tracker, which writes to a local folder if ``CLEARML_OFFLINE_MODE`` is set."""

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
    """Tracker for ClearML: one task per run, continued by its id.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` (else ``run_name``, else ``Trainer``) name the task. A
    task that the script opened is used and left open. Offline, all attempts of a run write to one
    session, which ``Task.import_offline_session`` uploads as one task. The steps of such a session
    come from its file, because ClearML writes points with a delay.
    """

    name = "clearml"

    def __init__(self) -> None:
        super().__init__()
        self._task: Any = None
        self._is_own_run = True
        self._before: dict[str, int] | None = None

    def open(self, opening: TrackerContext) -> None:
        """Create or continue the task."""
        task = load("clearml").Task
        current_task = task.current_task()
        self._is_own_run = current_task is None
        if task.is_offline() and opening.run_id:
            self._before = _written(opening.run_id)
        self._task = current_task or task.init(
            project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
            task_name=os.environ.get("CLEARML_TASK") or opening.args.run_name or "Trainer",
            # 0 keeps the step numbers as given. Otherwise ClearML would continue after its last
            # step.
            reuse_last_task_id=opening.run_id or False,
            continue_last_task=0 if opening.run_id else False,
            auto_connect_frameworks={"tensorboard": False, "pytorch": False},
        )
        self.run_id = self._task.id
        parameters = {f"Transformers/{name}": value for name, value in opening.config().items()}
        self._task.set_parameters_as_dict(parameters)

    def known(self) -> Mapping[str, int] | None:
        """Return the steps of the offline session, else the steps that were handed over."""
        return super().known() if self._before is None else self._before

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Report scalars by title (before the ``/``) and series, and report once-per-run values."""
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
        """Send the remaining points; an interrupted task is marked as stopped."""
        if not self._is_own_run:
            return
        self._task.flush(wait_for_uploads=True)
        if not completed and not load("clearml").Task.is_offline():
            self._task.mark_stopped()
        self._task.close()


def _written(run_id: str) -> dict[str, int]:
    """Return the last step of each metric that earlier attempts wrote to an offline session."""
    config = load("clearml.config")
    return session_steps(Path(config.get_offline_dir(run_id)) / "metrics.jsonl")


def session_steps(file: Path) -> dict[str, int]:
    """Return the last step of each metric in a session's file.

    An incomplete last line is cut off. An attempt that is killed during a write leaves such a line.
    The next attempt would otherwise append to this line.
    """
    if not file.exists():
        return {}
    content = file.read_bytes()
    complete_text = content[: content.rfind(b"\n") + 1]
    if len(complete_text) < len(content):
        with file.open("r+b") as log_file:
            log_file.truncate(len(complete_text))
    last_step_by_name: dict[str, int] = {}
    for line in complete_text.splitlines():
        for request in json.loads(line):
            name, step = f"{request['metric']}/{request['variant']}", int(request.get("iter", -1))
            last_step_by_name[name] = max(step, last_step_by_name.get(name, -1))
    return last_step_by_name
