"""For tools that cannot be asked what they have: a file beside the run that says what was sent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.train.trackers.tracker import Held, Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.tracker import Opening


class RememberingTracker(Tracker):
    """Says what the tool has from ``output_dir/trackers/<name>-<run id>.json``.

    Where that file is gone, the steps after the last checkpoint are sent again. Subclasses have
    ``open`` and ``draw`` in place of ``start`` and ``log``.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._file = Path()

    def open(self, opening: Opening) -> None:
        """Open the run or go on with it, and set ``run_id``."""
        raise NotImplementedError

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Hand the points over."""
        raise NotImplementedError

    def known(self) -> Mapping[str, int] | None:
        """Return the last step of each metric that the run has; None if nothing says it."""
        if not self._file.exists():
            return None
        steps: dict[str, int] = json.loads(self._file.read_text(encoding="utf-8"))
        return steps

    def start(self, opening: Opening) -> Held | None:
        """Open the run; what was sent into it is held."""
        self.open(opening)
        name = f"{self.name}-{self.run_id.replace('/', '_')}.json"
        self._file = Path(opening.args.output_dir) / "trackers" / name
        known = self.known() if self.run_id == opening.run_id else None
        if known is None:
            return None
        self._steps = dict(known)
        return Held(known)

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Hand the points over, then remember that."""
        self.draw(metrics, step)
        self._steps |= dict.fromkeys(metrics, step)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._steps), encoding="utf-8")
        os.replace(new, self._file)  # noqa: PTH105 - a kill leaves the old one or the new one
