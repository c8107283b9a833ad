"""Parser of arguments from a TOML, YAML or JSON file and from the command line.

The command line takes precedence over the file. ``parse_arguments`` takes any number of
dataclasses, as HfArgumentParser does. Each option goes to the dataclass that has a field with its
name. The option of a field is ``--learning-rate`` or ``--learning_rate``. The option of a boolean
field is ``--fp16``, ``--fp16 false`` or ``--no-fp16``. The values of a list follow the option. A
dict is given as JSON. Secret fields (``storage_options``, ``hub_token``) have no option, because
`ps` shows command lines.
"""

from __future__ import annotations

import argparse
import enum
import json
import re
import sys
import tomllib
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from resilient.errors import ConfigError, UsageError
from resilient.train.arguments.choices import CHOICES, did_you_mean, refused
from resilient.train.arguments.deprecated import (
    ELSEWHERE,
    MEANT,
    OLD_NAMES,
    RENAMED,
    rename_deprecated,
)
from resilient.train.arguments.value_types import NONE, from_text, is_secret, kinds_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from dataclasses import Field

_BYTES_MAX = 1 << 20
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class ArgumentFile:
    """Content of an argument file.

    Attributes:
        path: Path as the user gave it.
        values: Keys and values.
        lines: Line number of each key, from 1.
    """

    path: str
    values: dict[str, Any]
    lines: dict[str, int]

    def place(self, name: str) -> str:
        """Return file and line of a key, for an error."""
        line = self.lines.get(name)
        return f"{self.path}, line {line}" if line else self.path


def read_argument_file(path: str | os.PathLike[str], suffix: str = "") -> ArgumentFile:
    """Read a file of arguments.

    Args:
        path: Path of the file.
        suffix: Suffix that selects the format; empty: the suffix of the file.

    Raises:
        ConfigError: The file cannot be read, is not TOML, YAML or JSON, repeats a key, or is
            not a table of keys and values.
    """
    file = Path(path).expanduser()
    formats = dict(zip(SUFFIXES, (_toml, _yaml, _yaml, _json), strict=True))
    suffix = suffix or file.suffix.lower()
    if suffix not in formats:
        raise ConfigError(f"`{path}` is not a file of arguments: name it .toml, .yaml or .json")
    try:
        text = _text_of(file)
        values = formats[suffix](text)
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read arguments from `{path}`: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"`{path}` is not {suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"`{path}` holds no arguments: write `name: value` for each")
    return ArgumentFile(str(path), values, _lines(text, values))


def _text_of(file: Path) -> str:
    with file.open("rb") as text_file:
        data = text_file.read(_BYTES_MAX + 1)
    if len(data) > _BYTES_MAX:
        raise ValueError(f"it is longer than {_BYTES_MAX} bytes")
    return data.decode("utf-8-sig")


def _toml(text: str) -> Any:
    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; refuse equal keys instead of silently keeping the last."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"it has `{key}` twice")
        values[key] = value
    return values


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "YAML needs PyYAML, which is not installed; TOML and JSON need nothing",
            hint="pip install pyyaml",
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            _once([(key.value, None) for key, _ in node.value])
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _lines(text: str, values: dict[str, Any]) -> dict[str, int]:
    """Return the first line that begins with each key, at any level."""
    line_by_key: dict[str, int] = {}
    for key in values:
        begins: Callable[[str], Any] = re.compile(
            rf"""\s*[\[{{,]?\s*["']?{re.escape(key)}["']?\s*[:=\]]"""
        ).match
        numbers = (number for number, line in enumerate(text.splitlines(), 1) if begins(line))
        line = next(numbers, None)
        if line is not None:
            line_by_key[key] = line
    return line_by_key


def from_file(cls: type, path: str | Path, changes: Mapping[str, Any]) -> Any:
    """Return an object of ``cls`` from a file, overridden by ``changes``.

    Raises:
        ConfigError: The file cannot be read, or a value is not accepted. The message names file and
            line.
    """
    values, places = file_values((cls,), read_argument_file(path))
    return build(cls, {**values, **rename_deprecated(changes, names_of(cls), depth=4)}, places)


def file_values(
    classes: Sequence[type], file: ArgumentFile
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a file under the current argument names, and the place of each value.

    Raises:
        ConfigError: A key is unknown, or its text cannot be converted. The message names file and
            line.
    """
    owner_by_name = {name: cls for cls in classes for name in names_of(cls)}
    values: dict[str, Any] = {}
    for name, value in file.values.items():
        if name not in owner_by_name and name not in OLD_NAMES:
            elsewhere_hint = f"; {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            hint = elsewhere_hint or did_you_mean(name, [*owner_by_name, *OLD_NAMES])
            raise ConfigError(f"{file.place(name)}: `{name}` is not an argument{hint}")
        try:
            values[name] = _read(owner_by_name, name, value)
        except ConfigError as error:
            raise ConfigError(f"{file.place(name)}: {error.message}") from error
    renamed_values = rename_deprecated(values, set(owner_by_name), depth=6)
    places = {name: file.place(name) for name in renamed_values}
    places |= {RENAMED[name]: file.place(name) for name in values if name in RENAMED}
    return renamed_values, places


def _read(owner_by_name: Mapping[str, type], name: str, value: Any) -> Any:
    """Return a file's value; parse a text for a field without text, such as YAML's ``1e-4``."""
    today = RENAMED.get(name, name)
    if today not in owner_by_name:
        return value
    kinds = kinds_of(owner_by_name[today]).get(today, ())
    if isinstance(value, str) and kinds and str not in kinds:
        return from_text(name, value, kinds, is_hidden=_is_hidden(owner_by_name[today], today))
    return value


def _is_hidden(cls: type, name: str) -> bool:
    """Return whether errors must not show the value of a field."""
    return any(field.name == name and is_secret(field) for field in fields(cls))


def build(cls: type, values: Mapping[str, Any], places: Mapping[str, str]) -> Any:
    """Return an object of ``cls``; an error also names the source of each mentioned value.

    Raises:
        ConfigError: A value is not accepted, or a value without default is missing.
    """
    missing_names = [
        field.name
        for field in fields(cls)
        if field.init
        and field.name not in values
        and field.default is MISSING
        and field.default_factory is MISSING
    ]
    if missing_names:
        raise ConfigError(
            f"`{missing_names[0]}` is required: set it in a file or on the command line"
        )
    hints = _hints(cls)
    converted_values = {
        name: _special(name, value, hints.get(name)) for name, value in values.items()
    }
    try:
        return cls(**converted_values)
    except ConfigError as error:
        lines = [
            f"`{name}` is from {place}"
            for name, place in places.items()
            if f"`{name}`" in error.message
        ]
        places_text = f" ({'; '.join(lines)})" if lines else ""
        raise ConfigError(f"{error.message}{places_text}", hint=error.hint) from error


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        return {}


def _special(name: str, value: Any, hint: Any) -> Any:
    """Return the value for a field whose type is an enum, a Literal or a typed list.

    Raises:
        ConfigError: The type has no such value.
    """
    parts = [part for part in typing.get_args(hint) or (hint,) if part is not NONE]
    kind = parts[0] if len(parts) == 1 else hint
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        raise refused(name, value, f"use one of {', '.join(map(str, typing.get_args(hint)))}")
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and not isinstance(value, kind):
        try:
            return kind(value)
        except ValueError as error:
            spellings = ", ".join(str(part.value) for part in kind)
            raise refused(name, value, f"use one of {spellings}") from error
    if typing.get_origin(hint) is list and isinstance(value, list) and kind is not hint:
        return [
            from_text(name, part, (kind,)) if isinstance(part, str) and kind is not str else part
            for part in value
        ]
    return value


def names_of(cls: type) -> set[str]:
    """Return the names of the constructor's fields of a dataclass."""
    return {field.name for field in fields(cls) if field.init}


_CONFIG = "config"


class _Parser(argparse.ArgumentParser):
    """Parser that raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `--help` lists the options")


def parse_arguments(*classes: type, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Return one object of each dataclass, from a command line and the file that it names.

    The command line overrides ``--config FILE``, which overrides the defaults::

        args, mine = parse_arguments(TrainingArguments, MyArguments)

    Args:
        classes: Dataclasses; no two may have a field of the same name.
        argv: Words after the script's name; None: the words of this process.

    Raises:
        UsageError: An option is unknown, or lacks its value.
        ConfigError: A value is not accepted. The message names the file or the option.
    """
    owners = _owners(classes)
    words = list(sys.argv[1:] if argv is None else argv)
    namespace, unknown_words = _parser(classes).parse_known_args(words)
    if unknown_words:
        options = ["--" + name.replace("_", "-") for name in (*owners, *OLD_NAMES, _CONFIG)]
        hint = did_you_mean(unknown_words[0].partition("=")[0].replace("_", "-"), options)
        raise UsageError(f"`{unknown_words[0]}` is not an option{hint}; `--help` lists them")
    parsed = vars(namespace)
    config = parsed.pop(_CONFIG, None)
    values, places = file_values(classes, read_argument_file(config)) if config else ({}, {})
    renamed_values, option_places = _option_values(parsed, owners)
    return _build_all(classes, values | renamed_values, places | option_places)


def _option_values(
    parsed: Mapping[str, Any], owners: Mapping[str, type]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of options under the current names, and the option of each value."""
    values = rename_deprecated(_values(parsed, owners), set(owners), depth=5)
    return values, {name: f"--{name.replace('_', '-')}" for name in values}


def _build_all(
    classes: Sequence[type], values: Mapping[str, Any], places: Mapping[str, str]
) -> tuple[Any, ...]:
    """Return one object of each class, from the values of all classes."""
    return tuple(
        build(cls, {name: values[name] for name in names_of(cls) & values.keys()}, places)
        for cls in classes
    )


def _owners(classes: Sequence[type]) -> dict[str, type]:
    """Return the class of each field.

    Raises:
        ConfigError: Two classes have the same field.
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
    _add_options(parser, classes)
    return parser


def _add_options(
    parser: argparse.ArgumentParser, classes: Sequence[type], *, with_secrets: bool = False
) -> None:
    """Add the options of all fields, and of the old names of arguments."""
    for cls in classes:
        kinds = kinds_of(cls)
        group = parser.add_argument_group(getattr(cls, "_argument_group_name", cls.__name__))
        for field in fields(cls):
            if field.init and (with_secrets or not is_secret(field)):
                _add(group, field, kinds.get(field.name, ()))
    field_names = {name for cls in classes for name in names_of(cls)}
    if not any(cls.__module__.startswith("resilient.") for kind in classes for cls in kind.__mro__):
        return
    for name in sorted(OLD_NAMES - field_names):
        parser.add_argument(
            *_spellings(name),
            dest=name,
            nargs="?",
            const="true",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _add(group: Any, argument: Field[Any], kinds: tuple[Any, ...]) -> None:
    """Add the options of one field."""
    shape: dict[str, Any] = {"metavar": _metavar(kinds), "default": argparse.SUPPRESS}
    aliases = argument.metadata.get("aliases", ())
    if "choices" in argument.metadata:  # of a script's own field
        shape["choices"] = [str(choice) for choice in argument.metadata["choices"]]
    if list in kinds:
        shape["nargs"] = "*"
    elif bool in kinds:
        shape |= {"nargs": "?", "const": "true"}
    group.add_argument(
        *_spellings(argument.name),
        *([aliases] if isinstance(aliases, str) else aliases),
        dest=argument.name,
        help=_help(argument),
        **shape,
    )
    if bool in kinds:
        negative = _spellings(f"no_{argument.name}")
        group.add_argument(
            *negative,
            dest=argument.name,
            action="store_const",
            const="false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


def _metavar(kinds: tuple[Any, ...]) -> str:
    names = {bool: "BOOL", int: "N", float: "X", dict: "JSON", list: "NAME"}
    return next((names[kind] for kind in kinds if kind in names), "TEXT")


def _help(argument: Field[Any]) -> str:
    default = "" if argument.default is MISSING else f" [default: {argument.default}]"
    choices_text = (
        f" (one of {', '.join(CHOICES[argument.name])})" if argument.name in CHOICES else ""
    )
    text = f"{argument.metadata.get('help', '')}{choices_text}{default}".strip()
    # Scripts for Transformers double the sign and use `%(default)s`, as argparse requires.
    return re.sub(r"%%|%(?!\()", "%%", text)


def _values(options: Mapping[str, Any], owner_by_name: Mapping[str, type]) -> dict[str, Any]:
    """Return the values of the command line's words."""
    values: dict[str, Any] = {}
    for name, words in options.items():
        today = RENAMED.get(name, name)
        owner = owner_by_name.get(today)
        kinds = kinds_of(owner).get(today, ()) if owner else ()
        if isinstance(words, list):
            values[name] = _one_or_list(name, words, kinds)
        elif name in MEANT:
            values[name] = _old_value(name, words)
        else:
            is_hidden = owner is not None and _is_hidden(owner, today)
            values[name] = from_text(name, words, kinds, is_hidden=is_hidden)
    return values


def _one_or_list(name: str, words: list[str], kinds: tuple[Any, ...]) -> Any:
    """Return the value of a single word, or the list of several."""
    if len(words) == 1:
        spelled = from_text(name, words[0], kinds)
        return spelled if not isinstance(spelled, str) or str in kinds else [spelled]
    return words if words or bool not in kinds else True


def _old_value(name: str, word: str) -> Any:
    """Return an old argument's value: a flag, a number, or a name."""
    return from_text(name, word, (bool, int, float, str) if word != "0" else (int,))


class HfArgumentParser(_Parser):
    """Parser of dataclasses with the interface of Transformers' ``HfArgumentParser``.

    The options are those of ``parse_arguments``, but secret fields have options too, because
    scripts for Transformers pass them. ``ps`` shows these options: prefer an argument file.

    >>> parser = HfArgumentParser(TrainingArguments)                   # doctest: +SKIP
    >>> args, = parser.parse_args_into_dataclasses()                   # doctest: +SKIP

    Args:
        dataclass_types: Dataclass or dataclasses; no two may have a field of the same name.
        **kwargs: Options of ``argparse.ArgumentParser``.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        is_one = isinstance(dataclass_types, type) and is_dataclass(dataclass_types)
        self.dataclass_types: list[Any] = (
            [dataclass_types] if is_one else list(cast("Any", dataclass_types or ()))
        )
        self._owners = _owners(self.dataclass_types)
        _add_options(self, self.dataclass_types, with_secrets=True)

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,  # noqa: FBT001, FBT002 - the field's signature
        look_for_args_file: bool = True,  # noqa: FBT001, FBT002 - as above
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Return one object of each dataclass from a command line.

        The command line overrides the files of words.

        Args:
            args: Words after the script's name; None: the words of this process.
            return_remaining_strings: Whether to also return the list of unknown words.
            look_for_args_file: Whether to read ``<script>.args`` beside the script.
            args_filename: File of words to read instead.
            args_file_flag: Option that names a file of words; the option may be repeated.

        Returns:
            The objects, then a namespace if the script added options, then the unknown words if
            they are requested.

        Raises:
            UsageError: An option is unknown, or lacks its value.
            ConfigError: A value is not accepted.
        """
        words = list(sys.argv[1:] if args is None else args)
        files = [args_filename] if args_filename else []
        if not files and look_for_args_file and sys.argv:
            files = [str(Path(sys.argv[0]).with_suffix(".args"))]
        if args_file_flag:
            flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            flags.add_argument(args_file_flag, dest="files", action="append", default=[])
            flagged, words = flags.parse_known_args(words)
            files += flagged.files
        for file in reversed(files):
            if Path(file).is_file():
                words = [*Path(file).read_text(encoding="utf-8").split(), *words]
        namespace, unknown_words = self.parse_known_args(words)
        if unknown_words and not return_remaining_strings:
            hint = did_you_mean(unknown_words[0], self._option_string_actions)
            self.error(f"`{unknown_words[0]}` is not an option{hint}")
        ours = {*self._owners, *OLD_NAMES}
        parsed = {name: value for name, value in vars(namespace).items() if name in ours}
        for name in parsed:
            delattr(namespace, name)
        objects = _build_all(self.dataclass_types, *_option_values(parsed, self._owners))
        extra = [namespace] if vars(namespace) else []
        return (*objects, *extra, *([unknown_words] if return_remaining_strings else []))

    def parse_dict(
        self,
        args: Mapping[str, Any],
        allow_extra_keys: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> tuple[Any, ...]:
        """Return one object of each dataclass from values by name.

        Raises:
            ConfigError: A name is unknown and extra keys are not allowed, or a value is refused.
        """
        known = self._known(args) if allow_extra_keys else args
        return _build_all(
            self.dataclass_types, rename_deprecated(known, set(self._owners)), places={}
        )

    def parse_json_file(
        self,
        json_file: str | os.PathLike[str],
        allow_extra_keys: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> tuple[Any, ...]:
        """Return one object of each dataclass from a JSON file.

        Raises:
            ConfigError: As for :meth:`parse_dict`; the message names file and line.
        """
        return self._from_file(read_argument_file(json_file, ".json"), allow_extra_keys)

    def parse_yaml_file(
        self,
        yaml_file: str | os.PathLike[str],
        allow_extra_keys: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> tuple[Any, ...]:
        """Return one object of each dataclass from a YAML file.

        Raises:
            ConfigError: As for :meth:`parse_dict`; the message names file and line.
        """
        return self._from_file(read_argument_file(yaml_file, ".yaml"), allow_extra_keys)

    def _from_file(self, file: ArgumentFile, allow_extra_keys: bool) -> tuple[Any, ...]:  # noqa: FBT001 - as above
        if allow_extra_keys:
            file = replace(file, values=self._known(file.values))
        return _build_all(self.dataclass_types, *file_values(self.dataclass_types, file))

    def _known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        ours = {*self._owners, *OLD_NAMES}
        return {name: value for name, value in values.items() if name in ours}
