"""TOML to a plan: shipped by name, or a file of the user's own.

::

    description = "what it is for"

    [[fault]]
    kind = "kill"            # see resilient.testing.chaos.faults.Kind
    target = "rank"          # rank, agent, host or job; of kill only
    during = "save"          # waits until a checkpoint is being written; of kill only
    at = [0.2, 0.5]          # shares of the run's steps
    count = 2
    seconds = 5.0            # of all but preempt, bit_flip, and a kill of no host
"""

from __future__ import annotations

import math
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.testing.chaos.faults import ChaosPlan, Kind, Planned, Target

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PLANS = Path(__file__).parent / "plans"
COUNT_MAX = 100
_SECONDS_MAX = 1e9
_TIMED = {
    Kind.STOP: 5.0,
    Kind.SLOW: 5.0,
    Kind.NOTICE: 30.0,
    Kind.STORAGE_ERROR: 60.0,
    Kind.DISK_FULL: 60.0,
    Kind.CLOCK_SKEW: 3600.0,
    Kind.CUT: 30.0,
}
"""Kinds with ``seconds``, and how many they have when a plan does not say."""
_AWAY_SECONDS = 10.0


def shipped() -> list[ChaosPlan]:
    """Return the plans that come with the package, by name."""
    return [read_plan(path.stem) for path in sorted(PLANS.glob("*.toml"))]


def read_plan(name: str) -> ChaosPlan:
    """Return a plan by the name of a shipped one, or from a file.

    Raises:
        ConfigError: there is none, or it says something that no plan can say.
    """
    is_path = name.endswith(".toml") or "/" in name
    path = Path(name) if is_path else PLANS / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(one.stem for one in PLANS.glob("*.toml")))
        raise ConfigError(
            f"no plan `{name}`: {error}" if is_path else f"no plan `{name}`: there are {known}",
            hint="resilient chaos list, or the path of a .toml file",
        ) from error
    return parse_plan(text, path.stem)


def parse_plan(text: str, name: str) -> ChaosPlan:
    """Return the plan that TOML spells.

    Raises:
        ConfigError: it is no TOML, or says something that no plan can say.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"plan `{name}` is no TOML: {error}") from error
    _known(document, ("description", "fault"), f"plan `{name}`")
    entries = document.get("fault", [])
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ConfigError(f"plan `{name}`: `fault` is no list of tables", hint="[[fault]]")
    faults = (_fault(one, f"fault {nth} of plan `{name}`") for nth, one in enumerate(entries, 1))
    return ChaosPlan(name, str(document.get("description", "")), tuple(faults))


def _fault(entry: Mapping[str, Any], where: str) -> Planned:
    kind = Kind(_word(entry, "kind", [one.value for one in Kind], where))
    own = ("target", "during") if kind is Kind.KILL else ()
    target = Target(_word(entry, "target", [one.value for one in Target], where, "rank"))
    seconds = _AWAY_SECONDS if target is Target.HOST else _TIMED.get(kind)
    timed = () if seconds is None else ("seconds",)
    _known(entry, ("kind", "at", "count", *own, *timed), f"{where} (`{kind}`)")
    return Planned(
        kind,
        target=target,
        in_save=_word(entry, "during", ["save", ""], where, "") == "save",
        at=_window(entry.get("at", [0.1, 0.9]), where),
        count=_count(entry.get("count", 1), where),
        seconds=_seconds(entry.get("seconds", seconds or 0.0), kind, where),
    )


def _known(entry: Mapping[str, Any], names: Collection[str], where: str) -> None:
    for name in entry:
        if name not in names:
            near = get_close_matches(name, names, 1)
            meant = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"{where}: nothing is called `{name}` there", hint=meant)


def _word(
    entry: Mapping[str, Any], name: str, words: list[str], where: str, default: str | None = None
) -> str:
    word = entry.get(name, default)
    if word not in words:
        said = "is missing" if word is None else f"is {word!r}"
        options = ", ".join(one for one in words if one)
        raise ConfigError(f"{where}: `{name}` {said}", hint=f"one of {options}")
    return str(word)


def _window(value: Any, where: str) -> tuple[float, float]:
    pair = value if isinstance(value, list) else [value, value]
    if len(pair) == 2 and all(map(_is_number, pair)):  # noqa: PLR2004 - from, to
        first, last = map(float, pair)
        if 0 <= first <= last <= 1:
            return first, last
    raise ConfigError(f"{where}: `at` is {value!r}", hint="shares of the run, such as [0.2, 0.5]")


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= COUNT_MAX:
        raise ConfigError(f"{where}: `count` is {value!r}", hint=f"a number from 1 to {COUNT_MAX}")
    return value


def _seconds(value: Any, kind: Kind, where: str) -> float:
    lowest = -_SECONDS_MAX if kind is Kind.CLOCK_SKEW else 0
    if not _is_number(value) or not lowest <= value <= _SECONDS_MAX:
        raise ConfigError(f"{where}: `seconds` is {value!r}", hint="a number such as 5.0")
    return float(value)


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)
