"""Trackio tracker: a run in a local database or in a Space."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import LocalStateTracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext


class Trackio(LocalStateTracker):
    """Tracker for Trackio: one run, identified by its name.

    The name is ``run_name`` with random characters that make it unique. Points go to ``project``,
    in ``TRACKIO_DIR`` or in the Space ``trackio_space_id``.
    """

    name = "trackio"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Open the run with this name; Trackio creates a missing run."""
        args = opening.args
        self.run_id = opening.run_id or f"{args.run_name or 'run'}-{uuid.uuid4().hex[:8]}"
        self._run = load("trackio").init(
            project=args.project,
            name=self.run_id,
            resume="allow",
            space_id=args.trackio_space_id,
            bucket_id=args.trackio_bucket_id,
            private=args.hub_private_repo,
            config=opening.config(),
            embed=False,
        )

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Log one row."""
        self._run.log(dict(metrics), step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - Trackio can continue any run
        """Send the remaining points."""
        self._run.finish()
