"""Trainer callbacks: base class, handler, saved state, and default times of logs and saves.

For each event, the handler calls the callbacks in the order in which they were added. Order of
events::

    on_init_end
    on_train_begin
      on_epoch_begin
        on_step_begin  (on_substep_end)*  on_pre_optimizer_step  on_optimizer_step  on_step_end
          on_log   (on_prediction_step)* on_log on_evaluate   on_save
      on_epoch_end
    on_train_end

``on_push_begin`` comes before a push to the Hub. The state of a callback is saved if the callback
defines ``state_dict`` and ``load_state_dict``, or ``state`` and ``from_state`` as in Transformers.
``trainer_state.json`` also contains this state, for people and for other trainers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from resilient.errors import ConfigError
from resilient.state_dict.statefuls import plain_value
from resilient.train.arguments.derived import is_planned
from resilient.train.state import TrainerControl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.state import TrainerState


def has_state(callback: Any) -> bool:
    """Return whether a callback has a state to save and restore."""
    by_torch = hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
    return by_torch or exports_state(callback)


def exports_state(callback: Any) -> bool:
    """Return whether a callback has only the exportable state of Transformers."""
    if hasattr(callback, "state_dict"):
        return False
    return all(callable(getattr(type(callback), name, None)) for name in ("state", "from_state"))


def state_of(callback: Any) -> dict[str, Any]:
    """Return the state of a callback that is saved; for an exported state, its ``attributes``.

    The constructor arguments (``args``) are not saved, because the script may have changed them.
    """
    state = callback.state()["attributes"] if exports_state(callback) else callback.state_dict()
    return dict(state)


def restore_callback(callback: Any, state: Mapping[str, Any]) -> None:
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
    "on_push_begin",
)


# Passed with every event; None until the object exists.
CONTEXT = (
    *("model", "processing_class", "optimizer", "lr_scheduler"),
    *("train_dataloader", "eval_dataloader"),
)


# The arguments add and remove these states. A resume reports such arguments separately.
_OWN_STATES = ("TrainerControl", "ReportTo")


class TrainerCallback:
    """Receiver of the trainer's events. A callback may set flags of ``control``.

    Every method takes ``(args, state, control, **kwargs)``. The kwargs contain ``model``,
    ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader`` and
    ``eval_dataloader`` (None until the object exists). The kwargs also contain ``logs`` or
    ``metrics`` for events with such values, and the function ``emit``, which emits an event.

    A callback with ``state_dict`` and ``load_state_dict`` is saved and restored. If a callback has
    ``state`` and ``from_state`` (Transformers' ``ExportableState``), its ``attributes`` are saved
    and restored. If a callback has ``close``, it is closed when ``train`` ends.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of the trainer's construction."""

    def on_train_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the start of training, after the state was restored."""

    def on_train_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of training."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the start of an epoch, or its continuation after a resume."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of an epoch."""

    def on_step_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the start of an optimizer step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of a micro-batch that is not the last of its step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle clipped gradients, just before the optimizer uses these gradients."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of the optimizer's update, before gradients are freed."""

    def on_step_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of an optimizer step."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the end of an evaluation batch."""

    def on_evaluate(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the ``metrics`` of an evaluation."""

    def on_predict(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the ``metrics`` of a prediction."""

    def on_save(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle a captured checkpoint; it becomes durable in the background."""

    def on_log(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the ``logs`` that were added to the history."""

    def on_push_begin(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> Any:
        """Handle the start of ``push_to_hub``."""


def require_list(callbacks: Any) -> list[Any]:
    """Return a trainer's ``callbacks`` argument as a list.

    Raises:
        ConfigError: The value is not iterable, for example a single callback.
    """
    if callbacks is None or isinstance(callbacks, Iterable):
        return list(callbacks or ())
    raise ConfigError(
        f"`callbacks` is not a list, but of type `{type(callbacks).__name__}`: write "
        "callbacks=[...]"
    )


def _make_callback(callback: Any) -> Any:
    """Return a callback; a class is instantiated.

    Raises:
        ConfigError: The object handles no event.
    """
    instance = callback() if isinstance(callback, type) else callback
    if isinstance(instance, TrainerCallback) or any(hasattr(instance, event) for event in EVENTS):
        return instance
    raise ConfigError(
        f"`callbacks` holds a `{type(instance).__name__}`, which has none of the methods for "
        "events: derive it from TrainerCallback"
    )


class CallbackHandler:
    """Caller of callbacks, in the order given; only callbacks that override an event are called.

    Args:
        callbacks: Instances, or classes to instantiate.
        args: Passed to every callback.
        state: Passed to every callback.
        control: Passed to every callback; if a callback returns another control, its flags are
            copied into this one.

    Attributes:
        missing_names: Names of callbacks with a state in the checkpoint that are not present now.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]],
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self._append(_make_callback(callback))
        self.control = control
        self.context: dict[str, Any] = dict.fromkeys(CONTEXT)
        self.missing_names: tuple[str, ...] = ()
        self._first = (args, state, control)
        self._listeners: dict[str, list[Callable[..., Any]]] = {}
        self._find_listeners()

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback after the existing ones.

        Raises:
            ConfigError: The callback handles no event.
        """
        self._append(_make_callback(callback))
        self._find_listeners()

    @property
    def callback_list(self) -> str:
        """Class names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return a callback, given as an instance or a class; None if there is none."""
        for candidate in self.callbacks:
            if candidate is callback or (
                isinstance(callback, type) and isinstance(candidate, callback)
            ):
                self.callbacks.remove(candidate)
                self._find_listeners()
                return candidate
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, given as an instance or a class."""
        self.pop_callback(callback)

    def fire(self, event: str, **more: Any) -> None:
        """Call every listener of an event."""
        for listener in self._listeners[event]:
            returned = listener(*self._first, **self.context, **more)
            if isinstance(returned, TrainerControl) and returned is not self.control:
                self.control.load_state_dict(vars(returned))

    def call_event(
        self, event: str, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> TrainerControl:
        """Call every listener of an event, as scripts for Transformers do; return the control.

        The methods ``on_...`` of this class, such as ``on_evaluate``, call this method.

        Args:
            event: Name of the event, such as ``on_log``.
            args: Passed to the listeners.
            state: Passed to the listeners.
            control: Passed to the listeners. The flag that requested the event is cleared.
            **kwargs: ``metrics`` or ``logs`` of the event.
        """
        flag = _ANSWERED.get(event)
        if flag is not None:
            setattr(control, flag, False)
        for listener in self._listeners[event]:
            returned = listener(args, state, control, **self.context, **kwargs)
            if isinstance(returned, TrainerControl) and returned is not control:
                control.load_state_dict(vars(returned))
        return cast("TrainerControl", control)

    def close(self) -> None:
        """Call ``close`` of all callbacks that have it, whenever ``train`` ends."""
        for callback in self.callbacks:
            close = getattr(callback, "close", None)
            if close is not None:
                close()

    def state_dict(self) -> dict[str, Any]:
        """Return the control flags and the state of every stateful callback, by name."""
        states = {name: state_of(value) for name, value in self.stateful().items()}
        return {"TrainerControl": self.control.state_dict(), **states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of present callbacks, and record the names of missing callbacks.

        A callback that was added since the save keeps its own state.
        """
        self.control.load_state_dict(state_dict.get("TrainerControl", {}))
        stateful = self.stateful()
        for name, value in stateful.items():
            if name in state_dict:
                restore_callback(value, state_dict[name])
        self.missing_names = tuple(sorted(set(state_dict) - {*stateful, *_OWN_STATES}))

    def _append(self, callback: Any) -> None:
        name = type(callback).__name__
        if any(type(registered) is type(callback) for registered in self.callbacks):
            warnings.warn(
                f"the trainer has two callbacks of the class `{name}`: both receive every event",
                UserWarning,
                stacklevel=2,
            )
        self.callbacks.append(callback)

    def _find_listeners(self) -> None:
        self._listeners = {
            event: [
                getattr(callback, event) for callback in self.callbacks if _listens(callback, event)
            ]
            for event in EVENTS
        }

    def stateful(self) -> dict[str, Any]:
        """Return the stateful callbacks by class name; a second of a class is ``Name_2``."""
        callback_by_name: dict[str, Any] = {}
        count_by_name: dict[str, int] = {}
        for callback in self.callbacks:
            if not has_state(callback):
                continue
            name = type(callback).__name__
            count_by_name[name] = count_by_name.get(name, 0) + 1
            callback_by_name[
                name if count_by_name[name] == 1 else f"{name}_{count_by_name[name]}"
            ] = callback
        return callback_by_name


def _listens(callback: Any, event: str) -> bool:
    """Return whether a callback overrides ``event``; the base's empty methods are not called."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(
        TrainerCallback, event
    )


# Event -> flag of the control that requests it.
_ANSWERED = {
    "on_evaluate": "should_evaluate",
    "on_log": "should_log",
    "on_save": "should_save",
}


def _event_method(event: str) -> Callable[..., TrainerControl]:
    """Return the method of the handler that calls the listeners of an event."""

    def method(
        self: CallbackHandler, args: Any, state: Any, control: Any, /, *values: Any, **kwargs: Any
    ) -> TrainerControl:
        # Scripts for Transformers pass the metrics or the logs of an event by position.
        named = dict(zip(_VALUES.get(event, ()), values, strict=True))
        return self.call_event(event, args, state, control, **named, **kwargs)

    method.__name__ = event
    method.__doc__ = f"Call the listeners of ``{event}``; return the control."
    return method


_VALUES = {"on_evaluate": ("metrics",), "on_predict": ("metrics",), "on_log": ("logs",)}
for _event in EVENTS:
    setattr(CallbackHandler, _event, _event_method(_event))


def _context_property(name: str) -> property:
    """Return the property of the handler for an object that callbacks get."""

    def get(self: CallbackHandler) -> Any:
        return self.context[name]

    def put(self: CallbackHandler, value: Any) -> None:
        self.context[name] = value

    return property(get, put, doc=f"``{name}`` that callbacks get; None until the object exists.")


for _name in CONTEXT:
    setattr(CallbackHandler, _name, _context_property(_name))


class DefaultFlowCallback(TrainerCallback):
    """Callback that requests the logs, evaluations and saves of the arguments."""

    def on_step_end(self, args: Any, state: Any, control: Any, /, **_: Any) -> None:
        """Request what is due at this step; the last step also evaluates and saves."""
        step = state.global_step
        is_last = step >= state.max_steps
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        if (
            args.eval_strategy == "steps"
            and (is_last or step % state.eval_steps == 0)
            and step >= args.eval_delay
        ):
            control.should_evaluate = True
        is_due = is_last or (step % state.save_steps == 0 and not is_planned(args))
        if args.save_strategy == "steps" and is_due:
            control.should_save = True
        if is_last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, /, **_: Any) -> None:
        """Request what is due at the end of an epoch."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


class EarlyStoppingCallback(TrainerCallback):
    """Callback that stops training after several evaluations without a better metric.

    The counter is saved, so a resumed run stops where an uninterrupted one would.

    Args:
        early_stopping_patience: Number of evaluations without improvement that end training.
        early_stopping_threshold: Minimum gain that counts as an improvement.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0
    ) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Require a metric to watch, and reset the counter at the start of a run.

        Raises:
            ConfigError: There is no metric to watch, or no evaluation.
        """
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ConfigError(
                "EarlyStoppingCallback needs `metric_for_best_model` and an `eval_strategy`"
            )
        if state.best_metric is None and not state.global_step:
            self.early_stopping_patience_counter = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
        """Compare with the best value so far, which does not include this evaluation yet."""
        name = args.metric_for_best_model.removeprefix("eval_")
        value = kwargs["metrics"].get(f"eval_{name}")
        if value is None:
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(
        self,
        args: Any,
        state: Any,
        control: Any,  # noqa: ARG002 - signature of Transformers
        metric_value: float,
    ) -> None:
        """Count an evaluation without a better metric, or reset the counter."""
        gain = 0.0 if state.best_metric is None else metric_value - state.best_metric
        gain = gain if args.greater_is_better else -gain
        if state.best_metric is None or gain > max(self.early_stopping_threshold or 0.0, 0.0):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def state(self) -> dict[str, dict[str, Any]]:
        """Return arguments and attributes in Transformers' export format."""
        made_with = {
            "early_stopping_patience": self.early_stopping_patience,
            "early_stopping_threshold": self.early_stopping_threshold,
        }
        return {"args": made_with, "attributes": self.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EarlyStoppingCallback:
        """Return a callback with the arguments and attributes from ``state``."""
        instance = cls(**state["args"])
        instance.load_state_dict(state["attributes"])
        return instance

    def state_dict(self) -> dict[str, int]:
        """Return the counter; patience and threshold belong to the script."""
        return {"early_stopping_patience_counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counter."""
        self.early_stopping_patience_counter = state_dict["early_stopping_patience_counter"]


def shown_states(handler: CallbackHandler) -> dict[str, Any]:
    """Return the constructor arguments and state of each stateful callback, plain values only.

    These values are only for display. A checkpoint part restores the callbacks, including tensors.
    """
    json_by_name = {name: _callback_to_json(value) for name, value in handler.stateful().items()}
    return {
        **json_by_name,
        "TrainerControl": {"args": handler.control.state_dict(), "attributes": {}},
    }


def _callback_to_json(callback: Any) -> dict[str, Any]:
    if exports_state(callback):
        return {name: _plain(value) for name, value in callback.state().items()}
    arguments = {
        name: getattr(callback, name)
        for name in _names_of(cast("Any", type(callback)))
        if hasattr(callback, name)
    }
    return {"args": _plain(arguments), "attributes": _plain(callback.state_dict())}


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of a callback class's constructor parameters."""
    return tuple(inspect.signature(kind.__init__).parameters)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = bool | int | float | str | None
    # A NumPy float is a Python float too, and would be stored as a tensor.
    return {name: plain_value(value) for name, value in values.items() if isinstance(value, kinds)}
