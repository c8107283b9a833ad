"""Tracker interface, conversion of log entries to points, and filters against repeated points."""

from __future__ import annotations

import importlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.hf_interop.saved_models import SavedModel

# These values have one point per run. Tools with a summary show them there.
SINGLE_VALUES = frozenset(
    {
        *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
        *("train_loss", "total_flos"),
    }
)


def rewritten(name: str) -> str:
    """Return ``eval/loss`` for ``eval_loss``, ``test/...`` for ``test_...``, else ``train/...``."""
    for kind in ("eval", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name.removeprefix(f'{kind}_')}"
    return f"train/{name}"


def points_of(logs: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, float | str]:
    """Return the numbers and texts of a log entry, under the names of the tool.

    The step is the x axis and therefore not a point. Lists and dicts are left out.
    """
    points: dict[str, float | str] = {}
    for name, value in logs.items():
        plain = _plain(value)
        if name != "step" and plain is not None:
            points[spell(name)] = plain
    return points


def _plain(value: Any) -> float | str | None:
    """Return a number, also from an array or tensor of one element, or a text; else None."""
    if not isinstance(value, int | float | str) and getattr(value, "size", None) is not None:
        item = getattr(value, "item", None)
        count = getattr(value, "numel", lambda: getattr(value, "size", 0))()
        value = item() if item is not None and count == 1 else None
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float | str) else None


class StepFilter:
    """Filter that passes each point of a run once.

    Args:
        logged: Points that the tool has from earlier attempts.
    """

    def __init__(self, logged: LoggedSteps | None) -> None:
        self._logged_step = logged
        self._last: dict[str, tuple[int, float | str]] = {}

    def new(self, points: Mapping[str, float | str], step: int) -> dict[str, float | str]:
        """Return the points that the tool does not have yet, and record them as sent."""
        new_points = {
            name: value
            for name, value in points.items()
            if not (self._logged_step is not None and self._logged_step.has(name, step))
            and not _same(self._last.get(name), (step, value))
        }
        self._last |= {name: (step, value) for name, value in new_points.items()}
        return new_points


def _same(left: tuple[int, float | str] | None, right: tuple[int, float | str]) -> bool:
    """Return whether two points are the same; NaN equals NaN here."""
    if left is None or left[0] != right[0]:
        return False
    both_nan = all(isinstance(value, float) and math.isnan(value) for _, value in (left, right))
    return both_nan or left[1] == right[1]


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """Facts about the run, passed to a tracker when it is opened.

    Attributes:
        args: Arguments of the run; ``args.to_dict()`` contains no secrets.
        run_id: Run to continue; empty begins a new run.
        since: First step whose points may be sent again.
        model: Model being trained.
        trial_name: Name of the trial in a search, or None.
        trial_params: Values of the trial, including those for ``model_init``.
    """

    args: TrainingArguments
    run_id: str = ""
    since: int = 0
    model: Any = None
    trial_name: str | None = None
    trial_params: Mapping[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        """Return the arguments, the model's ``config`` and the values of a trial."""
        model_config = getattr(self.model, "config", None)
        as_dict = getattr(model_config, "to_dict", None)
        of_model = (
            as_dict()
            if as_dict is not None
            else model_config
            if isinstance(model_config, dict)
            else {}
        )
        return {**of_model, **(self.trial_params or {}), **self.args.to_dict()}


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """Points that the run in the tool already has. These points are not sent again.

    Attributes:
        steps: Last step in the tool by name of the metric.
        floor: The tool accepts no points up to this step, for any metric.
    """

    steps: Mapping[str, int] = field(default_factory=dict)
    floor: int = -1

    def has(self, name: str, step: int) -> bool:
        """Return whether the tool has a point."""
        return step <= max(self.floor, self.steps.get(name, -1))


class Tracker:
    """Base class of trackers. A tracker draws the curves of one run in one tool.

    All methods are called on rank 0, in a thread that belongs to this tracker alone. The first
    exception is reported as an event. No exception reaches training.

    Example::

        class Lines(Tracker):
            name = "lines"

            def start(self, opening):
                self.run_id = opening.run_id or "1"
                return None

            def log(self, metrics, step):
                print(step, dict(metrics))

        Trainer(model, args, train_dataset=data, callbacks=[Reporting(Lines())])
    """

    name = "custom"
    # Saved in checkpoints and restored as `TrackerContext.run_id`. `start` must set it.
    run_id = ""

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Open the run, or continue ``opening.run_id``.

        Returns:
            Steps that the tool has, if the tool cannot remove points. These points are not sent
            again. None if the tool now shows no point from ``opening.since`` on; all these points
            are then sent again.
        """
        raise NotImplementedError

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Send the numbers and texts of one step; return when the tool has taken them over."""
        raise NotImplementedError

    def finish(self, *, completed: bool) -> None:
        """Close the run; ``completed`` is False if training was interrupted."""

    def wants_models(self) -> Literal["never", "end", "checkpoint"]:
        """Return when :meth:`log_model` is called: at the end, or for each committed checkpoint."""
        return "never"

    def log_model(self, model: SavedModel) -> None:
        """Upload a model from its folder; return when the tool has taken the model over.

        The folder is deleted afterwards. Only committed models are uploaded. After a
        kill, the next attempt may upload a model again.
        """
        raise NotImplementedError

    def spell(self, name: str) -> str:
        """Return the name of a metric in this tool: ``eval_loss`` -> ``eval/loss``."""
        return rewritten(name)


def load(module: str) -> Any:
    """Import a tool's client library by name, untyped."""
    return importlib.import_module(module)


def as_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON for readers; values without a JSON form become text."""
    return json.dumps(dict(values), indent=2, default=str)


class LocalStateTracker(Tracker):
    """Tracker for a tool that cannot report its points; a local file records the points sent.

    The file is ``output_dir/trackers/<name>-<run id>.json``. If the file is missing, the steps
    after the last checkpoint are sent again. Subclasses implement ``open`` and ``draw`` in place
    of ``start`` and ``log``.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._file = Path()

    def open(self, opening: TrackerContext) -> None:
        """Open or continue the run, and set ``run_id``."""
        raise NotImplementedError

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Hand the points over to the tool."""
        raise NotImplementedError

    def known(self) -> Mapping[str, int] | None:
        """Return the last step of each metric in the run; None if it is unknown."""
        if not self._file.exists():
            return None
        steps: dict[str, int] = json.loads(self._file.read_text(encoding="utf-8"))
        return steps

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Open the run and return the points that were already sent to it."""
        self.open(opening)
        name = f"{self.name}-{self.run_id.replace('/', '_')}.json"
        self._file = Path(opening.args.output_dir) / "trackers" / name
        saved_state = self.known() if self.run_id == opening.run_id else None
        if saved_state is None:
            return None
        self._steps = dict(saved_state)
        return LoggedSteps(saved_state)

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Hand the points over, then record their step in the file."""
        self.draw(metrics, step)
        self._steps |= dict.fromkeys(metrics, step)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = self._file.with_suffix(".new")
        temporary_path.write_text(json.dumps(self._steps), encoding="utf-8")
        os.replace(temporary_path, self._file)  # noqa: PTH105 - a kill leaves the old or the new file
