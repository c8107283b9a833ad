"""Neptune: one run by an id of ours; with ``NEPTUNE_MODE=offline`` in a local folder."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import LocalStateTracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext

_NAMESPACE = "finetuning"


class Neptune(LocalStateTracker):
    """Logs below ``finetuning`` in ``NEPTUNE_PROJECT``; the run is the one with our custom id.

    What is written offline becomes a run for each life when it is synchronised: Neptune's files
    do not hold that id.
    """

    name = "neptune"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Open the run that has the id; Neptune makes it if there is none."""
        self.run_id = opening.run_id or uuid.uuid4().hex
        neptune = load("neptune")
        self._run = neptune.init_run(custom_run_id=self.run_id, name=opening.args.run_name)
        config = load("neptune.utils").stringify_unsupported(opening.config())
        self._run[f"{_NAMESPACE}/trainer_parameters"] = config
        if opening.trial_name:
            self._run[f"{_NAMESPACE}/trial"] = opening.trial_name

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Append to a series each; the epoch is one value, as Transformers has it."""
        for name, value in metrics.items():
            field = self._run[f"{_NAMESPACE}/{name}"]
            if name == "train/epoch":
                field.assign(value)
            else:
                field.append(value, step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - Neptune knows no other end
        """Send the rest."""
        self._run.stop()
