"""Checks of field types and ranges in an optimizer, in a scheduler, and in a Trainer's state.

torch and Transformers load these fields unchecked. A wrong value raises an error at the first step,
or the run continues with wrong numbers. The checks accept a value of an unknown class, because only
its class knows the valid values.
"""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, Any

from resilient.layouts.json_files import whole
from resilient.layouts.pickle_reader import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from resilient.layouts.torch_zip import Archive

_SHOWN_MAX = 60
_BITS_MAX = 64
_DIMENSIONS_MAX = 8
_PLAIN = (type(None), bool, int, float, str, bytes, dict, list, tuple)
"""Types of values that are not objects of a class that only its owner knows."""
_ROWS = {"betas": 3, "eps": 2}
"""Options that may be several numbers, with the largest count of numbers."""
_OPTION_NUMBERS = frozenset(
    {
        *("lr", "initial_lr", "weight_decay", "momentum", "dampening", "alpha", "lr_decay"),
        *("rho", "lambd", "momentum_decay", *_ROWS),
    }
)
_OPTION_FLAGS = frozenset(
    {"amsgrad", "maximize", "nesterov", "centered", "foreach", "capturable", "differentiable"}
)
_NEEDED = (
    ("amsgrad", "exp_avg_sq", "max_exp_avg_sq"),
    ("centered", "square_avg", "grad_avg"),
    ("momentum", "square_avg", "momentum_buffer"),
)
"""Option, a state that shows its optimizer, and the state that the optimizer needs with it.

Source: ``_init_group`` of torch's Adam, AdamW and RMSprop, which read the state by key.
"""
_SCHEDULE_LISTS = ("base_lrs", "_last_lr", "min_lrs")
_SCHEDULE_COUNTS = ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter")
_SCHEDULE_NUMBERS = (
    *("factor", "threshold", "patience", "cooldown", "eps", "gamma", "step_size"),
    *("T_max", "eta_min", "total_iters", "start_factor", "end_factor", "power"),
)
_SCHEDULE_INNER = ("lr_lambdas", "_schedulers")
_DEPTH_MAX = 8
_STATE_NUMBERS = (
    *("max_steps", "logging_steps", "eval_steps", "save_steps"),
    *("num_train_epochs", "num_input_tokens_seen", "total_flos"),
)
_STATE_NUMBERS_OR_NONE = ("best_metric", "best_global_step")


class _Texts(reprlib.Repr):
    """Short texts of values of a pickle, in bounded time even if values contain each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 2, 4, 4, 4

    def repr_int(self, x: int, level: int) -> str:
        """Return a number; Python refuses the text of a very long one."""
        bits = x.bit_length()
        return super().repr_int(x, level) if bits <= _BITS_MAX else f"an integer of {bits} bits"

    def repr_instance(self, x: Any, level: int) -> str:  # noqa: ARG002 - the signature of reprlib
        """Return the shape of a tensor, or the kind of an object that is not made."""
        if isinstance(x, TensorRef):
            return f"a tensor of the shape {list(x.shape)[:_DIMENSIONS_MAX]}"
        if isinstance(x, bool | float | bytes | None):
            return repr(x)
        return f"a value of the class {type(x).__name__}"


_TEXTS = _Texts()


def count_fault(value: Any, archive: Archive | None = None) -> str:
    """Return why a value is no count of updates; empty if it is one, or cannot be read.

    Args:
        value: Number, or tensor of one element.
        archive: Archive that reads the element.

    Raises:
        StoreError: A file could not be read.
    """
    if isinstance(value, TensorRef):
        if any(extent != 1 for extent in value.shape):
            return f"a tensor of the shape {list(value.shape)}"
        value = archive.number(value) if archive is not None else None
        return "" if value is None else number_fault(value)
    return number_fault(value) if isinstance(value, _PLAIN) else ""


def number_fault(value: Any) -> str:
    """Return why a plain value is no count of updates; empty if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _shown(value)
    if isinstance(value, int):
        return "" if whole(value) is not None else _shown(value)
    is_count = math.isfinite(value) and value >= 0 and value == int(value)
    return "" if is_count else f"{value:g}"


def states_fault(states: Mapping[Any, Any], archive: Archive | None) -> str:
    """Return the first state whose ``step`` is no count of updates, in words; empty without one.

    The element of a tensor is read only of the first state: every other one costs a read.

    Args:
        states: State of each parameter.
        archive: Archive that reads the element.

    Raises:
        StoreError: A file could not be read.
    """
    is_first = True
    for key, moments in states.items():
        if not isinstance(moments, dict) or "step" not in moments:
            continue
        if fault := count_fault(moments["step"], archive if is_first else None):
            return miscounted(str(key), fault)
        is_first = False
    return ""


def miscounted(name: str, fault: str) -> str:
    """Return the problem of a parameter whose count of updates is no count."""
    return f"the `step` of `{name[:80]}` is {fault}, which is no count of updates"


def option_faults(groups: Sequence[Mapping[Any, Any]], states: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the first option of a type that it cannot have, and the first state that it needs.

    Args:
        groups: Parameter groups.
        states: State of each parameter.
    """
    for at, group in enumerate(groups):
        for name, value in group.items():
            if isinstance(name, str) and (fault := _option_fault(name, value)):
                yield f"`{name}` of its group {at} is {fault}: the first step fails at that"
                return
        # Every optimizer of torch with these options rejects both together.
        if group.get("fused") is True and group.get("differentiable") is True:
            yield (
                f"`fused` and `differentiable` of its group {at} are both set: the first step "
                "fails at that"
            )
            return
        for key, option, slot in _unmet(group, states):
            yield (
                f"`{option}` of its group {at} is set, but the state of `{str(key)[:80]}` has no "
                f"`{slot}`: the first step fails at that"
            )
            return


def unused_slots(groups: Sequence[Mapping[Any, Any]], states: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the first state that its group's options leave unused, although a step saved it."""
    for at, group in enumerate(groups):
        for option, shows, slot in _NEEDED:
            value = group.get(option)
            if option not in group or value is None or not _is_plain_number(value) or value:
                continue
            for key in _members(group):
                moments = states.get(key)
                if isinstance(moments, dict) and {shows, slot} <= moments.keys():
                    yield (
                        f"the state of `{str(key)[:80]}` has `{slot}`, but `{option}` of its group "
                        f"{at} is off: the next steps do not use it"
                    )
                    return


def _unmet(group: Mapping[Any, Any], states: Mapping[Any, Any]) -> Iterator[tuple[Any, str, str]]:
    """Yield each parameter whose state lacks what an option of its group needs."""
    for option, shows, slot in _NEEDED:
        value = group.get(option)
        if not _is_plain_number(value) or not value:
            continue
        for key in _members(group):
            moments = states.get(key)
            if isinstance(moments, dict) and shows in moments and slot not in moments:
                yield key, option, slot


def _members(group: Mapping[Any, Any]) -> Iterable[Any]:
    members = group.get("params")
    known = members if isinstance(members, list | tuple) else ()
    return (key for key in known if isinstance(key, int | str))


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _option_fault(name: str, value: Any) -> str:
    """Return why an option of a group cannot have a value; empty if it can."""
    if name in _OPTION_FLAGS:
        return "" if value is None or _is_number(value) else _shown(value)
    if name not in _OPTION_NUMBERS or (_is_number(value) and name != "betas"):
        return ""
    if name in _ROWS and isinstance(value, list | tuple):
        # An optimizer such as Adafactor may leave one of its two bounds out.
        is_row = 0 < len(value) <= _ROWS[name]
        is_row = is_row and all(item is None or _is_number(item) for item in value)
        return "" if is_row and (name != "betas" or None not in value) else _shown(value)
    return _shown(value) if isinstance(value, (*_PLAIN, TensorRef)) else ""


def _is_number(value: Any) -> bool:
    """Return True for a number, a tensor of one element, or an object of an unknown class."""
    if isinstance(value, TensorRef):
        return all(extent == 1 for extent in value.shape)
    return _is_plain_number(value) or not isinstance(value, _PLAIN)


def schedule_fault(value: Any) -> str:
    """Return the field of a scheduler's state that has an impossible type; empty without one.

    Args:
        value: State of a scheduler of torch.
    """
    return next(_schedule_faults(value, 0), "")


def _schedule_faults(value: Any, depth: int) -> Iterator[str]:
    """Yield the faults of a scheduler; ``depth`` is the number of schedulers around it."""
    if not isinstance(value, dict) or depth > _DEPTH_MAX:
        return
    for names, is_taken, problem_text in _SCHEDULE_RULES:
        for name in names:
            if name in value and not is_taken(value[name]):
                yield f"its `{name}` is {_shown(value[name])}, {problem_text}"
    inner = value.get("_schedulers")
    for state in inner if isinstance(inner, list | tuple) else ():
        yield from _schedule_faults(state, depth + 1)


def _is_row(value: Any, is_item: Callable[[Any], bool]) -> bool:
    """Return True for a list of such items, or an object of an unknown class."""
    if isinstance(value, list | tuple):
        return all(map(is_item, value))
    return not isinstance(value, _PLAIN)


def _is_inner_state(value: Any) -> bool:
    return value is None or isinstance(value, dict) or not isinstance(value, _PLAIN)


def _is_position(value: Any) -> bool:
    """Return True for a whole number; a schedule that never stepped may be at -1."""
    if not isinstance(value, _PLAIN):
        return True
    return type(value) is int or whole(value) is not None


_SCHEDULE_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SCHEDULE_COUNTS, _is_position, "which is no count of steps"),
    (_SCHEDULE_LISTS, lambda value: _is_row(value, _is_number), "and not a list of numbers"),
    (_SCHEDULE_NUMBERS, lambda value: not isinstance(value, str | bytes | dict), "and no number"),
    (_SCHEDULE_INNER, lambda value: _is_row(value, _is_inner_state), "and not a list of states"),
)
"""Fields of torch's schedulers, the values that they can have, and the problem of another one."""


def state_fault(state: Mapping[str, Any]) -> str:
    """Return why no resume takes a ``trainer_state.json``, in words; empty if one does.

    Args:
        state: Content of the file.
    """
    step = state.get("global_step")
    if type(step) is not int:
        return f"its `global_step` is {_shown(step)}, and not a whole number"
    for name in (*_STATE_NUMBERS, *_STATE_NUMBERS_OR_NONE):
        value = state.get(name, 0)
        is_absent = value is None and name in _STATE_NUMBERS_OR_NONE
        if not is_absent and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"its `{name}` is {_shown(value)}, and not a number"
    if not isinstance(searched := state.get("is_hyper_param_search", False), bool):
        return f"its `is_hyper_param_search` is {_shown(searched)}, and neither true nor false"
    history = state.get("log_history", [])
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        return f"its `log_history` is {_shown(history)}, and not a list of entries"
    return _callback_fault(state.get("stateful_callbacks"))


def _callback_fault(callbacks: Any) -> str:
    """Return the first callback whose saved state has another form; empty without one."""
    for name, saved in callbacks.items() if isinstance(callbacks, dict) else ():
        is_several = isinstance(saved, list) and name != "TrainerControl"
        for callback in saved if is_several else [saved]:
            if not isinstance(callback, dict):
                return f"its state of the callback `{str(name)[:80]}` is {_shown(callback)}"
            for field in ("args", "attributes"):
                value = callback.get(field)
                if not isinstance(value, dict | None):
                    return f"`{field}` of its callback `{str(name)[:80]}` is {_shown(value)}"
    return ""


def _shown(value: Any) -> str:
    """Return a value for a message."""
    text = _TEXTS.repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
