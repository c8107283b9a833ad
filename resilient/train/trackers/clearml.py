"""ClearML: one task by its id, continued; with ``CLEARML_OFFLINE_MODE`` in a local folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.points import SINGLE_VALUES
from resilient.train.trackers.sent import RememberingTracker
from resilient.train.trackers.tracker import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.tracker import Opening


class ClearML(RememberingTracker):
    """Reports to ``CLEARML_PROJECT`` and ``CLEARML_TASK`` (``run_name``, else ``Trainer``).

    A task that the script made is used and left open.
    """

    name = "clearml"

    def __init__(self) -> None:
        super().__init__()
        self._task: Any = None
        self._is_ours = True

    def open(self, opening: Opening) -> None:
        """Make the task, or go on with it."""
        task = load("clearml").Task
        found = task.current_task()
        self._is_ours = found is None
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
