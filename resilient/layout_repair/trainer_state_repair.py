"""Repair of ``trainer_state.json`` of Transformers, and of files of learning rate schedulers.

The keys of ``trainer_state.json`` are in alphabetical order. A truncated file therefore still has
the best checkpoint, the epoch, the step, and the beginning of the log history. Some fields are
equal in all checkpoints of a run. The repair copies these fields from another checkpoint, or from
the arguments of the run. Other missing fields are lost, and the repair reports the loss.

A scheduler file is written again from other files. The optimizer stores the current and the initial
learning rate of each group, so the repair restores both rates bit for bit. The step of the
scheduler is the step in the other files of the checkpoint. The kind of the scheduler is known from
another checkpoint of the run, or from the arguments. The repair does not restore other counters,
such as the bad epochs that ReduceLROnPlateau counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.layout_repair.training_logs import SHARED, logs_beside, read_beside
from resilient.layout_repair.zip_repair import torch_file
from resilient.layouts.best_checkpoint import best_folder, folder_name, is_beside, step_in
from resilient.layouts.hf_trainer import CONTROL, KEYS, NUMBERS, STATE
from resilient.layouts.json_files import decimal, read_json, whole
from resilient.layouts.model import Unreadable
from resilient.layouts.pickle_reader import PickledCall
from resilient.layouts.torch_zip import Archive, open_archive

if TYPE_CHECKING:
    from resilient.layout_repair.case import RepairCase
    from resilient.layout_repair.training_logs import MetricsLog
    from resilient.storage.folder import DirectoryListing, Folder

_KEY = re.compile(r'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_COMMA = re.compile(r"\s*,?\s*")
_DECODER = json.JSONDecoder()


def parse_truncated_json(text: str) -> dict[str, Any]:
    """Return the complete fields of a truncated JSON object.

    The result has the complete elements of a truncated list.
    """
    fields: dict[str, Any] = {}
    at = text.find("{") + 1
    while at and (match := _KEY.match(text, at)):
        value, end = _value(text, match.end())
        key = _text_of(match[1])
        if end == match.end() or key is None:
            break
        fields[key] = value
        if end < 0 or end == len(text):
            break
        at = end
    return fields


def _text_of(quoted: str) -> str | None:
    try:
        value = json.loads(quoted)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value at an offset and its end offset; the end is -1 for a truncated value."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return _elements(text, at)
    # A number at the end of the text may be truncated.
    return (value, end) if end < len(text) else (None, at)


def _elements(text: str, at: int) -> tuple[Any, int]:
    if not text.startswith("[", at):
        return None, at
    elements, place = [], at + 1
    while match := _COMMA.match(text, place):
        try:
            value, place = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            break
        if place == len(text):
            break
        elements.append(value)
    return elements, -1


_OF_TRAINER, _OF_ACCELERATE = "scheduler.pt", re.compile(r"scheduler(_\d{1,4})?\.bin")
ARGUMENTS, _SCALER = "training_args.bin", "scaler.pt"
_STEADY = {
    *(
        "base_lrs",
        "lr_lambdas",
        "_is_initial",
        "_get_lr_called_within_step",
        "verbose",
        "step_size",
    ),
    *("gamma", "T_max", "eta_min", "total_iters", "factor", "start_factor", "end_factor", "power"),
    *("total_steps", "milestones"),
}
"""Keys of a scheduler's state that do not change with the step."""
_COUNTED = {"last_epoch", "_step_count", "_last_lr"}
_LAMBDAS = {
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "inverse_sqrt"),
    *("constant_with_warmup", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    "warmup_stable_decay",
}
"""Schedulers of Transformers that have the state of torch's `LambdaLR`."""
_NO_KIND = (
    "its kind is unknown: no other step of the run, beside this one or named with `--from`, and "
    f"no {ARGUMENTS} states it"
)


def repair_schedules(case: RepairCase) -> None:
    """Rewrite schedulers that are lost or belong to another step."""
    if case.contents.layout == "hf-trainer":
        _repair(case, _OF_TRAINER, "optimizer.pt")
    if case.contents.layout == "accelerate":
        places = {problem.place for problem in case.problems} | set(case.listing.sizes)
        for name in sorted(place for place in places if _OF_ACCELERATE.fullmatch(place)):
            _repair(case, name, name.replace("scheduler", "optimizer"))


def _repair(case: RepairCase, name: str, optimizer: str) -> None:
    step = step_of(case, without="schedule")
    if not case.is_broken(name) and not _is_odd(case, step):
        return
    try:
        groups = _groups(case.draft, case.listing, optimizer)
    except Unreadable as error:
        case.refused[name] = f"its rates would be in {optimizer}: {error}"
        return
    if step is None:
        case.refused[name] = "its step is unknown"
        return
    try:
        value, source = _schedule_state(case, name, groups, step)
        root = name.rpartition(".")[0]
        case.draft.put(name, torch_file(value, root))
    except Unreadable as error:
        case.refused[name] = str(error)
        return
    case.done(
        name, f"written again, at step {value['last_epoch']}", f"the rates in {optimizer}, {source}"
    )


def step_of(case: RepairCase, *, without: str = "") -> int | None:
    """Return the step that most files of a checkpoint state; None without a majority.

    Args:
        case: The checkpoint.
        without: ``schedule`` or ``state``, to ignore this file.
    """
    contents = case.contents
    name = re.search(r"checkpoint-(\d{1,12})/?$", case.draft.url)
    step = int(name[1]) if name and contents.layout == "hf-trainer" else None
    steps = {
        "name": step,
        "state": contents.step,
        "schedule": contents.schedule.step if contents.schedule else None,
        "optimizer": contents.optimizer.step if contents.optimizer else None,
    }
    updates = steps["optimizer"]
    if _SCALER in case.listing.sizes and step and updates and updates < step:
        # If a scaler of fp16 skipped updates, the optimizer and its scheduler count fewer updates
        # than steps.
        steps = {key: value for key, value in steps.items() if value != updates}
    votes = Counter(value for key, value in steps.items() if value is not None and key != without)
    top_steps = votes.most_common(2)
    if not top_steps or (len(top_steps) > 1 and top_steps[0][1] == top_steps[1][1]):
        return None
    return top_steps[0][0]


def _is_odd(case: RepairCase, step: int | None) -> bool:
    """Return True if only the scheduler belongs to another step."""
    schedule, optimizer = case.contents.schedule, case.contents.optimizer
    if schedule is None or not any(problem.place == "." for problem in case.problems):
        return False
    if case.contents.layout == "hf-trainer":
        return step is not None and schedule.step not in (step, None)
    if not optimizer or not optimizer.rates or optimizer.rates == schedule.rates:
        return False
    # accelerate steps a scheduler once per rank. If the counts agree, either file may be wrong.
    return not optimizer.step or schedule.step is None or schedule.step % optimizer.step != 0


def _groups(folder: Folder, listing: DirectoryListing, name: str) -> list[tuple[float, float]]:
    """Return the initial and the current rate of each group."""
    archive = open_archive(folder, listing, name)
    groups = archive.value.get("param_groups") if isinstance(archive.value, dict) else None
    param_groups = []
    for group in groups if isinstance(groups, list) else ():
        first, now = (_rate(archive, group, key) for key in ("initial_lr", "lr"))
        if first is None or now is None:
            raise Unreadable("its groups had no schedule")
        param_groups.append((first, now))
    if not param_groups:
        raise Unreadable("it has no groups")
    return param_groups


def _rate(archive: Archive, group: Any, key: str) -> float | None:
    return archive.number(group.get(key)) if isinstance(group, dict) else None


def _schedule_state(
    case: RepairCase, name: str, groups: list[tuple[float, float]], step: int
) -> tuple[dict[str, Any], str]:
    rates = [last_rate for _, last_rate in groups]
    for donor in case.near:
        try:
            donor_state = open_archive(donor.folder, donor.listing, name).value
        except Unreadable:
            continue
        return _from_another(case, donor_state, donor.contents, step, rates), donor.url
    kind = arguments_of(case.draft, case.listing).get("lr_scheduler_type")
    if kind not in _LAMBDAS:
        raise Unreadable(f"a schedule of the kind `{str(kind)[:40]}`" if kind else _NO_KIND)
    bases: list[Any] = [first for first, _ in groups]
    value = {
        "base_lrs": bases,
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None for _ in groups],
    }
    return value, ARGUMENTS


def _from_another(
    case: RepairCase, donor_state: Any, contents: Any, step: int, rates: list[float]
) -> dict[str, Any]:
    """Return the scheduler of another step, with the counters of this step."""
    last = whole(donor_state.get("last_epoch")) if isinstance(donor_state, dict) else None
    unknown_keys = sorted(str(key)[:40] for key in set(donor_state or ()) - _STEADY - _COUNTED)
    if last is None or unknown_keys:
        raise Unreadable(f"its kind counts more than steps: {', '.join(unknown_keys) or 'no step'}")
    updates = contents.optimizer.step if contents.optimizer else None
    # accelerate steps a scheduler once per rank.
    updates_per_step = last // updates if case.contents.layout == "accelerate" and updates else 1
    if case.contents.layout == "accelerate" and (not updates or updates_per_step * updates != last):
        raise Unreadable("no other step shows how often it advances")
    count = whole(donor_state.get("_step_count"))
    count_fields = (
        {"_step_count": updates_per_step * step + count - last} if count is not None else {}
    )
    return {**donor_state, **count_fields, "last_epoch": updates_per_step * step, "_last_lr": rates}


def arguments_of(folder: Folder, listing: DirectoryListing) -> dict[str, Any]:
    """Return the plain arguments of Transformers' Trainer; empty without them.

    Raises:
        StoreError: The file could not be read.
    """
    try:
        value = open_archive(folder, listing, ARGUMENTS).value
    except Unreadable:
        return {}
    state = value.state if isinstance(value, PickledCall) else None
    arguments = {}
    for key, entry in state.items() if isinstance(state, dict) else ():
        # A pickle contains an enumeration member as a call with its value.
        plain = (
            entry.args[0]
            if isinstance(entry, PickledCall) and isinstance(entry.args, tuple) and entry.args
            else entry
        )
        if isinstance(key, str) and isinstance(plain, str | int | float | None):
            arguments[key] = plain
    return arguments


_EMPTY: dict[str, Any] = {
    "best_global_step": None, "best_metric": None, "best_model_checkpoint": None,
    "epoch": 0.0, "eval_steps": 500, "global_step": 0, "is_hyper_param_search": False,
    "is_local_process_zero": True, "is_world_process_zero": True, "log_history": [],
    "logging_steps": 500, "max_steps": 0, "num_input_tokens_seen": 0, "num_train_epochs": 0,
    "save_steps": 500, "stateful_callbacks": {}, "total_flos": 0.0, "train_batch_size": 0,
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
_FLAGS = dict.fromkeys(
    ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"),
    False,
)
_COUNTS = ("total_flos", "num_input_tokens_seen")
CONSEQUENCES = {
    "history": "no losses and metrics of these steps",
    "digits": "event files of TensorBoard keep seven digits of each number of the history",
    "best model": "the next evaluation counts as the best so far",
    "callbacks": "their counters, such as the patience of an early stop, start again or come from "
    "another step; for a callback that no step here has, Transformers raises at its next save",
    "epoch": "the logs name another epoch; Transformers counts its data position from the step",
    "counts": "of operations and tokens: they start again, or are scaled from another step",
    "batch size": "0 is used: Transformers warns about another value, and raises with "
    "`auto_find_batch_size`",
}


@dataclass
class _RebuiltState:
    """A Trainer state under reconstruction, with the sources of its fields."""

    case: RepairCase
    state: dict[str, Any]
    sources: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    logs: list[MetricsLog] = field(default_factory=list)


def repair_state(case: RepairCase) -> None:
    """Rewrite a Trainer state that is lost, truncated or from another step; else fix its fields."""
    if case.contents.layout != "hf-trainer":
        return
    try:
        state = read_json(case.draft, case.listing, STATE)
    except Unreadable:
        state = {}
    if set(state) - KEYS:
        state = _with_known_keys(case, state)
    invalid_names = [name for name in NUMBERS if name in state and decimal(state[name]) is None]
    state = {name: value for name, value in state.items() if name not in invalid_names}
    step = step_of(case, without="state")
    if case.is_broken(STATE) and (not state or whole(state.get("global_step")) is None):
        _rebuild(case, step, {})
    elif state and step is not None and whole(state["global_step"]) != step:
        _rebuild(case, step, state)
    elif case.is_broken(STATE) and state:
        _fill(case, state, invalid_names)
    repair_best(case)


def _control() -> dict[str, Any]:
    """Return the TrainerControl that Transformers saves between two steps."""
    return {"args": dict(_FLAGS), "attributes": {}}


def _fill(case: RepairCase, fields: dict[str, Any], odd: list[str]) -> None:
    """Add missing fields, and replace fields that are not numbers."""
    missing_keys = [key for key in sorted(KEYS) if key not in fields]
    callbacks = fields.get("stateful_callbacks")
    known_callbacks = callbacks if isinstance(callbacks, dict) else {}
    if not missing_keys and CONTROL in known_callbacks:
        return
    fields_of_run, sources = _fields_of_run(case, missing_keys)
    state = {**_EMPTY, **fields_of_run, **fields}
    state["stateful_callbacks"] = {CONTROL: _control(), **known_callbacks}
    if not decimal(state["train_batch_size"]):
        state["train_batch_size"] = 0
        case.losses["batch size"] = CONSEQUENCES["batch size"]
    if _COUNTS[0] in odd:
        case.losses["counts"] = CONSEQUENCES["counts"]
    names_text = ", ".join([*missing_keys, *([] if missing_keys else [CONTROL])])
    _replace_state(
        case,
        state,
        f"completed: {names_text}",
        ", ".join(sources) or "the initial values of Transformers",
    )


def _fields_of_run(case: RepairCase, lacking: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return fields from another step or from the run's arguments, with their sources."""
    fields: dict[str, Any] = {}
    sources = []
    for state, source in _other_states(case):
        new_fields = {key: state[key] for key in _OF_RUN if key in lacking and key in state}
        new_fields = {
            key: value
            for key, value in new_fields.items()
            if key not in fields and value is not None
        }
        sources += [source] if new_fields else []
        fields |= new_fields
    arguments = arguments_of(case.draft, case.listing)
    argument_values = {
        own_key: arguments[key] for key, own_key in _OF_ARGUMENTS.items() if key in arguments
    }
    new_fields = {
        key: value for key, value in argument_values.items() if key in lacking and key not in fields
    }
    # The arguments may state a fraction of all steps, but the state needs a number of steps.
    new_fields = {
        key: int(value)
        for key, value in new_fields.items()
        if decimal(value) is not None and value >= 1
    }
    sources += [ARGUMENTS] if new_fields else []
    return {**new_fields, **fields}, sources


def _with_known_keys(case: RepairCase, state: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a state with accepted keys only, and correct a key with a flipped bit."""
    unknown_keys = sorted(set(state) - KEYS)
    corrected_keys = {
        key: corrected_key
        for key in unknown_keys
        if (corrected_key := _without_flip(key, KEYS - set(state)))
    }
    known_fields = {corrected_keys.get(key, key): value for key, value in state.items()}
    known_fields = {key: value for key, value in known_fields.items() if key in KEYS}
    names_text = ", ".join(unknown_keys[:4])[:80]
    if len(corrected_keys) == len(unknown_keys):
        _replace_state(
            case,
            known_fields,
            f"`{names_text}` is `{', '.join(corrected_keys.values())}` with a flipped bit",
            STATE,
        )
    else:
        _replace_state(
            case, known_fields, f"without `{names_text}`, which its loader rejects", STATE
        )
    return known_fields


def _without_flip(key: str, names: set[str]) -> str | None:
    """Return the accepted key that differs in one bit; None without one."""
    data = int.from_bytes(key.encode())
    return next(
        (
            candidate
            for candidate in sorted(names)
            if len(candidate) == len(key.encode())
            and (data ^ int.from_bytes(candidate.encode())).bit_count() == 1
        ),
        None,
    )


def _replace_state(case: RepairCase, state: dict[str, Any], change_text: str, source: str) -> None:
    case.draft.put(STATE, (json.dumps(state, indent=2, sort_keys=True) + "\n").encode())
    case.done(STATE, change_text, source)


def repair_best(case: RepairCase) -> None:
    """Restore the path of the best checkpoint, if that checkpoint exists."""
    try:
        state = read_json(case.draft, case.listing, STATE)
    except Unreadable:
        return
    best, name = state.get("best_model_checkpoint"), best_folder(case.draft.url, state)
    step = step_in(name)
    if not isinstance(best, str) or step is None:
        return
    is_own = step == whole(state.get("global_step"))
    if folder_name(best) == name and (is_own or is_beside(case.draft.url, best, name)):
        return
    state["best_model_checkpoint"] = is_there = _checkpoint_of(case, step)
    if not is_there:
        case.losses["best checkpoint"] = f"`{name}` is not beside this one any more"
    _replace_state(
        case, state, f"its best checkpoint is {'' if is_there else 'not '}`{name}`", "its best step"
    )


def _checkpoint_of(case: RepairCase, step: int) -> str | None:
    """Return the path of another step of the run; None if it is not beside this checkpoint."""
    name = f"checkpoint-{step}"
    parent, own_path = Path(case.draft.url).parent, Path(case.draft.url).name
    is_there = own_path == name or any(Path(donor.url) == parent / name for donor in case.near)
    is_there = is_there or (parent / name / STATE).is_file()
    return str(parent / name) if is_there else None


def _rebuild(case: RepairCase, step: int | None, stale: dict[str, Any]) -> None:
    intact_fields = parse_truncated_json(_text(case)) if not stale else {}
    step = whole(intact_fields.get("global_step")) if step is None else step
    if step is None:
        case.refused[STATE] = "its step is unknown"
        return
    if whole(intact_fields.get("global_step")) not in (step, None):
        intact_fields = {}
    states = _other_states(case)
    arguments = arguments_of(case.draft, case.listing)
    logs = [*case.logs, *logs_beside(case.draft.url)]
    rebuilt_state = _RebuiltState(
        case,
        {**_EMPTY, "global_step": step, "stateful_callbacks": {}},
        arguments=arguments,
        logs=logs,
    )
    if arguments:
        rebuilt_state.sources.append(ARGUMENTS)
    rebuilt_state.state |= {
        own_key: arguments[argument]
        for argument, own_key in _OF_ARGUMENTS.items()
        if argument in arguments
    }
    run = [(state, source) for state, source in states] + ([(stale, STATE)] if stale else [])
    for state, source in reversed(run):
        rebuilt_state.state |= {key: state[key] for key in _OF_RUN if key in state}
        rebuilt_state.sources.append(source)
    _restore_history(rebuilt_state, step, intact_fields, run)
    _restore_epoch(rebuilt_state, step, intact_fields, run)
    _restore_best(rebuilt_state, step, intact_fields, run)
    _restore_counts(rebuilt_state, step, intact_fields, run)
    if intact_fields:
        rebuilt_state.state |= {
            key: intact_fields[key] for key in intact_fields if key in KEYS and key != "log_history"
        }
        rebuilt_state.sources.append("its intact parts")
    _restore_batch_size(rebuilt_state)
    for loss in rebuilt_state.lost:
        case.losses[loss] = CONSEQUENCES[loss]
    base_sources = "the folder's name, the schedule and the optimizer"
    sources = ", ".join(dict.fromkeys((base_sources, *reversed(rebuilt_state.sources))))
    _replace_state(case, rebuilt_state.state, f"written again, at step {step}", sources)


def _text(case: RepairCase) -> str:
    if STATE not in case.listing.sizes:
        return ""
    return case.draft.read(STATE, 0, 32 << 20).decode("utf-8", "replace")


def _other_states(case: RepairCase) -> list[tuple[dict[str, Any], str]]:
    states = []
    for donor in case.near:
        try:
            state = read_json(donor.folder, donor.listing, STATE)
        except Unreadable:
            continue
        if whole(state.get("global_step")):
            states.append((state, donor.url))
    # The Trainer writes this file beside its checkpoints if a script calls `save_state`.
    parent_state = parse_truncated_json(
        read_beside(case.draft.url, STATE).decode("utf-8", "replace")
    )
    if whole(parent_state.get("global_step")):
        states.append((parent_state, f"../{STATE}"))
    return states


_States = list[tuple[dict[str, Any], str]]


def _entries(state: dict[str, Any], step: int) -> list[dict[str, Any]]:
    log_history = state.get("log_history")
    entries = (
        [entry for entry in log_history if isinstance(entry, dict)]
        if isinstance(log_history, list)
        else []
    )
    return [entry for entry in entries if (whole(entry.get("step")) or 0) <= step]


def _restore_history(
    rebuilt_state: _RebuiltState, step: int, rest: dict[str, Any], states: _States
) -> None:
    """Restore the longest history, with all digits if an exact source has them."""
    candidates = [
        (_entries(candidate, step), "") for candidate in (rest, *(state for state, _ in states))
    ]
    exact = [
        (metrics_log.until(step), metrics_log.where)
        for metrics_log in rebuilt_state.logs
        if metrics_log.is_exact
    ]
    entries, source = max(
        (*candidates, *exact), key=lambda candidate: (_last(candidate[0]), len(candidate[0]))
    )
    sources = [source] if source else []
    rounded = [
        (metrics_log.until(step), metrics_log)
        for metrics_log in rebuilt_state.logs
        if not metrics_log.is_exact
    ]
    for rounded_entries, log in sorted(rounded, key=lambda pair: -_last(pair[0]))[:1]:
        later_entries = [entry for entry in rounded_entries if _follows(entry, entries)]
        if later_entries:
            entries = [*entries, *later_entries]
            sources.append(log.where)
            rebuilt_state.lost += ["digits", *(["history"] if log.broken else [])]
    rebuilt_state.state["log_history"] = entries
    rebuilt_state.sources += sources
    reach = max(
        (whole(donor_state.get("global_step")) or 0 for donor_state, _ in states), default=0
    )
    reach = max(reach, *(metrics_log.reach() for metrics_log in rebuilt_state.logs), 0)
    if _last(entries) < step and reach < step:
        rebuilt_state.lost.append("history")


def _follows(entry: dict[str, Any], entries: list[dict[str, Any]]) -> bool:
    """Return True if an entry has a later step than others, or another kind at the last step."""
    last = _last(entries)
    keys_at_last = {
        key
        for other_entry in entries
        if whole(other_entry.get("step")) == last
        for key in other_entry
    }
    return entry["step"] > last or (
        entry["step"] == last and not keys_at_last & set(entry) - set(SHARED)
    )


def _last(entries: list[dict[str, Any]]) -> int:
    return max((whole(entry.get("step")) or 0 for entry in entries), default=0)


def _restore_epoch(
    rebuilt_state: _RebuiltState, step: int, rest: dict[str, Any], states: _States
) -> None:
    logged = [
        entry for entry in rebuilt_state.state["log_history"] if whole(entry.get("step")) == step
    ]
    epochs = [decimal(entry.get("epoch")) for entry in logged]
    exact = [decimal(rest.get("epoch")), *([] if "digits" in rebuilt_state.lost else epochs)]
    ratio = [
        (decimal(donor_state.get("epoch")) or 0.0) * step / whole_step
        for donor_state, _ in states
        if (whole_step := whole(donor_state.get("global_step")))
    ]
    known_epochs = [epoch for epoch in (*exact, *ratio, *epochs) if epoch is not None]
    if known_epochs:
        rebuilt_state.state["epoch"] = known_epochs[0]
    else:
        rebuilt_state.lost.append("epoch")


def _restore_best(
    rebuilt_state: _RebuiltState, step: int, rest: dict[str, Any], states: _States
) -> None:
    """Restore the best result from another state, and the states of callbacks."""
    for candidate in (rest, *(state for state, _ in states)):
        best = whole(candidate.get("best_global_step"))
        is_recent = (whole(candidate.get("global_step")) or 0) >= step
        if (best is not None and best <= step and is_recent) or (
            candidate is rest and _BEST[0] in rest
        ):
            rebuilt_state.state |= {key: candidate.get(key) for key in _BEST}
            break
    else:
        best_logged = _best_logged(rebuilt_state)
        rebuilt_state.state |= best_logged
        rebuilt_state.lost += [] if best_logged else ["best model"]
    callbacks = next((donor_state.get("stateful_callbacks") for donor_state, _ in states), None)
    if isinstance(callbacks, dict):
        rebuilt_state.state["stateful_callbacks"] = dict(callbacks)
    if not isinstance(callbacks, dict) or set(callbacks) - {CONTROL}:
        rebuilt_state.lost.append("callbacks")
    # Always write this state, because Transformers raises at the next save without it.
    rebuilt_state.state["stateful_callbacks"].setdefault(CONTROL, _control())


def _best_logged(rebuilt_state: _RebuiltState) -> dict[str, Any]:
    """Return the best evaluation by the Trainer's rule; empty if an evaluation may be missing."""
    metric = rebuilt_state.arguments.get("metric_for_best_model")
    if "history" in rebuilt_state.lost or not isinstance(metric, str):
        return {}
    key = metric if metric.startswith("eval_") else f"eval_{metric}"
    candidates = [
        (number, entry["step"])
        for entry in rebuilt_state.state["log_history"]
        if (number := decimal(entry.get(key))) is not None
    ]
    if not candidates:
        return {}
    is_greater = bool(rebuilt_state.arguments.get("greater_is_better"))
    bests: list[tuple[float, int]] = []
    for number, step in candidates:
        # The first of equals: only a better result replaces it.
        if not bests or (number > bests[-1][0] if is_greater else number < bests[-1][0]):
            bests.append((number, step))
    # The path names the last of the best steps that was saved.
    paths = (_checkpoint_of(rebuilt_state.case, step) for _, step in reversed(bests))
    return {
        "best_metric": bests[-1][0],
        "best_global_step": bests[-1][1],
        "best_model_checkpoint": next((path for path in paths if path), None),
    }


def _restore_counts(
    rebuilt_state: _RebuiltState, step: int, rest: dict[str, Any], states: _States
) -> None:
    for key in _COUNTS:
        if key in rest or not states:
            continue
        state = states[0][0]
        count, at = decimal(state.get(key)) or 0.0, whole(state.get("global_step")) or 1
        rebuilt_state.state[key] = type(_EMPTY[key])(count * step / at)
    if not all(key in rest for key in _COUNTS):
        rebuilt_state.lost.append("counts")


def _restore_batch_size(rebuilt_state: _RebuiltState) -> None:
    """Set a missing batch size to 0, because the Trainer divides the value at a resume."""
    if not decimal(rebuilt_state.state["train_batch_size"]):
        rebuilt_state.state["train_batch_size"] = 0
        rebuilt_state.lost.append("batch size")
