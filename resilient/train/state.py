"""Trainer state, control flags and log history.

The state depends only on training, not on time, speed or the number of restarts. Two runs with
equal training therefore have equal states. Timings are emitted as events and are not part of the
state.

A run of a million steps may log 100,000 entries. After a resume, training only appends entries to
the log history. The earlier entries stay JSON text until a caller requests the list of entries.
Neither a resume nor a save parses all entries.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NoReturn, cast

from resilient.errors import IntegrityError, UnsavableState
from resilient.format.state_json import JsonRows, row_of
from resilient.train.fast_asdict import fast_asdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from resilient.train.arguments import TrainingArguments

Entry = dict[str, Any]

_FIELD = "log_history"
_PLAIN = frozenset({type(None), bool, int, float, str})


class LogHistory:
    """Log entries in logging order.

    Args:
        entries: Existing entries. A list is not copied, because its owner may change the list
            later.
    """

    def __init__(self, entries: list[Entry] | JsonRows) -> None:
        self._list = None if isinstance(entries, JsonRows) else entries
        self._rows = entries if isinstance(entries, JsonRows) else JsonRows()
        self._new_rows: list[str] = []
        self._read: tuple[JsonRows, Entry] | None = None

    def note(self, entry: Entry) -> None:
        """Add a snapshot of an entry."""
        row = _row_of(entry) if self._list is None else None
        if row is None:
            self.opened().append(entry)
        else:
            self._new_rows.append(row)

    def opened(self) -> list[Entry]:
        """Return the list of all entries; this list is the history from now on.

        Raises:
            IntegrityError: The checkpoint's log history has no valid entries.
        """
        if self._list is None:
            self._list = _entries(self._joined().trees)
            self._rows = JsonRows()
        return self._list

    def copied(self) -> list[Entry]:
        """Return all entries in a new list; changes to it do not affect this history.

        Raises:
            IntegrityError: The checkpoint's log history has no valid entries.
        """
        return _entries(self._joined().trees) if self._list is None else _copies(self._list)

    def newest(self) -> Iterator[Entry]:
        """Yield the entries from the last one backwards; callers must not change them.

        Raises:
            IntegrityError: The checkpoint's log history has no valid entries.
        """
        yield from reversed(self._list) if self._list is not None else self._read_back()

    def saved(self) -> list[Entry] | JsonRows:
        """Return a copy for a checkpoint."""
        return self._joined() if self._list is None else _copies(self._list)

    def _joined(self) -> JsonRows:
        if self._new_rows:
            self._rows, self._new_rows = self._rows.plus(self._new_rows), []
        return self._rows

    def _read_back(self) -> Iterator[Entry]:
        rows = self._joined()
        if not rows.text:
            return
        trees = rows.newest()
        if self._read is None or self._read[0] is not rows:
            self._read = (rows, _entries(lambda: [next(trees)])[0])
        else:
            # This code runs at every step, but new entries are rare. Keep the newest entry.
            trees = islice(trees, 1, None)
        yield self._read[1]
        while entries := _entries(lambda: list(islice(trees, 1))):
            yield entries[0]


class LogHistoryField:
    """Descriptor of the state's field ``log_history``, which builds the list on first access.

    The state keeps the :class:`LogHistory` as ``_history``.
    """

    def __get__(self, state: Any, kind: type) -> Any:
        # A dataclass reads the field's default from the class.
        return () if state is None else state._history.opened()  # noqa: SLF001 - its own field

    def __set__(self, state: Any, entries: Any) -> None:
        is_kept = isinstance(entries, list | JsonRows)
        state._history = LogHistory(entries if is_kept else list(entries) or JsonRows())  # noqa: SLF001


def _row_of(entry: Entry) -> str | None:
    """Return an entry as a JSON row; None if it has a value that JSON cannot represent."""
    # Import here, because arguments must be readable and printable without torch.
    from resilient.state_dict.flatten import flatten

    try:
        tree, tensors = flatten(_FIELD, entry)
    except UnsavableState:  # The save reports the error with its path.
        return None
    return None if tensors else row_of(tree)


def _entries(trees: Callable[[], list[Any]]) -> list[Entry]:
    from resilient.state_dict.flatten import unflatten

    try:
        entries = unflatten(trees(), _no_tensor)
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error)) from error
    if not all(type(entry) is dict for entry in entries):
        raise _damaged("some of its entries are not objects")
    return entries  # type: ignore[no-any-return]


def _no_tensor(name: str) -> NoReturn:
    raise _damaged(f"it names the tensor `{name}`")


def _damaged(why: str) -> IntegrityError:
    return IntegrityError(
        f"the `{_FIELD}` of a checkpoint cannot be read: {why}",
        hint="training does not need it: continue with `trainer.state.log_history = []`",
    )


def _copies(entries: list[Any]) -> list[Entry]:
    # The history is the largest part of a long run's state, and `deepcopy` is slow.
    return [
        dict(entry)
        if isinstance(entry, dict) and _PLAIN.issuperset(map(type, entry.values()))
        else _plain_entry(entry)
        for entry in entries
    ]


def _plain_entry(entry: Any) -> Entry:
    """Return a copy of a callback's entry, with NumPy numbers and tensors as plain numbers.

    Raises:
        UnsavableState: The entry is not a dict, or has an array of several elements.
    """
    from resilient.state_dict.statefuls import plain_log, plain_numbers

    if not isinstance(entry, dict):
        raise _unsavable(_FIELD, entry)
    plain = {name: plain_numbers(deepcopy(value)) for name, value in entry.items()}
    plain_log({name: value for name, value in plain.items() if hasattr(value, "ndim")})
    return plain


def _savable(brief: dict[str, Any]) -> dict[str, Any]:
    """Return fields with plain numbers, in a form that ``load_state_dict`` accepts."""
    # Cached steps call this function too, so only values with a changed type are checked.
    for name, value in brief.items():
        default = getattr(_DEFAULTS, name, None)
        if type(value) is type(default):
            continue
        from resilient.state_dict.statefuls import plain_numbers

        plain = plain_numbers(value)
        if name in _NUMBERS_OR_NONE and isinstance(plain, bool):
            plain = float(plain)
        if not _is_kind(default, plain, may_be_none=name in _NUMBERS_OR_NONE):
            raise _unsavable(name, value)
        brief[name] = plain
    return brief


def _unsavable(name: str, value: Any) -> UnsavableState:
    kind = type(value).__name__
    return UnsavableState(
        f"cannot save the trainer's state: `{name}` was set to a value of the class `{kind}`, "
        "which a resume rejects; older checkpoints are intact",
        path=f"trainer_state/{name}",
        hint=f"set `{name}` of the trainer's state to a value of its own kind",
    )


# Facts about this process, not about training. All ranks save equal values, which are never
# restored.
_OWN = ("is_local_process_zero", "is_world_process_zero")
_NUMBERS_OR_NONE = frozenset({"best_metric", "best_global_step"})


_LOGGED = LogHistoryField()


@dataclass
class TrainerState:
    """Contents of ``trainer_state.json``, with Transformers' names.

    ``best_model_checkpoint`` is ``checkpoint-<best_global_step>`` without a generation; the part
    ``best`` of a checkpoint names the exact checkpoint.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int = 0
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = _LOGGED  # type: ignore[assignment]
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    @property
    def history(self) -> LogHistory:
        """History behind ``log_history``, to append or read without building the list."""
        return self._history  # type: ignore[attr-defined, no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all fields; the same on every rank.

        The history is :class:`~resilient.format.state_json.JsonRows` unless a caller requested the
        list. Callbacks may have set NumPy numbers or tensors; the copy has numbers.

        Raises:
            UnsavableState: A resume would reject a field, or an entry is not a dict of numbers.
        """
        brief = fast_asdict(self, _brief(cast("Any", type(self))))
        return _savable(brief) | {"log_history": self.history.saved()} | dict.fromkeys(_OWN, True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the known fields; fields of a newer version are ignored.

        Raises:
            TypeError: A value has the wrong type. No field was changed.
        """
        field_names = {attribute.name for attribute in fields(self)} - set(_OWN)
        known_fields = {name: state_dict[name] for name in field_names & set(state_dict)}
        _require_kinds(known_fields)
        for name, value in known_fields.items():
            setattr(self, name, value)

    def begin_anew(self) -> None:
        """Reset the fields of an earlier training; facts about this process stay."""
        self.load_state_dict(TrainerState().state_dict())

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state as ``trainer_state.json``."""
        from pathlib import Path

        fields_of_state = asdict(replace(self, log_history=self.history.copied()))
        fields_of_state |= _savable(
            {name: fields_of_state[name] for name in _brief(cast("Any", type(self)))}
        )
        text = json.dumps(fields_of_state, indent=2, sort_keys=True) + "\n"
        Path(json_path).write_text(text, encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a ``trainer_state.json``; unknown fields are ignored.

        Raises:
            IntegrityError: The file is not a valid trainer state.
        """
        from pathlib import Path

        try:
            loaded = json.loads(Path(json_path).read_text(encoding="utf-8"))
            field_names = {attribute.name for attribute in fields(cls)}
            known_fields = {name: value for name, value in loaded.items() if name in field_names}
            _require_kinds(known_fields)
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise IntegrityError(
                f"`{json_path}` is not a trainer state: {error}",
                key=str(json_path),
                hint="resilient ckpt verify REPO, or take the file of an older checkpoint",
            ) from error
        return cls(**known_fields)

    def measured(self) -> dict[str, float]:
        """Return the metrics of the evaluations at the current step, by name."""
        entries: Iterator[Any] = self.history.newest()
        latest = takewhile(
            lambda entry: isinstance(entry, dict) and entry.get("step") == self.global_step, entries
        )
        return {
            name: value
            for entry in reversed([*latest])
            for name, value in entry.items()
            if name.startswith("eval_") and isinstance(value, int | float)
        }

    def init_training_references(
        self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any
    ) -> None:
        """Set the length of a training and its trial.

        Args:
            trainer: Trainer whose ``hp_name`` names trials.
            max_steps: Number of the last step.
            num_train_epochs: Number of epochs, including a partial one.
            trial: Trial of a hyper-parameter search, a dict of its values, or None.
        """
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_hyper_param_search = trial is not None
        self.trial_name = self.trial_params = None
        if trial is not None:
            self.trial_name = trainer.hp_name(trial) if trainer.hp_name else None
            self.trial_params = dict(getattr(trial, "params", trial))

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Convert the intervals of ``args`` to whole steps; a value below 1 is a ratio."""
        eval_steps = args.logging_steps if args.eval_steps is None else args.eval_steps
        self.logging_steps = absolute_steps(args.logging_steps, max_steps)
        self.eval_steps = absolute_steps(eval_steps, max_steps)
        self.save_steps = absolute_steps(args.save_steps, max_steps)


_DEFAULTS = TrainerState()


@cache
def _brief(kind: Any) -> tuple[str, ...]:
    """Return the names of all fields except the history, which may be long."""
    return tuple(attribute.name for attribute in fields(kind) if attribute.name != "log_history")


def _require_kinds(taken: Mapping[str, Any]) -> None:
    """Raise TypeError if a field's value has another type than its default."""
    for name, value in taken.items():
        if not _is_kind(
            getattr(_DEFAULTS, name, None), value, may_be_none=name in _NUMBERS_OR_NONE
        ):
            raise TypeError(f"`{name}` cannot be {value!r:.40}")


def _is_kind(default: Any, value: Any, *, may_be_none: bool) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float) or (may_be_none and value is not None):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, list):
        is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
        return is_list or isinstance(value, JsonRows)
    return isinstance(value, dict) if isinstance(default, dict) else True


def absolute_steps(steps: float, max_steps: int) -> int:
    """Return ``steps``; a value below 1 is a ratio of ``max_steps``, rounded up."""
    return math.ceil(max_steps * steps) if 0 < steps < 1 else int(steps)


@dataclass
class TrainerControl:
    """Flags that callbacks set for the training loop. The loop clears a flag after acting on it."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        """Clear the flag that stopped an earlier training."""
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        """Clear the flag that ended the previous epoch."""
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        """Clear the flags of the previous step."""
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Return all flags in Transformers' export format."""
        return {"args": asdict(self), "attributes": {}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TrainerControl:
        """Return a control with the flags from ``state``."""
        return cls(**state["args"])

    def state_dict(self) -> dict[str, bool]:
        """Return the flags that must survive a resume.

        After an interrupted evaluation, the evaluate flag and the save that follows are included.
        All other flags are handled before a checkpoint is saved.
        """
        flags = {
            "should_training_stop": self.should_training_stop,
            "should_epoch_stop": self.should_epoch_stop,
        }
        if not self.should_evaluate:
            return flags
        return {**flags, "should_evaluate": True, "should_save": self.should_save}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the known flags."""
        for attribute in fields(self):
            if attribute.name in state_dict:
                setattr(self, attribute.name, bool(state_dict[attribute.name]))
