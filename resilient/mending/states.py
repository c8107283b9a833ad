"""The state of Transformers' Trainer, from what is left of it and what stands near.

A state that was cut has its first keys, and they are in the order of the alphabet: the best
checkpoint, the epoch, the step, and the history as far as it goes. The rest is the run's, so
another step of it or the arguments say it; what was this step's alone is lost, and told.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.layouts.documents import decimal, read_json, whole
from resilient.layouts.hf_trainer import KEYS, STATE
from resilient.layouts.values import Unreadable
from resilient.mending.schedules import ARGUMENTS, arguments_of, step_of

if TYPE_CHECKING:
    from resilient.mending.case import Case

_EMPTY: dict[str, Any] = {
    "best_global_step": None, "best_metric": None, "best_model_checkpoint": None,
    "epoch": 0.0, "eval_steps": 500, "global_step": 0, "is_hyper_param_search": False,
    "is_local_process_zero": True, "is_world_process_zero": True, "log_history": [],
    "logging_steps": 500, "max_steps": 0, "num_input_tokens_seen": 0, "num_train_epochs": 0,
    "save_steps": 500, "stateful_callbacks": {}, "total_flos": 0.0, "train_batch_size": None,
    "trial_name": None, "trial_params": None,
}  # fmt: skip
_OF_RUN = (
    *("eval_steps", "is_hyper_param_search", "logging_steps", "max_steps", "num_train_epochs"),
    *("save_steps", "train_batch_size", "trial_name", "trial_params"),
)
_OF_ARGUMENTS = {
    "eval_steps": "eval_steps", "logging_steps": "logging_steps", "max_steps": "max_steps",
    "num_train_epochs": "num_train_epochs", "save_steps": "save_steps",
    "per_device_train_batch_size": "train_batch_size",
}  # fmt: skip
_BEST = ("best_global_step", "best_metric", "best_model_checkpoint")
_COUNTS = ("total_flos", "num_input_tokens_seen")
CONSEQUENCES = {
    "history": "no losses and metrics of these steps",
    "best model": "the next evaluation is the best so far",
    "callbacks": "their counters begin anew: the patience of an early stop",
    "epoch": "logs tell another one; Transformers counts its place in the data from the step",
    "counts": "of operations and tokens: they begin anew, or are in proportion to another step's",
}


@dataclass
class _Known:
    """A state while it is put together, and where it is from."""

    state: dict[str, Any]
    sources: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def mend_state(case: Case) -> None:
    """Write a state anew that is lost, cut, or of another step; mend what is odd in a whole one."""
    if case.contents.layout != "hf-trainer":
        return
    try:
        held = read_json(case.draft, case.listing, STATE)
    except Unreadable:
        held = {}
    if set(held) - KEYS:
        held = _known_alone(case, held)
    step = step_of(case, without="state")
    if case.is_broken(STATE) and (not held or whole(held.get("global_step")) is None):
        _rebuild(case, step, {})
    elif held and step is not None and whole(held["global_step"]) != step:
        _rebuild(case, step, held)
    mend_best(case)


def _known_alone(case: Case, held: dict[str, Any]) -> dict[str, Any]:
    """Write a state with the keys its loader takes; one with a flipped bit becomes it again."""
    strange = sorted(set(held) - KEYS)
    meant = {key: own for key in strange if (own := _without_flip(key, KEYS - set(held)))}
    kept = {meant.get(key, key): value for key, value in held.items()}
    kept = {key: value for key, value in kept.items() if key in KEYS}
    named = ", ".join(strange[:4])[:80]
    if len(meant) == len(strange):
        _put(case, kept, f"`{named}` is `{', '.join(meant.values())}` with a flipped bit", STATE)
    else:
        _put(case, kept, f"without `{named}`, which its loader does not take", STATE)
    return kept


def _without_flip(key: str, known: set[str]) -> str | None:
    """Return the one known name that differs from a key in one bit."""
    data = int.from_bytes(key.encode())
    return next(
        (
            one
            for one in sorted(known)
            if len(one) == len(key.encode())
            and (data ^ int.from_bytes(one.encode())).bit_count() == 1
        ),
        None,
    )


def _put(case: Case, state: dict[str, Any], what: str, source: str) -> None:
    case.draft.put(STATE, (json.dumps(state, indent=2, sort_keys=True) + "\n").encode())
    case.done(STATE, what, source)


def mend_best(case: Case) -> None:
    """Point at the checkpoint of the best step again, if it is there."""
    try:
        state = read_json(case.draft, case.listing, STATE)
    except Unreadable:
        return
    best, step = state.get("best_model_checkpoint"), whole(state.get("best_global_step"))
    if not isinstance(best, str) or step is None:
        return
    name = f"checkpoint-{step}"
    if best.replace("\\", "/").rstrip("/").rpartition("/")[2] == name:
        return
    parent, own = Path(case.draft.url).parent, Path(case.draft.url).name
    is_there = own == name or any(Path(one.url) == parent / name for one in case.near)
    is_there = is_there or (parent / name / STATE).is_file()
    state["best_model_checkpoint"] = str(parent / name) if is_there else None
    if not is_there:
        case.losses["best checkpoint"] = f"`{name}` is not beside this one any more"
    _put(
        case, state, f"its best checkpoint is {'' if is_there else 'not '}`{name}`", "its best step"
    )


def _rebuild(case: Case, step: int | None, stale: dict[str, Any]) -> None:
    rest = cut_document(_text(case)) if not stale else {}
    step = whole(rest.get("global_step")) if step is None else step
    if step is None:
        case.refused[STATE] = "nothing says of which step it was"
        return
    if whole(rest.get("global_step")) not in (step, None):
        rest = {}
    others = _others(case)
    known = _Known({**_EMPTY, "global_step": step})
    arguments = arguments_of(case.draft, case.listing)
    if arguments:
        known.sources.append(ARGUMENTS)
    known.state |= {
        ours: arguments[theirs] for theirs, ours in _OF_ARGUMENTS.items() if theirs in arguments
    }
    run = [(one, where) for one, where in others] + ([(stale, STATE)] if stale else [])
    for one, where in reversed(run):
        known.state |= {key: one[key] for key in _OF_RUN if key in one}
        known.sources.append(where)
    _tell_history(known, step, rest, run)
    _tell_place(known, step, rest, run)
    _tell_best(known, step, rest, run)
    _tell_counts(known, step, rest, run)
    if rest:
        known.state |= {key: rest[key] for key in rest if key in KEYS and key != "log_history"}
        known.sources.append("what is whole of it")
    for one in known.lost:
        case.losses[one] = CONSEQUENCES[one]
    said = "the folder's name, the schedule and the optimizer"
    sources = ", ".join(dict.fromkeys((said, *reversed(known.sources))))
    _put(case, known.state, f"written anew, of step {step}", sources)


def _text(case: Case) -> str:
    if STATE not in case.listing.sizes:
        return ""
    return case.draft.read(STATE, 0, 32 << 20).decode("utf-8", "replace")


def _others(case: Case) -> list[tuple[dict[str, Any], str]]:
    found = []
    for one in case.near:
        try:
            state = read_json(one.folder, one.listing, STATE)
        except Unreadable:
            continue
        if whole(state.get("global_step")):
            found.append((state, one.url))
    return found


_States = list[tuple[dict[str, Any], str]]


def _entries(state: dict[str, Any], step: int) -> list[dict[str, Any]]:
    found = state.get("log_history")
    held = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [one for one in held if (whole(one.get("step")) or 0) <= step]


def _tell_history(known: _Known, step: int, rest: dict[str, Any], others: _States) -> None:
    lines = [_entries(one, step) for one in (rest, *(state for state, _ in others))]
    known.state["log_history"] = longest = max(lines, key=len)
    last = max((whole(one.get("step")) or 0 for one in longest), default=0)
    reach = max((whole(one.get("global_step")) or 0 for one, _ in others), default=0)
    if last < step and reach < step:
        known.lost.append("history")


def _tell_place(known: _Known, step: int, rest: dict[str, Any], others: _States) -> None:
    logged = [one for one in known.state["log_history"] if whole(one.get("step")) == step]
    exact = [decimal(one.get("epoch")) for one in (rest, *logged)]
    ratio = [
        (decimal(one.get("epoch")) or 0.0) * step / whole_step
        for one, _ in others
        if (whole_step := whole(one.get("global_step")))
    ]
    found = [one for one in (*exact, *ratio) if one is not None]
    if found:
        known.state["epoch"] = found[0]
    else:
        known.lost.append("epoch")


def _tell_best(known: _Known, step: int, rest: dict[str, Any], others: _States) -> None:
    """Take the best so far from a state that knew it, and callbacks where they count nothing."""
    for one in (rest, *(state for state, _ in others)):
        best = whole(one.get("best_global_step"))
        knew = (whole(one.get("global_step")) or 0) >= step
        if (best is not None and best <= step and knew) or (one is rest and _BEST[0] in rest):
            known.state |= {key: one.get(key) for key in _BEST}
            break
    else:
        known.lost.append("best model")
    held = next((one.get("stateful_callbacks") for one, _ in others), None)
    if isinstance(held, dict) and set(held) <= {"TrainerControl"}:
        known.state["stateful_callbacks"] = held
    else:
        known.lost.append("callbacks")


def _tell_counts(known: _Known, step: int, rest: dict[str, Any], others: _States) -> None:
    for key in _COUNTS:
        if key in rest or not others:
            continue
        state = others[0][0]
        count, at = decimal(state.get(key)) or 0.0, whole(state.get("global_step")) or 1
        known.state[key] = type(_EMPTY[key])(count * step / at)
    if not all(key in rest for key in _COUNTS):
        known.lost.append("counts")


_KEY = re.compile(r'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_COMMA = re.compile(r"\s*,?\s*")
_DECODER = json.JSONDecoder()


def cut_document(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object that are whole before it breaks off (pure).

    Of a list that is cut its whole elements are taken.
    """
    found: dict[str, Any] = {}
    at = text.find("{") + 1
    while at and (match := _KEY.match(text, at)):
        value, end = _value(text, match.end())
        key = _text_of(match[1])
        if end == match.end() or key is None:
            break
        found[key] = value
        if end < 0 or end == len(text):
            break
        at = end
    return found


def _text_of(quoted: str) -> str | None:
    try:
        found = json.loads(quoted)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins somewhere and where it ends; -1: it breaks off."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return _elements(text, at)
    # A number at the very end may have had more digits.
    return (value, end) if end < len(text) else (None, at)


def _elements(text: str, at: int) -> tuple[Any, int]:
    if not text.startswith("[", at):
        return None, at
    found, place = [], at + 1
    while match := _COMMA.match(text, place):
        try:
            value, place = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            break
        if place == len(text):
            break
        found.append(value)
    return found, -1
