"""What a run logged since its first step: a list for who looks at it, text for who does not.

A run of a million steps may have a hundred thousand entries. A life adds its own, so neither a
resume nor a save walks through all of them.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from resilient.errors import IntegrityError, UnsavableState
from resilient.format.rows import Rows, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Entry = dict[str, Any]

_FIELD = "log_history"
_PLAIN = frozenset({type(None), bool, int, float, str})


class History:
    """Entries in the order in which they were logged.

    Args:
        entries: those that are there already; a list is kept, for whoever gave it may change it.
    """

    def __init__(self, entries: list[Entry] | Rows) -> None:
        self._list = None if isinstance(entries, Rows) else entries
        self._rows = entries if isinstance(entries, Rows) else Rows()
        self._new_rows: list[str] = []
        self._read: tuple[Rows, Entry] | None = None

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
            self._rows = Rows()
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

    def saved(self) -> list[Entry] | Rows:
        """Return a copy for a checkpoint."""
        return self._joined() if self._list is None else _copies(self._list)

    def _joined(self) -> Rows:
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


class Logged:
    """The field ``log_history`` of a state: a list, made when somebody asks for it.

    The state keeps the :class:`History` as ``_history``.
    """

    def __get__(self, state: Any, kind: type) -> Any:
        # A dataclass asks for the default of the field.
        return () if state is None else state._history.opened()  # noqa: SLF001 - its own field

    def __set__(self, state: Any, entries: Any) -> None:
        is_kept = isinstance(entries, list | Rows)
        state._history = History(entries if is_kept else list(entries) or Rows())  # noqa: SLF001


def _row_of(entry: Entry) -> str | None:
    """Return an entry as a document has it; None if it holds what a document cannot."""
    # Here, as arguments can be read and shown without torch.
    from resilient.state.tree import flatten

    try:
        tree, tensors = flatten(_FIELD, entry)
    except UnsavableState:  # whoever saves it says so, with its path
        return None
    return None if tensors else row_of(tree)


def _entries(trees: Callable[[], list[Any]]) -> list[Entry]:
    from resilient.state.tree import unflatten

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
