"""Save and resume of Hugging Face's Trainer.

::

    trainer = Trainer(model, args, train_dataset=...)
    trainer.add_callback(ResilientCallback(trainer, "runs/mine"))
    trainer.train()                       # resumes if a checkpoint exists

With ``resilient train --adapter transformers`` a script stays unchanged: each trainer adds the
callback by itself.

The trainer decides when to save (``save_strategy``, ``save_steps``, ``save_total_limit``,
``load_best_model_at_end``). The repository ``runs/mine`` replaces the checkpoints that the trainer
would write to ``output_dir`` with pickle. At a resume, the position of the training loop must be
set before the first event of a callback. The callback therefore replaces the trainer's methods that
write and read checkpoints.
"""

from __future__ import annotations

import dataclasses
import os
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import compare_trainer_and_checkpoint_args

from resilient.checkpointer import Checkpointer
from resilient.distributed.launch_env import read_launch
from resilient.errors import ConfigError
from resilient.format.keys import CheckpointId, parse_checkpoint
from resilient.integrations.events import AdapterAdded, EarlyStopKept, StateNotKept
from resilient.integrations.random_state import DeferredRandomState, RandomSnapshot, StateField
from resilient.start_guard import STOCK_TRAINER, StartGuard
from resilient.state_dict.snapshot import Part
from resilient.state_dict.statefuls import plain_log, plain_numbers
from resilient.storage.open import local_path
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Trainer

    from resilient.distributed.heartbeat import LoopHeartbeat

_STOOD_IN_FOR = (
    "train",
    "_init_training_state",
    "_prepare_for_training",
    "_evaluate",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_load_rng_state",
    "_save_checkpoint",
    "_load_best_model",
)
_MARK = "the repository"


class ResilientCallback(TrainerCallback):
    """A callback that saves a Trainer to a repository and resumes its newest checkpoint.

    A checkpoint contains the model, optimizer, scheduler, gradient scaler and random state. It also
    contains the trainer's state with its position in the data, stateful callbacks, and the sums for
    its log. Objects that were registered with the trainer's accelerator are saved too. A second
    ``train()`` of the same trainer continues from the end of the first.

    A resume restores the state of stateful callbacks even without
    ``restore_callback_states_from_checkpoint``. Callbacks keep the settings of the script. If an
    ``EarlyStoppingCallback`` stopped a run, a new start of this run trains no steps.

    Args:
        trainer: The trainer that gets this callback.
        url: URL or path of the repository; not ``output_dir``, where the trainer deletes files.
        options: Options of :class:`resilient.checkpointer.Checkpointer`. ``keep_last`` defaults to
            the trainer's ``save_total_limit``, unless ``keep_last``, ``save_total_limit`` or
            ``retention`` is given.

    Raises:
        ConfigError: This release of Transformers is unknown, the trainer uses DeepSpeed, or the
            repository is ``output_dir``.
    """

    def __init__(self, trainer: Trainer, url: str | os.PathLike[str], **options: Any) -> None:
        _check(trainer, os.fspath(url))
        _withdraw_automatic(trainer)
        self._trainer: Any = trainer
        # Number of the trainer that added this callback by itself; 0: the script added it.
        self._number = 0
        self._url = os.fspath(url)
        self._options = options
        self._rng = DeferredRandomState()
        self._best: CheckpointId | None = None
        self._resume_reference: Any = None
        self._saved_step = 0
        self._callbacks = _StatefulCallbacks(trainer)
        self._place = _DataPosition()
        self._stopped_by = ""
        self._is_in_step = self._is_save_due = False
        self._prepared_model: Any = None
        self._gathered_state: Mapping[str, Any] | None = None
        self._checkpointer: Checkpointer | None = None
        self._original_methods = {name: getattr(trainer, name) for name in _STOOD_IN_FOR}
        for name in _STOOD_IN_FOR:
            setattr(trainer, name, getattr(self, name.removeprefix("_")))

    def train(self, resume_from_checkpoint: Any = None, *rest: Any, **more: Any) -> Any:
        """Train from the newest checkpoint of the repository; False starts at step 0.

        Raises:
            NothingToResume: The argument is True and the repository has no checkpoint.
            StartOverRefused: There are only checkpoints of the stock trainer.
        """
        self._resume_reference = resume_from_checkpoint
        reference = None if resume_from_checkpoint is True else resume_from_checkpoint
        return self._original_methods["train"](reference, *rest, **more)

    def withdraw(self) -> None:
        """Give the trainer its own methods back, and remove this callback."""
        for name in _STOOD_IN_FOR:
            vars(self._trainer).pop(name, None)
        self._trainer.remove_callback(self)

    def init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        """Create and load all state; return the epoch and the number of batches to skip.

        Raises:
            ConfigError: The trainer has another resume path, or runs a hyperparameter search.
        """
        trainer = self._trainer
        if trial is not None:
            raise ConfigError(
                "a hyperparameter search trains several models, and a repository holds one run",
                hint="search without ResilientCallback, then train with it",
            )
        if resume is not None:
            raise ConfigError(
                f"cannot resume from `{resume}`: the repository `{self._url}` decides where to "
                "continue",
                hint="call train() without resume_from_checkpoint",
            )
        self._original_methods["_init_training_state"](max_steps, updates, epochs, None, trial)
        self._prepared_model = self._original_methods["_prepare_for_training"](
            max_steps, None, None
        )[0]
        self._checkpointer = Checkpointer(
            self._url, rng=False, **self._things(), **self._retention_options()
        )
        self._callbacks.begin()
        requires = self._resume_reference is True and read_launch(os.environ).cause == "start"
        # Trainers of one process may share the folder, with a repository for each trainer.
        places = (os.fspath(trainer.args.output_dir),) if self._number <= 1 else ()
        self._checkpointer.guard = StartGuard(STOCK_TRAINER, places, requires_checkpoint=requires)
        step = self._checkpointer.resume("never" if self._resume_reference is False else None)
        self._saved_step = step or 0
        self._report_settings()
        if step is None:
            return 0, 0
        compare: Any = compare_trainer_and_checkpoint_args
        compare(trainer.args, trainer.state)
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        self._restore_callbacks()
        epoch, batches = self._place.found(trainer, step, updates)
        return epoch, 0 if trainer.args.ignore_data_skip else batches

    def _report_settings(self) -> None:
        """Report the repository if the trainer added this callback, and settings without effect."""
        if self._checkpointer is None:
            return
        if self._number and self._trainer.is_world_process_zero():
            self._checkpointer.emit(AdapterAdded("transformers", self._url))
        if self._trainer.args.push_to_hub:
            reason = "push_to_hub uploads the model only at the end"
            self._checkpointer.emit(StateNotKept(("checkpoints on the hub",), reason))

    def _restore_callbacks(self) -> None:
        """Restore callbacks, and find the callback that had stopped the run early."""
        trainer, checkpointer = self._trainer, self._checkpointer
        had_stopped = self._callbacks.had_stopped(trainer.state)
        if trainer.args.restore_callback_states_from_checkpoint:
            trainer._load_callback_state()  # noqa: SLF001 - as the trainer does when it resumes
        else:
            missing_callbacks = self._callbacks.restore(trainer.state)
            if missing_callbacks and checkpointer is not None:
                checkpointer.emit(StateNotKept(missing_callbacks, "this run has no such callback"))
        self._stopped_by = _stopping_callback(trainer) if had_stopped else ""
        if self._stopped_by and checkpointer is not None:
            checkpointer.emit(EarlyStopKept(self._stopped_by, trainer.state.global_step))

    def prepare_for_training(self, _max_steps: int, loader: Any, _resume: Any) -> tuple[Any, Any]:
        """Return the objects that were prepared before the load."""
        self._trainer.callback_handler.train_dataloader = loader
        return self._prepared_model, loader

    def run_epoch(self, **options: Any) -> None:
        """Train the rest of an epoch. After the last step or an early stop, do nothing."""
        trainer = self._trainer
        has_resumed = self._checkpointer is not None and self._checkpointer.resumed is not None
        is_first = has_resumed and options["epoch"] == options["epochs_trained"]
        trained_steps = options["steps_trained_in_current_epoch"] if is_first else 0
        is_trained = trained_steps >= options["steps_in_epoch"]
        is_done = trainer.state.global_step >= trainer.state.max_steps and not is_trained
        if is_done or self._stopped_by:
            trainer.control.should_training_stop = True
            return
        self._place.begin(options, is_resumed=trained_steps > 0)
        if is_trained:
            self._end_epoch(options)
            return
        self._original_methods["_run_epoch"](
            **{**options, "resume_from_checkpoint": _MARK if has_resumed else None}
        )

    def _end_epoch(self, state: Mapping[str, Any]) -> None:
        """Do the trainer's work at the end of an epoch, after a resume from its last step."""
        trainer = self._trainer
        self._rng.restore()
        handler = trainer.callback_handler
        trainer.control = handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        self.maybe_log_save_evaluate(
            trainer._tr_loss,  # noqa: SLF001 - its log's
            self._place.measured["grad_norm"],
            state["model"],
            state["trial"],
            state["epoch"],
            state["ignore_keys_for_eval"],
            state["start_time"],
            learning_rate=self._place.measured["learning_rate"],
        )

    def maybe_log_save_evaluate(
        self, loss: Any, grad_norm: Any, *rest: Any, learning_rate: Any = None
    ) -> None:
        """Log, evaluate and save; at the end of an epoch, log the values of its last step again."""
        self._place.measured = {"grad_norm": grad_norm, "learning_rate": learning_rate}
        self._original_methods["_maybe_log_save_evaluate"](
            loss, grad_norm, *rest, learning_rate=learning_rate
        )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Record that the next save comes after the end of the epoch."""
        self._place.is_ended = True

    def evaluate(
        self, trial: Any, ignored_keys: Any, *rest: Any, skip_scheduler: bool = False
    ) -> Any:
        """Evaluate; skip the evaluation before the first step after a resume."""
        has_resumed = self._checkpointer is not None and self._checkpointer.resumed is not None
        if skip_scheduler and has_resumed:
            return None
        return self._original_methods["_evaluate"](
            trial, ignored_keys, *rest, skip_scheduler=skip_scheduler
        )

    def load_rng_state(self, _checkpoint: str | None) -> None:
        """Restore random state. The trainer calls this method after it has skipped batches."""
        self._rng.restore()

    def save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002 - the trainer's
        """Save this step to the repository once, at the end of the step."""
        trainer, checkpointer = self._trainer, self._checkpointer
        state = trainer.state
        if self._is_in_step:
            # Another callback may save within a step, but a checkpoint does not contain gradients.
            self._is_save_due = True
            return
        if checkpointer is None or state.global_step == self._saved_step:
            return
        trainer.store_flos()
        self._callbacks.export(state)
        self._place.note(trainer)
        if state.best_global_step == state.global_step:
            # Set the name before the save, because a resumed run must know its best checkpoint.
            self._best = CheckpointId(checkpointer.generation, state.global_step)
            state.best_model_checkpoint = str(self._best)
        keep = [self._best] if self._best else []
        checkpointer.save(state.global_step, metrics=_measured(state), keep=keep)
        self._saved_step = state.global_step

    def load_best_model(self) -> None:
        """Load the weights of the best model from its checkpoint."""
        if self._best is not None and self._checkpointer is not None:
            self._checkpointer.load(self._best, "model")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Restore the sums for the trainer's log, if more steps follow."""
        if self._gathered_state is not None and state.global_step < state.max_steps:
            trainer, gathered_state = self._trainer, self._gathered_state
            trainer._tr_loss = gathered_state["loss"].to(trainer.args.device)  # noqa: SLF001 - its log's
            trainer._globalstep_last_logged = gathered_state["logged"]  # noqa: SLF001 - its log's

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Refuse a log entry that no checkpoint can store, before the next save.

        Raises:
            UnsavableState: A value is neither a number nor text, nor a dict or list of them.
        """
        if state.log_history:
            state.log_history[-1] = plain_log(state.log_history[-1])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Send a heartbeat at the start of a step, when its batches are loaded."""
        self._is_in_step = True
        if self._beat is not None:
            self._beat.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Send a heartbeat at the end of a step, even if the optimizer skipped the step."""
        control.should_save = control.should_save or self._is_save_due
        self._is_in_step = self._is_save_due = False
        if self._beat is not None:
            self._beat.between()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Send a heartbeat for the progress of an evaluation."""
        if self._beat is not None:
            self._beat.between()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Wait until all saves are durable."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    @property
    def _beat(self) -> LoopHeartbeat | None:
        return self._checkpointer.beat if self._checkpointer is not None else None

    def _things(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "model": trainer.model_wrapped,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            **({"scaler": scaler} if scaler is not None else {}),
            **_registered(trainer.accelerator),
            "callbacks": Part(self._callbacks, optional=True),
            "place": Part(self._place, "rank", optional=True),
            "trainer_state": Part(
                StateField(self._state, self._put_state), document="trainer_state.json"
            ),
            "best": Part(StateField(lambda: {"checkpoint": str(self._best or "")}, self._put_best)),
            "log": Part(StateField(self._log, self._put_log), "rank"),
            "rng_state": Part(self._rng, "rank"),
        }

    def _retention_options(self) -> dict[str, Any]:
        """Return the options, with the trainer's own limit on the number of checkpoints."""
        limit = self._trainer.args.save_total_limit
        applies_limit = limit and not {"keep_last", "retention", "save_total_limit"} & set(
            self._options
        )
        return {**self._options, **({"keep_last": limit} if applies_limit else {})}

    def _state(self) -> dict[str, Any]:
        state = dataclasses.asdict(self._trainer.state)
        history = [plain_log(entry) for entry in state["log_history"]]
        return {**plain_numbers(state), "log_history": history, "best_model_checkpoint": None}

    def _put_state(self, state: Mapping[str, Any]) -> None:
        self._trainer.state = TrainerState(**state)

    def _put_best(self, state: Mapping[str, Any]) -> None:
        self._best = parse_checkpoint(state["checkpoint"])
        self._trainer.state.best_model_checkpoint = state["checkpoint"] or None

    def _log(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"loss": trainer._tr_loss.clone(), "logged": trainer._globalstep_last_logged}  # noqa: SLF001 - its log's

    def _put_log(self, state: Mapping[str, Any]) -> None:
        # Keep the sums until training begins, because the trainer resets its log again.
        self._gathered_state = state


# Attribute of a trainer that added the callback by itself.
_AUTOMATIC = "_resilient_callback"


def add_to_every_trainer(kind: Any) -> None:
    """Make each new trainer add the callback by itself (``resilient train --adapter``).

    The repository is that of ``--repo``, else ``checkpoints`` in the trainer's ``output_dir``. The
    n-th trainer of a process appends ``-trainer-<n>``. A trainer to which the script adds a
    callback of its own keeps only the script's callback.

    Args:
        kind: Class ``Trainer`` of Transformers.
    """
    original, numbers = kind.__init__, count(1)

    @wraps(original)
    def init(trainer: Any, *values: Any, **options: Any) -> None:
        original(trainer, *values, **options)
        number = next(numbers)
        url = read_launch(os.environ).repo or f"{trainer.args.output_dir}/checkpoints"
        if number > 1:
            url = f"{url.rstrip('/')}-trainer-{number}"
        callback = ResilientCallback(trainer, url)
        callback._number = number  # noqa: SLF001 - of this module
        setattr(trainer, _AUTOMATIC, callback)
        trainer.add_callback(callback)

    kind.__init__ = init


def _withdraw_automatic(trainer: Any) -> None:
    """Remove the callback that a trainer added by itself, because the script adds another."""
    automatic = vars(trainer).pop(_AUTOMATIC, None)
    if automatic is not None:
        automatic.withdraw()


def _check(trainer: Any, url: str) -> None:
    missing_methods = [name for name in _STOOD_IN_FOR if not hasattr(trainer, name)]
    if missing_methods:
        raise ConfigError(
            f"this release of Transformers has no Trainer.{missing_methods[0]}",
            hint="the adapter is tested with transformers 5.23",
        )
    if trainer.is_deepspeed_enabled:
        raise ConfigError(
            "a Trainer with DeepSpeed keeps its state where this library cannot read it"
        )
    place = local_path(url).resolve() if protocol_of(url) == "file" else None
    if place == local_path(trainer.args.output_dir).resolve():
        raise ConfigError(
            f"`{url}` is the trainer's output_dir, where the trainer may delete checkpoints",
            hint="give the repository its own folder",
        )


class _StatefulCallbacks:
    """States of a trainer's stateful callbacks, and their initial settings.

    A callback exports settings and state together. Values that differ from the initial settings are
    state.

    Args:
        trainer: The trainer of the callbacks.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._settings: dict[str, list[Any]] = {}
        self._loaded_state: Mapping[str, Any] = {}

    def begin(self) -> None:
        """Record the settings from the script."""
        self._settings = {
            name: [callback.state().get("args", {}) for callback in callbacks]
            for name, callbacks in self._exportable().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of each callback when training began."""
        return {"settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the settings of the run that saved."""
        self._loaded_state = state["settings"]

    def export(self, state: TrainerState) -> None:
        """Write the states of callbacks into the trainer's state, as the trainer does."""
        exported: dict[str, Any] = {
            name: [callback.state() for callback in callbacks]
            for name, callbacks in self._exportable().items()
        }
        exporting: Any = state
        exporting.stateful_callbacks = {
            name: callbacks if len(callbacks) > 1 else callbacks[0]
            for name, callbacks in exported.items()
        }

    @staticmethod
    def had_stopped(state: TrainerState) -> bool:
        """Return whether the saved loop had a stop request."""
        saved: Any = state.stateful_callbacks
        control = saved.get("TrainerControl", {})
        return bool(control.get("args", {}).get("should_training_stop"))

    def restore(self, state: TrainerState) -> tuple[str, ...]:
        """Restore callbacks in place, and return the names of callbacks that no longer exist.

        Flags of TrainerControl are valid for one event, except at the end of an epoch.
        """
        saved: Any = state.stateful_callbacks
        live = self._exportable()
        for name, callbacks in live.items():
            states = saved.get(name, [])
            states = states if isinstance(states, list) else [states]
            for at, (callback, exported) in enumerate(zip(callbacks, states, strict=False)):
                if callback is not self._trainer.control:
                    self._set(callback, exported, self._settings_of(name, at))
        return tuple(sorted(set(saved) - set(live)))

    def _set(self, callback: Any, exported: Mapping[str, Any], settings: Any) -> None:
        for name, value in exported.get("attributes", {}).items():
            setattr(callback, name, value)
        for name, value in exported.get("args", {}).items():
            if settings is not None and name in settings and settings[name] != value:
                setattr(callback, name, value)

    def _settings_of(self, name: str, at: int) -> Any:
        settings = self._loaded_state.get(name, [])
        return settings[at] if at < len(settings) else None

    def _exportable(self) -> dict[str, list[Any]]:
        """Return stateful callbacks by the names of their classes."""
        callbacks_by_name: dict[str, list[Any]] = {}
        for callback in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                callbacks_by_name.setdefault(type(callback).__name__, []).append(callback)
        return callbacks_by_name


class _DataPosition:
    """Position in the data, and the random state that determined the order of the epoch.

    Attributes:
        is_ended: Whether the callbacks got the event of the end of the epoch.
        measured: Gradient norm and learning rate of the last step.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self.measured: dict[str, Any] = {"grad_norm": None, "learning_rate": None}
        self._epoch = 0
        self._batches_per_epoch = 0
        self._at: dict[str, int] = {}
        self._drawn_from = RandomSnapshot()
        self._loaded_state: dict[str, int] = {}

    def begin(self, state: Mapping[str, Any], *, is_resumed: bool) -> None:
        """Record the random state of a new epoch, or restore the random state of a resumed epoch.

        Args:
            state: Arguments of the trainer's own ``_run_epoch``.
            is_resumed: Whether batches of this epoch were trained before.
        """
        self._epoch, self._batches_per_epoch = state["epoch"], state["steps_in_epoch"]
        self.is_ended = False
        loaders = [state["train_dataloader"]]
        if is_resumed and self._loaded_state:
            self._drawn_from.restore(loaders)
        else:
            self._drawn_from.note(loaders)

    def note(self, trainer: Any) -> None:
        """Record the progress of the epoch. A callback that ends an epoch early completes it."""
        batches_done = round((trainer.state.epoch - self._epoch) * self._batches_per_epoch)
        if trainer.control.should_epoch_stop:
            batches_done = self._batches_per_epoch
        self._at = {
            "step": trainer.state.global_step,
            "epoch": self._epoch + self.is_ended,
            "batches": 0 if self.is_ended else min(batches_done, self._batches_per_epoch),
            "batches_per_epoch": self._batches_per_epoch,
        }

    def found(self, trainer: Any, step: int, updates: int) -> tuple[int, int]:
        """Return the epoch and the number of batches that a resumed loop skips in it.

        Args:
            trainer: The trainer that resumes.
            step: The resumed step.
            updates: Optimizer steps per epoch.
        """
        at = self._loaded_state
        if at.get("step") != step:
            epoch, steps = divmod(step, updates)
            return epoch, steps * trainer.args.gradient_accumulation_steps
        if trainer.args.ignore_data_skip and at["batches"] == at["batches_per_epoch"]:
            return at["epoch"] + 1, 0
        return at["epoch"], at["batches"]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the random state at the beginning of the epoch."""
        return {
            "at": self._at,
            "drawn_from": self._drawn_from.state_dict(),
            "measured": self.measured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the position and the random state."""
        self._loaded_state, self.measured = state["at"], state["measured"]
        self._drawn_from.load_state_dict(state["drawn_from"])


def _stopping_callback(trainer: Any) -> str:
    """Return the name of the callback that is out of patience; empty without one."""
    for callback in trainer.callback_handler.callbacks:
        is_stopper = isinstance(callback, EarlyStoppingCallback)
        if (
            is_stopper
            and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        ):
            return type(callback).__name__
    return ""


def _registered(accelerator: Any) -> dict[str, Part]:
    """Return the objects that were registered for checkpointing, by name."""
    custom_objects = accelerator._custom_objects  # noqa: SLF001 - no public way
    return {
        f"registered_{number}" if number else "registered": Part(callback, optional=True)
        for number, callback in enumerate(custom_objects)
    }


def _measured(state: Any) -> dict[str, float]:
    """Return the numeric values that were logged for this step."""
    metrics: dict[str, float] = {}
    for entry in map(plain_log, state.log_history):
        if entry.get("step") == state.global_step:
            numbers = {k: v for k, v in entry.items() if isinstance(v, int | float)}
            metrics |= {name: float(number) for name, number in numbers.items() if name != "step"}
    return metrics
