"""What a tracker is: the small interface between a run and a tool that draws it."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from resilient.train.trackers.points import rewritten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.interop.shelf import SavedModel


@dataclass(frozen=True, slots=True)
class Opening:
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
class Held:
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

    def start(self, opening: Opening) -> Held | None:
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
