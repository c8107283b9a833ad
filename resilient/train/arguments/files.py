"""Arguments from a file: TOML, YAML or JSON, each key with the line that it stands on."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTES_MAX = 1 << 20
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class ArgumentFile:
    """What a file says.

    Attributes:
        path: the file, as the user named it.
        values: its keys and values.
        lines: key -> the line that it stands on, from 1.
    """

    path: str
    values: dict[str, Any]
    lines: dict[str, int]

    def place(self, name: str) -> str:
        """Return where a key stands, for an error."""
        line = self.lines.get(name)
        return f"{self.path}, line {line}" if line else self.path


def read_argument_file(path: str | Path) -> ArgumentFile:
    """Read a file of arguments; its suffix says the format.

    Raises:
        ConfigError: it cannot be read, is no TOML, YAML or JSON, says a key twice, or is no
            table of keys and values.
    """
    file = Path(path).expanduser()
    formats = dict(zip(SUFFIXES, (_toml, _yaml, _yaml, _json), strict=True))
    if file.suffix.lower() not in formats:
        raise ConfigError(f"`{path}` is no file of arguments: name it .toml, .yaml or .json")
    try:
        text = _text_of(file)
        values = formats[file.suffix.lower()](text)
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read arguments from `{path}`: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"`{path}` is no {file.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"`{path}` holds no arguments: write one `name: value` for each")
    return ArgumentFile(str(path), values, _lines(text, values))


def _text_of(file: Path) -> str:
    with file.open("rb") as opened:
        data = opened.read(_BYTES_MAX + 1)
    if len(data) > _BYTES_MAX:
        raise ValueError(f"it is longer than {_BYTES_MAX} bytes")
    return data.decode("utf-8-sig")


def _toml(text: str) -> Any:
    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; the last of two equal keys must not win in silence."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"it says `{key}` twice")
        made[key] = value
    return made


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
    """Return the first line that begins with each key, at the outermost level where it shows."""
    found: dict[str, int] = {}
    for key in values:
        begins: Callable[[str], Any] = re.compile(
            rf"""\s*[\[{{,]?\s*["']?{re.escape(key)}["']?\s*[:=\]]"""
        ).match
        numbers = (number for number, line in enumerate(text.splitlines(), 1) if begins(line))
        line = next(numbers, None)
        if line is not None:
            found[key] = line
    return found
