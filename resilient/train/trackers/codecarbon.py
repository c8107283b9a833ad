"""CodeCarbon tracker: measured emissions, as one row of ``emissions.csv`` per attempt."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import Tracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import LoggedSteps, TrackerContext


class CodeCarbon(Tracker):
    """Tracker that measures rank 0's machine and writes to ``output_dir/emissions.csv``.

    The rows of one run share an ``experiment_id``. Each row has the energy of one attempt,
    including repeated steps, so the sum of the rows is correct. ``CODECARBON_COUNTRY_ISO_CODE``
    sets the country; otherwise CodeCarbon asks a service.
    """

    name = "codecarbon"

    def __init__(self) -> None:
        self._tracker: Any = None

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Start the measurement."""
        codecarbon, args = load("codecarbon"), opening.args
        self.run_id = opening.run_id or str(uuid.uuid4())
        os.makedirs(args.output_dir, exist_ok=True)  # noqa: PTH103 - it may be any path
        country = os.environ.get("CODECARBON_COUNTRY_ISO_CODE")
        options = {
            "project_name": args.run_name or "codecarbon",
            "experiment_id": self.run_id,
            "output_dir": args.output_dir,
            "allow_multiple_runs": True,
        }
        if country:
            self._tracker = codecarbon.OfflineEmissionsTracker(country_iso_code=country, **options)
        else:
            self._tracker = codecarbon.EmissionsTracker(**options)
        self._tracker.start()
        return None

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Draw nothing: CodeCarbon measures by itself."""

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - the energy is spent either way
        """Write the row."""
        self._tracker.stop()
