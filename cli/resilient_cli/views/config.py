"""Arguments with where they came from, as answers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from resilient_cli.render import Answer, Table

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument.

    Attributes:
        name: as in Python.
        value: as JSON can hold it.
        origin: a file and its line, a checkpoint, ``default`` or ``follows from others``.
        is_said: somebody wrote it down.
    """

    name: str
    value: Any
    origin: str
    is_said: bool


def settings(source: str, found: Sequence[Setting], *, everything: bool) -> Answer:
    """Return arguments, those at their defaults only when everything is wanted."""
    shown = [one for one in found if everything or one.origin != "default"]
    document = {"source": source, "settings": [asdict(one) for one in shown]}
    left = len(found) - len(shown)
    more = (f"{left} more stand at their defaults (--all shows them).",) if left else ()
    return Answer("config.show", "config", document, (_table(shown), *more), _names(shown))


def checked(file: str, said: Sequence[Setting]) -> Answer:
    """Return that a file is accepted, and what it says."""
    document = {"file": file, "ok": True, "settings": [asdict(one) for one in said]}
    text = f"{file}: {len(said)} arguments, accepted."
    return Answer("config.check", "config", document, (_table(said), text), _names(said))


def _table(found: Sequence[Setting]) -> Table:
    rows = tuple((one.name, json.dumps(one.value), one.origin) for one in found)
    return Table(("ARGUMENT", "VALUE", "FROM"), rows)


def _names(found: Sequence[Setting]) -> tuple[str, ...]:
    return tuple(one.name for one in found)
