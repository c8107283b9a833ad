"""TrainerCallback, handler, state.

The states of callbacks: by torch's two methods, or by ``state`` as Transformers exports it.

Callbacks: the dozen events the field knows, called in the order given, and the built-in ones.

Order of events::

    on_init_end
    on_train_begin
      on_epoch_begin
        on_step_begin  (on_substep_end)*  on_pre_optimizer_step  on_optimizer_step  on_step_end
          on_log   (on_prediction_step)* on_log on_evaluate   on_save
      on_epoch_end
    on_train_end

The states of callbacks as ``trainer_state.json`` shows them to people and to other trainers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from resilient.errors import ConfigError
from resilient.train.arguments.derived import is_planned
from resilient.train.state import TrainerControl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.state import TrainerState


def has_state(callback: Any) -> bool:
    """Say whether a callback has a state that is saved and given back."""
    by_torch = hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
    return by_torch or exports_state(callback)


def exports_state(callback: Any) -> bool:
    """Say whether it has a state of Transformers' kind (``ExportableState``) and no other."""
    if hasattr(callback, "state_dict"):
        return False
    return all(callable(getattr(type(callback), name, None)) for name in ("state", "from_state"))


def state_of(callback: Any) -> dict[str, Any]:
    """Return what is saved of a callback; of an exported state its ``attributes``.

    What it was made with (``args``) is the script's, which may have changed it.
    """
    state = callback.state()["attributes"] if exports_state(callback) else callback.state_dict()
    return dict(state)


def give_back(callback: Any, state: Mapping[str, Any]) -> None:
    """Restore a callback's state."""
    if not exports_state(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_prediction_step",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
)


# What every event is told, None as long as there is none.
CONTEXT = (
    *("model", "processing_class", "optimizer", "lr_scheduler"),
    *("train_dataloader", "eval_dataloader"),
)


# States that come and go with arguments, which a resume reports by itself.
_OWN_STATES = ("TrainerControl", "ReportTo")


class TrainerCallback:
    """Hears what the trainer does; may set flags of ``control``.

    Every method takes ``(args, state, control, **kwargs)``; kwargs hold ``model``,
    ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader`` and
    ``eval_dataloader`` (None before there is one), ``logs`` or ``metrics`` where there are any,
    and ``emit``, which tells an event. A callback with ``state_dict`` and ``load_state_dict`` is
    saved and restored; so are the ``attributes`` of one with ``state`` and ``from_state``
    (Transformers' ``ExportableState``). One with ``close`` is closed when ``train`` is left.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that the trainer was made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that training begins, after the state was restored."""

    def on_train_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that training ended."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that an epoch begins, or goes on after a resume."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that an epoch ended."""

    def on_step_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that an optimizer step begins."""

    def on_substep_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that a micro-batch ended that does not end its step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that gradients are clipped and about to be used."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that the optimizer stepped and gradients are about to be dropped."""

    def on_step_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that an optimizer step ended."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that a batch of evaluation ended."""

    def on_evaluate(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear the ``metrics`` of an evaluation."""

    def on_predict(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear the ``metrics`` of a prediction."""

    def on_save(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear that a checkpoint was captured; it becomes durable in the background."""

    def on_log(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Hear the ``logs`` that were added to the history."""


def require_list(callbacks: Any) -> list[Any]:
    """Return the callbacks that a trainer is given.

    Raises:
        ConfigError: they are no list, as when one is given alone.
    """
    if callbacks is None or isinstance(callbacks, Iterable):
        return list(callbacks or ())
    raise ConfigError(
        f"`callbacks` is no list, but of type `{type(callbacks).__name__}`: write callbacks=[...]"
    )


def _made(callback: Any) -> Any:
    """Return a callback, made if its class was given.

    Raises:
        ConfigError: it hears no event.
    """
    made = callback() if isinstance(callback, type) else callback
    if isinstance(made, TrainerCallback) or any(hasattr(made, event) for event in EVENTS):
        return made
    raise ConfigError(
        f"`callbacks` holds a `{type(made).__name__}`, which has none of the methods that events "
        "call: derive it from TrainerCallback"
    )


class CallbackHandler:
    """Calls callbacks in the order given, and only those that listen to an event.

    Args:
        callbacks: instances, or classes to make one of.
        args: passed to every callback.
        state: passed to every callback.
        control: passed to every callback; one that is returned instead is copied into it.

    Attributes:
        gone: callbacks that a checkpoint has a state of, and that are not here, by name.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]],
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        self.callbacks: list[Any] = []
        for one in callbacks:
            self._append(_made(one))
        self.control = control
        self.context: dict[str, Any] = dict.fromkeys(CONTEXT)
        self.gone: tuple[str, ...] = ()
        self._first = (args, state, control)
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self._find_listeners()

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Call one more, after the others.

        Raises:
            ConfigError: it hears no event.
        """
        self._append(_made(callback))
        self._find_listeners()

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one a line."""
        return "\n".join(type(one).__name__ for one in self.callbacks)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return the given one, or the first of the given class; None if missing."""
        for one in self.callbacks:
            if one is callback or (isinstance(callback, type) and isinstance(one, callback)):
                self.callbacks.remove(one)
                self._find_listeners()
                return one
        return None

    def fire(self, event: str, **more: Any) -> None:
        """Tell an event to everyone who listens."""
        for listener in self._listeners[event]:
            returned = listener(*self._first, **self.context, **more)
            if isinstance(returned, TrainerControl) and returned is not self.control:
                self.control.load_state_dict(vars(returned))

    def close(self) -> None:
        """Call the ``close`` of those that have one: ``train`` is left, in whatever way."""
        for one in self.callbacks:
            close = getattr(one, "close", None)
            if close is not None:
                close()

    def state_dict(self) -> dict[str, Any]:
        """Return the control flags and the state of every callback that has one, by name."""
        states = {name: state_of(one) for name, one in self.stateful().items()}
        return {"TrainerControl": self.control.state_dict(), **states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what is there, and remember whose states no callback takes.

        A callback that was added since keeps its own state.
        """
        self.control.load_state_dict(state_dict.get("TrainerControl", {}))
        stateful = self.stateful()
        for name, one in stateful.items():
            if name in state_dict:
                give_back(one, state_dict[name])
        self.gone = tuple(sorted(set(state_dict) - {*stateful, *_OWN_STATES}))

    def _append(self, callback: Any) -> None:
        name = type(callback).__name__
        if any(type(one) is type(callback) for one in self.callbacks):
            warnings.warn(
                f"the trainer has two callbacks of the class `{name}`: each hears every event",
                UserWarning,
                stacklevel=2,
            )
        self.callbacks.append(callback)

    def _find_listeners(self) -> None:
        self._listeners = {
            event: [getattr(one, event) for one in self.callbacks if _listens(one, event)]
            for event in EVENTS
        }

    def stateful(self) -> dict[str, Any]:
        """Name callbacks by class; the second of a class is ``Name_2``."""
        named: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for one in self.callbacks:
            if not has_state(one):
                continue
            name = type(one).__name__
            seen[name] = seen.get(name, 0) + 1
            named[name if seen[name] == 1 else f"{name}_{seen[name]}"] = one
        return named


def _listens(callback: Any, event: str) -> bool:
    """Say whether ``event`` was overridden; the empty ones of the base cost no call."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(
        TrainerCallback, event
    )


class DefaultFlowCallback(TrainerCallback):
    """Asks for logs, evaluations and checkpoints at the steps and epochs of the arguments."""

    def on_step_end(self, args: Any, state: Any, control: Any, /, **_: Any) -> None:
        """Ask what is due at this step; the last step evaluates and saves too."""
        step = state.global_step
        last = step >= state.max_steps
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        if (
            args.eval_strategy == "steps"
            and (last or step % state.eval_steps == 0)
            and step >= args.eval_delay
        ):
            control.should_evaluate = True
        is_due = last or (step % state.save_steps == 0 and not is_planned(args))
        if args.save_strategy == "steps" and is_due:
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, /, **_: Any) -> None:
        """Ask what is due at the end of an epoch."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


class EarlyStoppingCallback(TrainerCallback):
    """Stops training when the metric of the best model has not improved for a while.

    Its counter is saved, so a resumed run stops where an unbroken one would.

    Args:
        early_stopping_patience: evaluations without improvement that end training.
        early_stopping_threshold: how much better counts as improved.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0
    ) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Check that there is a metric to watch, and count from 0 in a run that begins.

        Raises:
            ConfigError: there is none, or nothing is evaluated.
        """
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ConfigError(
                "EarlyStoppingCallback needs `metric_for_best_model` and an `eval_strategy`"
            )
        if state.best_metric is None and not state.global_step:
            self.early_stopping_patience_counter = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
        """Compare with the best so far, which does not know this evaluation yet."""
        name = args.metric_for_best_model.removeprefix("eval_")
        value = kwargs["metrics"].get(f"eval_{name}")
        if value is None:
            return
        gain = 0.0 if state.best_metric is None else value - state.best_metric
        gain = gain if args.greater_is_better else -gain
        if state.best_metric is None or gain > max(self.early_stopping_threshold, 0.0):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, dict[str, Any]]:
        """Return arguments and attributes, as Transformers exports them."""
        made_with = {
            "early_stopping_patience": self.early_stopping_patience,
            "early_stopping_threshold": self.early_stopping_threshold,
        }
        return {"args": made_with, "attributes": self.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EarlyStoppingCallback:
        """Return a callback with the arguments and attributes that ``state`` returned."""
        made = cls(**state["args"])
        made.load_state_dict(state["attributes"])
        return made

    def state_dict(self) -> dict[str, int]:
        """Return the counter; patience and threshold are the script's."""
        return {"early_stopping_patience_counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the counter."""
        self.early_stopping_patience_counter = state_dict["early_stopping_patience_counter"]


def shown_states(handler: CallbackHandler) -> dict[str, Any]:
    """Return how each stateful callback was made and what it holds, by name; plain values only.

    They are shown and not read back: what is restored is a part of the checkpoint, tensors and all.
    """
    shown = {name: _shown(one) for name, one in handler.stateful().items()}
    return {**shown, "TrainerControl": {"args": handler.control.state_dict(), "attributes": {}}}


def _shown(callback: Any) -> dict[str, Any]:
    if exports_state(callback):
        return {name: _plain(one) for name, one in callback.state().items()}
    made = {
        name: getattr(callback, name)
        for name in _names_of(cast("Any", type(callback)))
        if hasattr(callback, name)
    }
    return {"args": _plain(made), "attributes": _plain(callback.state_dict())}


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """Return what a callback of this class is made with."""
    return tuple(inspect.signature(kind.__init__).parameters)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = bool | int | float | str | None
    return {name: one for name, one in values.items() if isinstance(one, kinds)}
