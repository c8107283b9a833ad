"""Hugging Face's Trainer, saving and resuming through us.

::

    trainer = Trainer(model, args, train_dataset=...)
    trainer.add_callback(ResilientCallback(trainer, "runs/mine"))
    trainer.train()                       # starting is resuming

When and how often to save stays the trainer's business (``save_strategy``, ``save_steps``,
``save_total_limit``, ``load_best_model_at_end``). What it would write into ``output_dir`` with
pickle goes to the repository instead. No event of a callback is early enough to say where the loop
goes on, so the callback stands in for those methods of its trainer that write and read
checkpoints.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from resilient.adapters.held import Field, HeldRandomState
from resilient.errors import ConfigError
from resilient.format.names import CheckpointId, parse_checkpoint
from resilient.loop import Checkpointer
from resilient.start_guard import STOCK_TRAINER, StartGuard
from resilient.state.capture import Part
from resilient.state.numbers import plain_log, plain_value
from resilient.storage.open import local_path
from resilient.storage.urls import protocol_of
from resilient.world.launch import read_launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Trainer

    from resilient.world.beat import LoopBeat

_STOOD_IN_FOR = (
    "train",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
    "_save_checkpoint",
    "_load_best_model",
)
_MARK = "the repository"


class ResilientCallback(TrainerCallback):
    """Makes a Trainer save to a repository and go on from what is there.

    Saved are model, optimizer, scheduler, gradient scaler, the trainer's state with its position
    in the data, stateful callbacks, what it has accumulated for its log, and random state.
    A second ``train()`` of the same trainer goes on from the end of the first.

    Args:
        trainer: the trainer that this will be a callback of.
        url: the repository; not the trainer's ``output_dir``, where it sweeps by itself.
        options: those of :class:`resilient.loop.Checkpointer`; ``keep_last`` is the trainer's
            ``save_total_limit`` unless that, it or ``retention`` is given.

    Raises:
        ConfigError: this release of Transformers is not known, the trainer uses DeepSpeed, or the
            repository is ``output_dir``.
    """

    def __init__(self, trainer: Trainer, url: str | os.PathLike[str], **options: Any) -> None:
        _check(trainer, os.fspath(url))
        self._trainer: Any = trainer
        self._url = os.fspath(url)
        self._options = options
        self._rng = HeldRandomState()
        self._best: CheckpointId | None = None
        self._wanted: Any = None
        self._saved_step = 0
        self._prepared: Any = None
        self._gathered: Mapping[str, Any] | None = None
        self._checkpointer: Checkpointer | None = None
        self._theirs = {name: getattr(trainer, name) for name in _STOOD_IN_FOR}
        for name in _STOOD_IN_FOR:
            setattr(trainer, name, getattr(self, name.removeprefix("_")))

    def train(self, resume_from_checkpoint: Any = None, *rest: Any, **more: Any) -> Any:
        """Train from the newest checkpoint of the repository; False starts at step 0.

        Raises:
            NothingToResume: the argument is True and the repository holds no checkpoint.
            StartOverRefused: there are only checkpoints of the stock trainer.
        """
        self._wanted = resume_from_checkpoint
        wanted = None if resume_from_checkpoint is True else resume_from_checkpoint
        return self._theirs["train"](wanted, *rest, **more)

    def init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        """Make everything that has state, load it, and say where to go on: epoch and batches.

        Raises:
            ConfigError: the trainer was told to resume from elsewhere.
        """
        trainer = self._trainer
        if resume is not None:
            raise ConfigError(
                f"cannot resume from `{resume}`: the repository `{self._url}` says where to go on",
                hint="call train() without resume_from_checkpoint",
            )
        self._theirs["_init_training_state"](max_steps, updates, epochs, None, trial)
        self._prepared = self._theirs["_prepare_for_training"](max_steps, None, None)[0]
        self._checkpointer = Checkpointer(self._url, rng=False, **self._things(), **self._kept())
        requires = self._wanted is True and read_launch(os.environ).cause == "start"
        places = (os.fspath(trainer.args.output_dir),)
        self._checkpointer.guard = StartGuard(STOCK_TRAINER, places, requires_checkpoint=requires)
        step = self._checkpointer.resume("never" if self._wanted is False else None)
        self._saved_step = step or 0
        if step is None:
            return 0, 0
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        trainer._load_callback_state()  # noqa: SLF001 - as the trainer does when it resumes
        skipped = 0 if trainer.args.ignore_data_skip else step % updates
        return step // updates, skipped * trainer.args.gradient_accumulation_steps

    def prepare_for_training(self, _max_steps: int, loader: Any, _resume: Any) -> tuple[Any, Any]:
        """Return what was prepared before it was loaded."""
        self._trainer.callback_handler.train_dataloader = loader
        return self._prepared, loader

    def run_epoch(self, **how: Any) -> None:
        """Train an epoch, or what is left of it; nothing if the last step was trained already."""
        trainer = self._trainer
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return
        has_resumed = self._checkpointer is not None and self._checkpointer.resumed is not None
        self._theirs["_run_epoch"](
            **{**how, "resume_from_checkpoint": _MARK if has_resumed else None}
        )

    def load_rng_state(self, _checkpoint: str | None) -> None:
        """Put random state back; the trainer asks after it has skipped batches."""
        self._rng.restore()

    def save_checkpoint(self, _model: Any, _trial: Any) -> None:
        """Save this step to the repository, unless it is there."""
        trainer, checkpointer = self._trainer, self._checkpointer
        state = trainer.state
        if checkpointer is None or state.global_step == self._saved_step:
            return
        trainer.store_flos()
        _export_callbacks(trainer)
        if state.best_global_step == state.global_step:
            # Before it is saved: who goes on from here knows that this is the best.
            self._best = CheckpointId(checkpointer.generation, state.global_step)
            state.best_model_checkpoint = str(self._best)
        keep = [self._best] if self._best else []
        checkpointer.save(state.global_step, metrics=_measured(state), keep=keep)
        self._saved_step = state.global_step

    def load_best_model(self) -> None:
        """Load the weights of the best model that a checkpoint holds."""
        if self._best is not None and self._checkpointer is not None:
            self._checkpointer.load(self._best, "model")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Give the trainer back what it had accumulated for its log, if there is more to come."""
        if self._gathered is not None and state.global_step < state.max_steps:
            trainer, gathered = self._trainer, self._gathered
            trainer._tr_loss = gathered["loss"].to(trainer.args.device)  # noqa: SLF001 - its log's
            trainer._globalstep_last_logged = gathered["logged"]  # noqa: SLF001 - its log's

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Refuse a log that no checkpoint can hold, now and not at the next save.

        Raises:
            UnsavableState: a value is neither a number nor text, nor a dict or list of them.
        """
        if state.log_history:
            state.log_history[-1] = plain_log(state.log_history[-1])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Show that a step begins, with its batches loaded."""
        if self._beat is not None:
            self._beat.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Show that it is over, also where the optimizer left it out."""
        if self._beat is not None:
            self._beat.between()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Show that an evaluation gets on."""
        if self._beat is not None:
            self._beat.between()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the seam's
        """Wait until everything is durable."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    @property
    def _beat(self) -> LoopBeat | None:
        return self._checkpointer.beat if self._checkpointer is not None else None

    def _things(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "model": trainer.model_wrapped,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            **({"scaler": scaler} if scaler is not None else {}),
            "trainer_state": Part(
                Field(self._state, self._put_state), document="trainer_state.json"
            ),
            "best": Part(Field(lambda: {"checkpoint": str(self._best or "")}, self._put_best)),
            "log": Part(Field(self._log, self._put_log), "rank"),
            "rng_state": Part(self._rng, "rank"),
        }

    def _kept(self) -> dict[str, Any]:
        """Return the options, with the trainer's own wish for how many to keep."""
        limit = self._trainer.args.save_total_limit
        own = limit and not {"keep_last", "retention", "save_total_limit"} & set(self._options)
        return {**self._options, **({"keep_last": limit} if own else {})}

    def _state(self) -> dict[str, Any]:
        state = dataclasses.asdict(self._trainer.state)
        history = [plain_log(one) for one in state["log_history"]]
        plain = {"log_history": history, "best_metric": plain_value(state["best_metric"])}
        return {**state, **plain, "best_model_checkpoint": None}

    def _put_state(self, state: Mapping[str, Any]) -> None:
        self._trainer.state = TrainerState(**state)

    def _put_best(self, state: Mapping[str, Any]) -> None:
        self._best = parse_checkpoint(state["checkpoint"])
        self._trainer.state.best_model_checkpoint = state["checkpoint"] or None

    def _log(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"loss": trainer._tr_loss.clone(), "logged": trainer._globalstep_last_logged}  # noqa: SLF001 - its log's

    def _put_log(self, state: Mapping[str, Any]) -> None:
        # The trainer starts afresh once more before it begins: kept until then.
        self._gathered = state


def _check(trainer: Any, url: str) -> None:
    missing = [name for name in _STOOD_IN_FOR if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"this release of Transformers has no Trainer.{missing[0]}",
            hint="the adapter is tested with transformers 5.23",
        )
    if trainer.is_deepspeed_enabled:
        raise ConfigError("a Trainer with DeepSpeed keeps its state where this cannot take it")
    place = local_path(url).resolve() if protocol_of(url) == "file" else None
    if place == local_path(trainer.args.output_dir).resolve():
        raise ConfigError(
            f"`{url}` is the trainer's output_dir, where it may delete checkpoints by itself",
            hint="give the repository a folder of its own",
        )


def _export_callbacks(trainer: Any) -> None:
    """Write the state of callbacks into the trainer's, as it does before it saves."""
    states: dict[str, Any] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            name = type(one).__name__
            listed = isinstance(trainer.state.stateful_callbacks.get(name), list)
            if listed:
                states.setdefault(name, []).append(one.state())
            else:
                states[name] = one.state()
    trainer.state.stateful_callbacks.update(states)


def _measured(state: Any) -> dict[str, float]:
    """Return the numbers that were logged for this step."""
    found: dict[str, float] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            numbers = {k: v for k, v in entry.items() if isinstance(v, int | float)}
            found |= {name: float(one) for name, one in numbers.items() if name != "step"}
    return found
