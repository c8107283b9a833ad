"""Arguments from a command line: one option for each field of some dataclasses."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NoReturn

from resilient.errors import ConfigError, UsageError
from resilient.train.arguments.choices import CHOICES
from resilient.train.arguments.kinds import from_text, kinds_of
from resilient.train.arguments.old_names import MEANT, OLD_NAMES, RENAMED, in_todays_words
from resilient.train.arguments.sources import build, file_values, names_of
from resilient.train.arguments.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import Field

_CONFIG = "config"


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `--help` lists the options")


def parse_arguments(*classes: type, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Return one object of each dataclass, from a command line and the file that it names.

    The command line wins over ``--config FILE``, which wins over the defaults::

        args, mine = parse_arguments(TrainingArguments, MyArguments)

    Args:
        classes: dataclasses; no two may have a field of one name.
        argv: the words after the script's name; None: those of this process.

    Raises:
        UsageError: an option is unknown, or lacks its value.
        ConfigError: a value is not accepted; says whether file or command line said so.
    """
    known = _owners(classes)
    words = list(sys.argv[1:] if argv is None else argv)
    given, left = _parser(classes).parse_known_args(words)
    if left:
        options = ["--" + name.replace("_", "-") for name in (*known, *OLD_NAMES, _CONFIG)]
        hint = did_you_mean(left[0].partition("=")[0].replace("_", "-"), options)
        raise UsageError(f"`{left[0]}` is no option{hint}; `--help` lists them")
    said = vars(given)
    config = said.pop(_CONFIG, None)
    values, places = file_values(classes, config) if config else ({}, {})
    told = in_todays_words(_values(said, known), set(known))
    values |= told
    places |= {name: f"--{name.replace('_', '-')}" for name in told}
    made = []
    for cls in classes:
        own = names_of(cls)
        made.append(build(cls, {name: values[name] for name in own & values.keys()}, places))
    return tuple(made)


def _owners(classes: Sequence[type]) -> dict[str, type]:
    """Return which class has which field.

    Raises:
        ConfigError: two classes have the same one.
    """
    owners: dict[str, type] = {}
    for cls in classes:
        for name in names_of(cls):
            if name in owners:
                raise ConfigError(
                    f"both {owners[name].__name__} and {cls.__name__} have a field `{name}`: "
                    "rename one of them"
                )
            owners[name] = cls
    return owners


def _parser(classes: Sequence[type]) -> _Parser:
    parser = _Parser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument(f"--{_CONFIG}", metavar="FILE", help="TOML, YAML or JSON file of arguments")
    for cls in classes:
        kinds = kinds_of(cls)
        group = parser.add_argument_group(cls.__name__)
        for one in fields(cls):
            if one.init and not one.metadata.get("is_secret"):
                _add(group, one, kinds.get(one.name, ()))
    taken = {name for cls in classes for name in names_of(cls)}
    for name in sorted(OLD_NAMES - taken):
        parser.add_argument(
            *_spellings(name), dest=name, nargs="?", const="true", help=argparse.SUPPRESS
        )
    return parser


def _add(group: Any, one: Field[Any], kinds: tuple[Any, ...]) -> None:
    """Add the options of one field."""
    shape: dict[str, Any] = {"metavar": _metavar(kinds)}
    if list in kinds:
        shape["nargs"] = "*"
    elif bool in kinds:
        shape |= {"nargs": "?", "const": "true"}
    group.add_argument(*_spellings(one.name), dest=one.name, help=_help(one), **shape)
    if bool in kinds:
        negative = _spellings(f"no_{one.name}")
        group.add_argument(
            *negative, dest=one.name, action="store_const", const="false", help=argparse.SUPPRESS
        )


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


def _metavar(kinds: tuple[Any, ...]) -> str:
    names = {bool: "BOOL", int: "N", float: "X", dict: "JSON", list: "NAME"}
    return next((names[kind] for kind in kinds if kind in names), "TEXT")


def _help(one: Field[Any]) -> str:
    default = "" if one.default is MISSING else f" [default: {one.default}]"
    several = f" (one of {', '.join(CHOICES[one.name])})" if one.name in CHOICES else ""
    return f"{one.metadata.get('help', '')}{several}{default}".strip().replace("%", "%%")


def _values(said: Mapping[str, Any], known: Mapping[str, type]) -> dict[str, Any]:
    """Return the values that the words of the command line spell."""
    values: dict[str, Any] = {}
    for name, words in said.items():
        today = RENAMED.get(name, name)
        kinds = kinds_of(known[today]).get(today, ()) if today in known else ()
        if isinstance(words, list):
            values[name] = _several(name, words, kinds)
        elif name in MEANT:
            values[name] = _old_value(name, words)
        else:
            values[name] = from_text(name, words, kinds)
    return values


def _several(name: str, words: list[str], kinds: tuple[Any, ...]) -> Any:
    """Return what one word spells by itself, or the list of several."""
    if len(words) == 1:
        spelled = from_text(name, words[0], kinds)
        return spelled if not isinstance(spelled, str) or str in kinds else [spelled]
    return words if words or bool not in kinds else True


def _old_value(name: str, word: str) -> Any:
    """Return an old argument's value: a flag, a number, or a name."""
    return from_text(name, word, (bool, int, float, str) if word != "0" else (int,))
