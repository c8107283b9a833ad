"""Tracker base.

From logs to points: names as the field spells them, plain values, nothing twice (pure).

What a tracker is: the small interface between a run and a tool that draws it.

For tools that cannot be asked what they have: a file beside the run that says what was sent.
"""

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

# Said once for a run, not over its steps; tools that have a summary show them there.
SINGLE_VALUES = frozenset(
    {
        *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
        *("train_loss", "total_flos"),
    }
)


def rewritten(name: str) -> str:
    """Return ``eval/loss`` for ``eval_loss``, likewise ``test/...``; else ``train/loss``."""
    for kind in ("eval", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name.removeprefix(f'{kind}_')}"
    return f"train/{name}"


def points_of(logs: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, float | str]:
    """Return what can be drawn of one log entry: numbers and texts, by the tool's names.

    The step is the axis and no point of its own; lists and dicts are left out.
    """
    points: dict[str, float | str] = {}
    for name, value in logs.items():
        plain = _plain(value)
        if name != "step" and plain is not None:
            points[spell(name)] = plain
    return points


def _plain(value: Any) -> float | str | None:
    """Return a number, also of an array or tensor that holds one, or a text; else None."""
    if not isinstance(value, int | float | str) and getattr(value, "size", None) is not None:
        item = getattr(value, "item", None)
        count = getattr(value, "numel", lambda: getattr(value, "size", 0))()
        value = item() if item is not None and count == 1 else None
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float | str) else None


class StepFilter:
    """Passes each point of a run once.

    Args:
        held: what the tool has from lives before.
    """

    def __init__(self, held: LoggedSteps | None) -> None:
        self._held = held
        self._last: dict[str, tuple[int, float | str]] = {}

    def new(self, points: Mapping[str, float | str], step: int) -> dict[str, float | str]:
        """Return the points that are not drawn, and take them for drawn."""
        fresh = {
            name: value
            for name, value in points.items()
            if not (self._held is not None and self._held.has(name, step))
            and not _same(self._last.get(name), (step, value))
        }
        self._last |= {name: (step, value) for name, value in fresh.items()}
        return fresh


def _same(one: tuple[int, float | str] | None, other: tuple[int, float | str]) -> bool:
    """Say whether two points are one; a number that is none is equal to itself here."""
    if one is None or one[0] != other[0]:
        return False
    both_nan = all(isinstance(value, float) and math.isnan(value) for _, value in (one, other))
    return both_nan or one[1] == other[1]


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """What a tracker is told when it is opened.

    Attributes:
        args: the run's arguments; ``args.to_dict()`` is without secrets.
        run_id: the run to go on with; empty begins a new one.
        since: the first step whose points may come again.
        model: the model that is trained.
        trial_name: the trial of a search, if this is one.
        trial_params: its values, those of ``model_init`` among them.
    """

    args: TrainingArguments
    run_id: str = ""
    since: int = 0
    model: Any = None
    trial_name: str | None = None
    trial_params: Mapping[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        """Return the arguments, what the model's ``config`` says and what a trial is made of."""
        said = getattr(self.model, "config", None)
        as_dict = getattr(said, "to_dict", None)
        of_model = as_dict() if as_dict is not None else said if isinstance(said, dict) else {}
        return {**of_model, **(self.trial_params or {}), **self.args.to_dict()}


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """What the run in the tool has already, so that it is not drawn again.

    Attributes:
        steps: metric -> its last step there.
        floor: the last step that takes nothing any more, whatever the metric.
    """

    steps: Mapping[str, int] = field(default_factory=dict)
    floor: int = -1

    def has(self, name: str, step: int) -> bool:
        """Say whether a point is there."""
        return step <= max(self.floor, self.steps.get(name, -1))


class Tracker:
    """Draws the curves of one run in one tool. Subclass it for a tool of your own.

    All methods are called on rank zero, in one thread that belongs to this tracker alone; what
    they raise is told once and never reaches training.

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
    # What the checkpoint keeps, and gives back as `Opening.run_id`; set by `start` at the latest.
    run_id = ""

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Open the run, or go on with ``opening.run_id``.

        Returns:
            What the tool has already, if it cannot take anything back: that is not sent again.
            None, if it now shows nothing from ``opening.since`` on: all of that is sent again.
        """
        raise NotImplementedError

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Draw numbers, and show texts, of one step; return when they are out of our hands."""
        raise NotImplementedError

    def finish(self, *, completed: bool) -> None:
        """Let go of the run; ``completed`` says whether training ended by itself."""

    def wants_models(self) -> Literal["never", "end", "checkpoint"]:
        """Say when :meth:`log_model` is called: at the end, or for each committed checkpoint."""
        return "never"

    def log_model(self, model: SavedModel) -> None:
        """Upload a model from its folder, which is gone afterwards; return when it is handed over.

        What is uploaded is committed. A life that goes on after a kill may upload one again.
        """
        raise NotImplementedError

    def spell(self, name: str) -> str:
        """Return a metric's name as this tool spells it: ``eval_loss`` -> ``eval/loss``."""
        return rewritten(name)


def load(module: str) -> Any:
    """Import the client of a tool, whose types are its own affair."""
    return importlib.import_module(module)


def as_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON for people; what JSON cannot hold becomes text."""
    return json.dumps(dict(values), indent=2, default=str)


class LocalStateTracker(Tracker):
    """Says what the tool has from ``output_dir/trackers/<name>-<run id>.json``.

    Where that file is gone, the steps after the last checkpoint are sent again. Subclasses have
    ``open`` and ``draw`` in place of ``start`` and ``log``.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._file = Path()

    def open(self, opening: TrackerContext) -> None:
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

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Open the run; what was sent into it is held."""
        self.open(opening)
        name = f"{self.name}-{self.run_id.replace('/', '_')}.json"
        self._file = Path(opening.args.output_dir) / "trackers" / name
        known = self.known() if self.run_id == opening.run_id else None
        if known is None:
            return None
        self._steps = dict(known)
        return LoggedSteps(known)

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Hand the points over, then remember that."""
        self.draw(metrics, step)
        self._steps |= dict.fromkeys(metrics, step)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._steps), encoding="utf-8")
        os.replace(new, self._file)  # noqa: PTH105 - a kill leaves the old one or the new one
