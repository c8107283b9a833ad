"""Comet tracker, which writes archives instead of uploading if ``COMET_START_ONLINE=0`` is set."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import LocalStateTracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext


class Comet(LocalStateTracker):
    """Tracker for Comet: one experiment per run, with a key that the tracker chooses.

    ``COMET_PROJECT_NAME``, ``COMET_MODE`` and ``COMET_EXPERIMENT_KEY`` apply.
    """

    name = "comet_ml"

    def __init__(self) -> None:
        super().__init__()
        self._experiment: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Start or continue the experiment with the key."""
        comet = load("comet_ml")
        experiment_key = (
            opening.run_id or os.environ.get("COMET_EXPERIMENT_KEY") or uuid.uuid4().hex
        )
        self._experiment = comet.start(
            experiment_key=experiment_key,
            mode=os.environ.get("COMET_MODE") or None,
            experiment_config=comet.ExperimentConfig(name=opening.args.run_name),
        )
        self.run_id = self._experiment.get_key()
        self._experiment.log_parameters(opening.config(), nested_support=True)

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Log numbers as metrics and texts as texts."""
        numbers = {name: metric for name, metric in metrics.items() if not isinstance(metric, str)}
        self._experiment.log_metrics(numbers, step=step)
        for name in metrics.keys() - numbers.keys():
            self._experiment.log_text(f"{name}: {metrics[name]}", step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - a resumed run always appends
        """Send the remaining points, or write the archive."""
        self._experiment.end()
