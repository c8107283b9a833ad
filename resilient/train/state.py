"""TrainerState, TrainerControl, log history.

What a run logged since its first step: a list for who looks at it, text for who does not.

A run of a million steps may have a hundred thousand entries. A life adds its own, so neither a
resume nor a save walks through all of them.

TrainerState and TrainerControl: where training is, and what the loop should do next.

The state is a pure function of training: it holds no time, no speed and no generation, so two
runs can be compared by equality. Timings are events.
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
    """Entries in the order in which they were logged.

    Args:
        entries: those that are there already; a list is kept, for whoever gave it may change it.
    """

    def __init__(self, entries: list[Entry] | JsonRows) -> None:
        self._list = None if isinstance(entries, JsonRows) else entries
        self._rows = entries if isinstance(entries, JsonRows) else JsonRows()
        self._new_rows: list[str] = []
        self._read: tuple[JsonRows, Entry] | None = None

    def note(self, entry: Entry) -> None:
        """Add an entry as it is now."""
        row = _row_of(entry) if self._list is None else None
        if row is None:
            self.opened().append(entry)
        else:
            self._new_rows.append(row)

    def opened(self) -> list[Entry]:
        """Return the list of all entries, which is the history from here on.

        Raises:
            IntegrityError: what a checkpoint held are no entries.
        """
        if self._list is None:
            self._list = _entries(self._joined().trees)
            self._rows = JsonRows()
        return self._list

    def copied(self) -> list[Entry]:
        """Return all entries in a list that may be changed without changing this.

        Raises:
            IntegrityError: what a checkpoint held are no entries.
        """
        return _entries(self._joined().trees) if self._list is None else _copies(self._list)

    def newest(self) -> Iterator[Entry]:
        """Yield the entries from the last one back; they are not to be changed.

        Raises:
            IntegrityError: what a checkpoint held are no entries.
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
            # Asked at each step, while there are new ones rarely.
            trees = islice(trees, 1, None)
        yield self._read[1]
        while entries := _entries(lambda: list(islice(trees, 1))):
            yield entries[0]


class LogHistoryField:
    """The field ``log_history`` of a state: a list, made when somebody asks for it.

    The state keeps the :class:`History` as ``_history``.
    """

    def __get__(self, state: Any, kind: type) -> Any:
        # A dataclass asks for the default of the field.
        return () if state is None else state._history.opened()  # noqa: SLF001 - its own field

    def __set__(self, state: Any, entries: Any) -> None:
        is_kept = isinstance(entries, list | JsonRows)
        state._history = LogHistory(entries if is_kept else list(entries) or JsonRows())  # noqa: SLF001


def _row_of(entry: Entry) -> str | None:
    """Return an entry as a document has it; None if it holds what a document cannot."""
    # Here, as arguments can be read and shown without torch.
    from resilient.state_dict.flatten import flatten

    try:
        tree, tensors = flatten(_FIELD, entry)
    except UnsavableState:  # whoever saves it says so, with its path
        return None
    return None if tensors else row_of(tree)


def _entries(trees: Callable[[], list[Any]]) -> list[Entry]:
    from resilient.state_dict.flatten import unflatten

    try:
        found = unflatten(trees(), _no_tensor)
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error)) from error
    if not all(type(one) is dict for one in found):
        raise _damaged("not each of its entries is an object")
    return found  # type: ignore[no-any-return]


def _no_tensor(name: str) -> NoReturn:
    raise _damaged(f"it names the tensor `{name}`")


def _damaged(why: str) -> IntegrityError:
    return IntegrityError(
        f"the `{_FIELD}` that a checkpoint held cannot be read: {why}",
        hint="nothing that training needs is in it: go on with `trainer.state.log_history = []`",
    )


def _copies(entries: list[Entry]) -> list[Entry]:
    # The history of a long run is most of a state, and `deepcopy` takes its time.
    return [
        dict(one) if _PLAIN.issuperset(map(type, one.values())) else deepcopy(one)
        for one in entries
    ]


# Facts about this process, not about training: every rank shows the same ones, keeps its own.
_OWN = ("is_local_process_zero", "is_world_process_zero")
_NUMBERS_OR_NONE = frozenset({"best_metric", "best_global_step"})


_LOGGED = LogHistoryField()


@dataclass
class TrainerState:
    """What ``trainer_state.json`` holds, with the names the field knows.

    ``best_model_checkpoint`` is ``checkpoint-<best_global_step>`` without a generation; the part
    ``best`` of a checkpoint names the exact one.
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
        """What ``log_history`` is made of: to add to it or read it without making the list."""
        return self._history  # type: ignore[attr-defined, no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all fields; the same on every rank.

        The history is :class:`~resilient.format.state_json.JsonRows` unless somebody asked for the list.
        """
        brief = fast_asdict(self, _brief(cast("Any", type(self))))
        return brief | {"log_history": self.history.saved()} | dict.fromkeys(_OWN, True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the known fields; unknown ones, of a newer version, are left alone.

        Raises:
            TypeError: one has a value that this field cannot have; nothing was taken.
        """
        known = {one.name for one in fields(self)} - set(_OWN)
        taken = {name: state_dict[name] for name in known & set(state_dict)}
        _require_kinds(taken)
        for name, value in taken.items():
            setattr(self, name, value)

    def begin_anew(self) -> None:
        """Forget a training that is over; what is a fact about this process stays."""
        self.load_state_dict(TrainerState().state_dict())

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state as the field's ``trainer_state.json``."""
        from pathlib import Path

        told = asdict(replace(self, log_history=self.history.copied()))
        text = json.dumps(told, indent=2, sort_keys=True) + "\n"
        Path(json_path).write_text(text, encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a ``trainer_state.json``; fields that we do not know are ignored.

        Raises:
            IntegrityError: it is no such file.
        """
        from pathlib import Path

        try:
            loaded = json.loads(Path(json_path).read_text(encoding="utf-8"))
            known = {one.name for one in fields(cls)}
            taken = {name: value for name, value in loaded.items() if name in known}
            _require_kinds(taken)
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise IntegrityError(
                f"`{json_path}` is no trainer state: {error}",
                key=str(json_path),
                hint="resilient ckpt verify REPO, or take the file of an older checkpoint",
            ) from error
        return cls(**taken)

    def measured(self) -> dict[str, float]:
        """Return the metrics of the evaluations at the present step, by name."""
        latest = takewhile(lambda one: one.get("step") == self.global_step, self.history.newest())
        return {
            name: value
            for entry in reversed([*latest])
            for name, value in entry.items()
            if name.startswith("eval_") and isinstance(value, int | float)
        }

    def init_training_references(
        self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any
    ) -> None:
        """Take what a training begins with: its length, and the trial that it is of.

        Args:
            trainer: its ``hp_name`` names trials.
            max_steps: the number of the last step.
            num_train_epochs: the epochs that are begun.
            trial: of a hyper-parameter search, or a dict of its values, or None.
        """
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_hyper_param_search = trial is not None
        self.trial_name = self.trial_params = None
        if trial is not None:
            self.trial_name = trainer.hp_name(trial) if trainer.hp_name else None
            self.trial_params = dict(getattr(trial, "params", trial))

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Turn the cadences of ``args`` into whole steps; a value below 1 is a ratio."""
        eval_steps = args.logging_steps if args.eval_steps is None else args.eval_steps
        self.logging_steps = absolute_steps(args.logging_steps, max_steps)
        self.eval_steps = absolute_steps(eval_steps, max_steps)
        self.save_steps = absolute_steps(args.save_steps, max_steps)


@cache
def _brief(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields but for the history, which may be long."""
    return tuple(one.name for one in fields(kind) if one.name != "log_history")


def _require_kinds(taken: Mapping[str, Any]) -> None:
    """Raise TypeError where a field has a value of another kind than its default."""
    defaults = TrainerState()
    for name, value in taken.items():
        if not _is_kind(getattr(defaults, name), value, may_be_none=name in _NUMBERS_OR_NONE):
            raise TypeError(f"`{name}` cannot be {value!r:.40}")


def _is_kind(default: Any, value: Any, *, may_be_none: bool) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float) or (may_be_none and value is not None):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, list):
        is_list = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        return is_list or isinstance(value, JsonRows)
    return isinstance(value, dict) if isinstance(default, dict) else True


def absolute_steps(steps: float, max_steps: int) -> int:
    """Return ``steps``, or the ratio ``steps`` of ``max_steps`` rounded up when below 1."""
    return math.ceil(max_steps * steps) if 0 < steps < 1 else int(steps)


@dataclass
class TrainerControl:
    """What callbacks ask of the loop; the loop clears a flag when it has obeyed."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        """Clear what an earlier training was stopped by."""
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        """Clear what gave up the epoch before."""
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        """Clear what was asked for at the step before."""
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Return all flags, as Transformers exports them."""
        return {"args": asdict(self), "attributes": {}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TrainerControl:
        """Return a control with the flags that ``state`` returned."""
        return cls(**state["args"])

    def state_dict(self) -> dict[str, bool]:
        """Return the flags that outlive a step, and an evaluation that was cut short.

        With that, the save that was to come after it; else all others are done when one is made.
        """
        flags = {
            "should_training_stop": self.should_training_stop,
            "should_epoch_stop": self.should_epoch_stop,
        }
        if not self.should_evaluate:
            return flags
        return {**flags, "should_evaluate": True, "should_save": self.should_save}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the flags that are known."""
        for one in fields(self):
            if one.name in state_dict:
                setattr(self, one.name, bool(state_dict[one.name]))
