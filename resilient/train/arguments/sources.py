"""Arguments from a file and a command line; the command line wins over the file.

``parse_arguments`` takes any number of dataclasses, as HfArgumentParser does: options are split
among them by name. Each field is ``--learning-rate`` or ``--learning_rate``; a flag is ``--fp16``,
``--fp16 false`` or ``--no-fp16``; several values follow one option; a dict is JSON. What is
secret (``storage_options``, ``hub_token``) has no option: `ps` shows command lines.
"""

from __future__ import annotations

import enum
import typing
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.files import read_argument_file
from resilient.train.arguments.kinds import NONE, from_text, kinds_of
from resilient.train.arguments.old_names import ELSEWHERE, OLD_NAMES, RENAMED, in_todays_words
from resilient.train.arguments.words import did_you_mean, refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def from_file(cls: type, path: str | Path, changes: Mapping[str, Any]) -> Any:
    """Return an object of ``cls`` as a file says, but for ``changes``.

    Raises:
        ConfigError: the file cannot be read, or says what is not accepted; names file and line.
    """
    values, places = file_values((cls,), path)
    return build(cls, {**values, **in_todays_words(changes, names_of(cls), depth=4)}, places)


def file_values(classes: Sequence[type], path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a file under today's names, and the place of each.

    Raises:
        ConfigError: a key is unknown or its text spells no value; names file and line.
    """
    file = read_argument_file(path)
    known = {name: cls for cls in classes for name in names_of(cls)}
    values: dict[str, Any] = {}
    for name, value in file.values.items():
        if name not in known and name not in OLD_NAMES:
            more = f"; {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            hint = more or did_you_mean(name, [*known, *OLD_NAMES])
            raise ConfigError(f"{file.place(name)}: `{name}` is no argument{hint}")
        try:
            values[name] = _read(known, name, value)
        except ConfigError as error:
            raise ConfigError(f"{file.place(name)}: {error.message}") from error
    written = in_todays_words(values, set(known), depth=6)
    places = {name: file.place(name) for name in written}
    places |= {RENAMED[name]: file.place(name) for name in values if name in RENAMED}
    return written, places


def _read(known: Mapping[str, type], name: str, value: Any) -> Any:
    """Return a value of a file; what is text there and none here is read (YAML's ``1e-4``)."""
    today = RENAMED.get(name, name)
    if today not in known:
        return value
    kinds = kinds_of(known[today]).get(today, ())
    if isinstance(value, str) and kinds and str not in kinds:
        return from_text(name, value, kinds)
    return value


def build(cls: type, values: Mapping[str, Any], places: Mapping[str, str]) -> Any:
    """Return an object of ``cls``; an error says where the values that it names come from.

    Raises:
        ConfigError: a value is not accepted, or one that has no default is missing.
    """
    missing = [
        one.name
        for one in fields(cls)
        if one.init
        and one.name not in values
        and one.default is MISSING
        and one.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"`{missing[0]}` is required: set it in a file or on the command line")
    hints = _hints(cls)
    taken = {name: _special(name, value, hints.get(name)) for name, value in values.items()}
    try:
        return cls(**taken)
    except ConfigError as error:
        said = [
            f"`{name}` is from {place}"
            for name, place in places.items()
            if f"`{name}`" in error.message
        ]
        more = f" ({'; '.join(said)})" if said else ""
        raise ConfigError(f"{error.message}{more}", hint=error.hint) from error


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        return {}


def _special(name: str, value: Any, hint: Any) -> Any:
    """Return the value for a field whose type is an enum, a Literal or a typed list.

    Raises:
        ConfigError: it is none of theirs.
    """
    parts = [one for one in typing.get_args(hint) or (hint,) if one is not NONE]
    only = parts[0] if len(parts) == 1 else hint
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        raise refused(name, value, f"use one of {', '.join(map(str, typing.get_args(hint)))}")
    if isinstance(only, type) and issubclass(only, enum.Enum) and not isinstance(value, only):
        try:
            return only(value)
        except ValueError as error:
            spellings = ", ".join(str(one.value) for one in only)
            raise refused(name, value, f"use one of {spellings}") from error
    if typing.get_origin(hint) is list and isinstance(value, list) and only is not hint:
        return [
            from_text(name, one, (only,)) if isinstance(one, str) and only is not str else one
            for one in value
        ]
    return value


def names_of(cls: type) -> set[str]:
    """Return the names of the fields that a dataclass takes."""
    return {one.name for one in fields(cls) if one.init}
