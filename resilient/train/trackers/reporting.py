"""Reporting callback, one worker thread per tracker, and the choice of trackers by ``report_to``.

An exception in a tracker, or a slow tool, never affects training.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from resilient.environment import read_flag
from resilient.errors import ConfigError, KeyNotFound
from resilient.events import Event, Level
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trackers.base import StepFilter, TrackerContext, load, points_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.format.keys import CheckpointId
    from resilient.train.hf_interop.saved_models import SavedModels
    from resilient.train.trackers.base import Tracker

# Log entries are small. A tool that is this far behind will not catch up.
_INBOX = 10_000


@dataclass(frozen=True, slots=True)
class TrackerFailed(Event):
    """A tracker raised an exception or was too slow; reported once per attempt."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{tracker} lacks a part of this run: {reason}; training and checkpoints are not affected, "
        "and the next attempt sends the rest"
    )
    tracker: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelNotUploaded(Event):
    """A tracker did not accept a model; the next save tries again."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{tracker} did not accept a model: {reason}; training and checkpoints are not affected"
    )
    tracker: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrackerOpened(Event):
    """A tracker began or continued a run."""

    tracker: str
    run_id: str
    since: int

    def message(self) -> str:
        """Format the run and the first step whose points are sent."""
        step_text = f" from step {self.since}" if self.since else ""
        return f"{self.tracker} shows run {self.run_id}{step_text}"


class TrackerWorker:
    """Thread that sends log entries to one tracker, in their order.

    Args:
        tracker: Tracker; only this thread uses it.
        saved: :meth:`state_dict` of an earlier attempt.
        emit: Receiver of events.
        began: Folder of the checkpoint that this attempt resumed from; empty without one. A new
            tracker gets no older models.
    """

    def __init__(
        self,
        tracker: Tracker,
        saved: Mapping[str, Any],
        emit: Callable[[Event], None],
        began: str = "",
    ) -> None:
        self._tracker = tracker
        self._emit = emit
        self._inbox: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.Queue(_INBOX)
        self._curve = StepFilter(None)
        self._logged_step = int(saved.get("step", 0))
        self._run_id = str(saved.get("run_id", ""))
        self._uploaded_model = str(saved.get("model", began))
        self._is_open = False
        self._failure_lock = threading.Lock()
        self._start_event, self._finish_event = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        thread.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id in the tool, the last step that the tool has, and its last model.

        Before the first model, the last model is the checkpoint that the first attempt with this
        tracker resumed from. The next attempt sends the models that were committed since then.
        """
        run_id = self._tracker.run_id or self._run_id
        return {"run_id": run_id, "step": self._logged_step, "model": self._uploaded_model}

    def open(
        self, opening: TrackerContext, history: Sequence[Mapping[str, Any]], within_seconds: float
    ) -> None:
        """Open the run and send the missing part of ``history``; wait up to ``within_seconds``."""
        self._enqueue(self._start, opening, history)
        self._start_event.wait(within_seconds)

    def post(self, logs: Mapping[str, Any], step: int) -> None:
        """Send one log entry; return at once."""
        self._enqueue(self._send, dict(logs), step)

    @property
    def takes_models(self) -> bool:
        """True if the tool accepts models, which may be large."""
        return self._tracker.wants_models() != "never"

    def upload(self, saved_models: SavedModels, before: int) -> None:
        """Send the models that were committed since the last call; return at once.

        Args:
            saved_models: Committed models.
            before: Step that is being saved. The model of this step is sent at the next call, which
                may mark the model as final. The thread may process the call late; the rule still
                applies.
        """
        if self._tracker.wants_models() == "checkpoint":
            self._enqueue(self._upload, saved_models, before)

    def upload_final(self, saved_models: SavedModels, *, best: bool) -> None:
        """Send the remaining models, and mark the final model; return at once.

        Args:
            saved_models: Committed models; training is over and all of them are durable.
            best: Whether training ends with the best model.
        """
        if self.takes_models:
            self._enqueue(self._upload, saved_models, None, best)

    def close(self, within_seconds: float, *, completed: bool) -> None:
        """Wait until all entries are sent and the run is closed, at most ``within_seconds``."""
        self._enqueue(self._finish, completed)
        if not self._finish_event.wait(within_seconds):
            self._fail(f"it was not done {within_seconds:g} s after training")

    def _enqueue(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            self._inbox.put_nowait((action, arguments))
        except queue.Full:
            self._fail(f"it is {_INBOX} entries behind, and the newest are dropped")

    def _work(self) -> None:
        while not self._finish_event.is_set():
            action, arguments = self._inbox.get()
            try:
                action(*arguments)
            except Exception as error:  # noqa: BLE001 - no error of a tracker stops training
                reason = f"{type(error).__name__}: {error}"
                if action == self._upload:
                    self._emit(ModelNotUploaded(self._tracker.name, reason))
                else:
                    self._fail(reason)
            finally:
                if action == self._finish:
                    self._finish_event.set()
                self._start_event.set()

    def _start(self, opening: TrackerContext, history: Sequence[Mapping[str, Any]]) -> None:
        logged = self._tracker.start(opening)
        self._is_open = True
        self._curve = StepFilter(logged)
        self._emit(TrackerOpened(self._tracker.name, self._tracker.run_id, opening.since))
        for entry in history:
            step = int(entry.get("step", 0))
            if logged is not None or step >= opening.since:
                self._send(entry, step)

    def _send(self, logs: Mapping[str, Any], step: int) -> None:
        if not self._is_open:
            return
        points = self._curve.new(points_of(logs, self._tracker.spell), step)
        if points:
            self._tracker.log(points, step)
        if not self._failure_lock.locked():
            self._logged_step = max(self._logged_step, step)

    def _upload(
        self,
        saved_models: SavedModels,
        before: int | None,
        best: bool = False,  # noqa: FBT001, FBT002 - as in `_finish`
    ) -> None:
        """Send each model that still exists; retention may have deleted some meanwhile."""
        if not self._is_open:
            return
        final = saved_models.final(best=best) if before is None else None
        models = (
            saved_models.since(self._uploaded_model)
            if self._tracker.wants_models() == "checkpoint"
            else []
        )
        models = [item for item in models if before is None or item.step < before]
        if final is not None:
            models = [*(item for item in models if item != final), final]
        for checkpoint in models:
            self._upload_checkpoint(saved_models, checkpoint, is_final=checkpoint == final)

    def _upload_checkpoint(
        self, saved_models: SavedModels, checkpoint: CheckpointId, *, is_final: bool
    ) -> None:
        try:
            with saved_models.model_of(checkpoint, is_final=is_final) as model:
                self._tracker.log_model(model)
        except KeyNotFound:
            return
        self._uploaded_model = checkpoint.folder

    def _finish(self, completed: bool) -> None:  # noqa: FBT001 - the inbox passes it by position
        if self._is_open:
            self._tracker.finish(completed=completed)

    def _fail(self, reason: str) -> None:
        """Report the first failure; after it the tool may lack later steps."""
        if self._failure_lock.acquire(blocking=False):
            self._emit(TrackerFailed(self._tracker.name, reason))


# Time that training waits for all trackers together: at the start, at the end, and after an
# interruption.
_BEGIN_SECONDS, _END_SECONDS, _CUT_SECONDS = 15.0, 60.0, 3.0
# Time that training waits at the end if a tracker takes models, which are as large as
# checkpoints.
_UPLOAD_SECONDS = 1800.0


class Reporting(TrainerCallback):
    """Callback that reports to trackers from rank 0; other ranks only keep the state.

    Args:
        trackers: Trackers with different names.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers
        self._couriers: dict[str, TrackerWorker] = {}
        self._saved_states: dict[str, dict[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Continue the runs that the checkpoint names, or begin new ones."""
        self._end(_END_SECONDS, completed=False)
        self._open(args, state, kwargs)

    def on_log(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Send an entry of the log history."""
        self._post(kwargs["logs"], args, state, kwargs)

    def on_evaluate(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Send the metrics, including speeds, which the log history does not contain."""
        self._post(kwargs["metrics"], args, state, kwargs)

    on_predict = on_evaluate

    def on_save(self, _args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Send the models committed so far; the model of this save follows at the next save."""
        for worker in self._couriers.values():
            worker.upload(kwargs["saved_models"], state.global_step)

    def on_train_end(self, args: Any, _state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Wait until all entries and models are sent."""
        takes_models = any(worker.takes_models for worker in self._couriers.values())
        for courier in self._couriers.values():
            courier.upload_final(kwargs["saved_models"], best=args.load_best_model_at_end)
        self._end(_UPLOAD_SECONDS if takes_models else _END_SECONDS, completed=True)

    def close(self) -> None:
        """Send as much as possible within 3 s after an interruption of training."""
        self._end(_CUT_SECONDS, completed=False)

    def state_dict(self) -> dict[str, Any]:
        """Return each tracker's run and the last step that its tool has."""
        return {
            **self._saved_states,
            **{name: worker.state_dict() for name, worker in self._couriers.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the runs to continue."""
        self._end(_END_SECONDS, completed=False)
        self._saved_states = {name: dict(value) for name, value in state_dict.items()}

    def _post(
        self, logs: Mapping[str, Any], args: Any, state: Any, context: Mapping[str, Any]
    ) -> None:
        if not state.is_world_process_zero:
            return
        if not self._couriers:
            # An evaluation before or after training opens the trackers itself.
            self._open(args, state, context)
        for worker in self._couriers.values():
            worker.post(logs, state.global_step)

    def _open(self, args: Any, state: Any, context: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        history = state.history.copied()
        start_checkpoint = getattr(context.get("saved_models"), "resumed_from", None)
        began = start_checkpoint.folder if start_checkpoint is not None else ""
        for tracker in self._trackers:
            saved_state = self._saved_states.get(tracker.name, {})
            worker = TrackerWorker(tracker, saved_state, context["emit"], began)
            opening = TrackerContext(
                args,
                str(saved_state.get("run_id", "")),
                int(saved_state.get("step", 0)),
                context.get("model"),
                state.trial_name,
                state.trial_params,
            )
            self._couriers[tracker.name] = worker
            worker.open(opening, history, _BEGIN_SECONDS / len(self._trackers))

    def _end(self, within_seconds: float, *, completed: bool) -> None:
        for worker in self._couriers.values():
            worker.close(within_seconds / len(self._couriers), completed=completed)
        self._saved_states = self.state_dict()
        self._couriers = {}


class TrackerSpec(NamedTuple):
    """Module and class of a tracker, its packages (one of them is enough), and the pip name."""

    module: str
    kind: str
    packages: tuple[str, ...]
    pip: str


def _tracker_spec(module: str, kind: str, packages: str, pip: str = "") -> TrackerSpec:
    return TrackerSpec(module, kind, tuple(packages.split()), pip or packages)


CHOICES = {
    "clearml": _tracker_spec("resilient.train.trackers.other_tools", "ClearML", "clearml"),
    "codecarbon": _tracker_spec("resilient.train.trackers.other_tools", "CodeCarbon", "codecarbon"),
    "comet_ml": _tracker_spec("resilient.train.trackers.other_tools", "Comet", "comet_ml"),
    "mlflow": _tracker_spec("resilient.train.trackers.mlflow", "MLflow", "mlflow"),
    "neptune": _tracker_spec("resilient.train.trackers.other_tools", "Neptune", "neptune"),
    "tensorboard": _tracker_spec(
        "resilient.train.trackers.other_tools",
        "TensorBoard",
        "tensorboard tensorboardX",
        pip="tensorboard",
    ),
    "trackio": _tracker_spec("resilient.train.trackers.other_tools", "Trackio", "trackio"),
    "wandb": _tracker_spec("resilient.train.trackers.wandb", "WeightsAndBiases", "wandb"),
}


class ReportTo(Reporting):
    """Callback that reports to the trackers that ``report_to`` names.

    Args:
        names: Names from :data:`CHOICES`; ``all`` means every tracker whose package is installed.

    Raises:
        ConfigError: A tracker's package is not installed; the hint shows how to install it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        tracker_names = [name for name in CHOICES if _is_there(name)] if "all" in names else names
        trackers = (
            _make_tracker(name) for name in dict.fromkeys(tracker_names) if not _is_disabled(name)
        )
        super().__init__(*trackers)


def _is_there(name: str) -> bool:
    return any(importlib.util.find_spec(package) for package in CHOICES[name].packages)


def _is_disabled(name: str) -> bool:
    """Return whether the environment disables a tracker that the script names."""
    return read_flag(os.environ, f"DISABLE_{name.upper()}_INTEGRATION")


def _make_tracker(name: str) -> Tracker:
    if not _is_there(name):
        raise ConfigError(
            f"`report_to` names `{name}`, and its package is not installed",
            hint=f"pip install {CHOICES[name].pip}",
        )
    kind = getattr(load(CHOICES[name].module), CHOICES[name].kind)
    return cast("Tracker", kind())
