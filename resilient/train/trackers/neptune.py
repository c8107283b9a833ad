"""Neptune tracker, which writes to a local folder if ``NEPTUNE_MODE=offline`` is set."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import LocalStateTracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext

_NAMESPACE = "finetuning"


class Neptune(LocalStateTracker):
    """Tracker for Neptune: one run, identified by a custom id that the tracker chooses.

    Points go below ``finetuning`` in ``NEPTUNE_PROJECT``. Neptune's offline files do not contain
    the custom id. Synchronisation of offline data therefore creates a separate run for each
    attempt.
    """

    name = "neptune"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Open the run with the id; Neptune creates a missing run."""
        self.run_id = opening.run_id or uuid.uuid4().hex
        neptune = load("neptune")
        self._run = neptune.init_run(custom_run_id=self.run_id, name=opening.args.run_name)
        config = load("neptune.utils").stringify_unsupported(opening.config())
        self._run[f"{_NAMESPACE}/trainer_parameters"] = config
        if opening.trial_name:
            self._run[f"{_NAMESPACE}/trial"] = opening.trial_name

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Append each point to its series; the epoch is a single value, as in Transformers."""
        for name, value in metrics.items():
            field = self._run[f"{_NAMESPACE}/{name}"]
            if name == "train/epoch":
                field.assign(value)
            else:
                field.append(value, step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - Neptune knows no other end
        """Send the remaining points."""
        self._run.stop()
