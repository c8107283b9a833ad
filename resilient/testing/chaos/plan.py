"""Fault plans in TOML, and the injections that a seed draws from a plan.

An injection is one fault at one step of the run. The same plan and seed give the same injections. A
plan is a user's file, or a plan shipped with this package and chosen by its name.

::

    description = "purpose of the plan"

    [[fault]]
    kind = "kill"            # see resilient.testing.chaos.plan.FaultKind
    target = "rank"          # rank, agent, host or job; only for kill
    during = "save"          # waits until a checkpoint is being written; only for kill
    at = [0.2, 0.5]          # injected after 20 % to 50 % of the run's steps
    count = 2
    seconds = 5.0            # not for preempt, bit_flip, or kill of a target other than host
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class FaultKind(StrEnum):
    """Kind of a fault."""

    KILL = "kill"
    """SIGKILL to a rank, to an agent, to every process of a host, or of the job."""
    STOP = "stop"
    """SIGSTOP to a rank, and SIGCONT after ``seconds``."""
    SLOW = "slow"
    """A rank gets a tenth of its CPU time for ``seconds``."""
    PREEMPT = "preempt"
    """SIGTERM to the job; the job is started again after its end."""
    NOTICE = "notice"
    """A preemption notice in a file for ``seconds`` ahead; the job is started again."""
    BIT_FLIP = "bit_flip"
    """SIGKILL to the job and one flipped bit in its newest checkpoint."""
    STORAGE_ERROR = "storage_error"
    """fsync fails with EIO for ``seconds``, or until a save has failed."""
    DISK_FULL = "disk_full"
    """The file system of the checkpoints is full for ``seconds``, or until a save has failed."""
    CLOCK_SKEW = "clock_skew"
    """The wall clock of the job jumps by ``seconds`` and stays shifted."""
    CUT = "cut"
    """The link of a host is down for ``seconds``, and comes back."""


class Target(StrEnum):
    """Target of a ``kill``."""

    RANK = "rank"
    AGENT = "agent"
    HOST = "host"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """Entry of a plan.

    Attributes:
        kind: Kind of the fault.
        target: Target of a ``kill``.
        in_save: Whether the fault waits until a checkpoint is being written.
        at: Part of the run in which the fault comes, as two shares of its steps.
        count: Number of injections.
        seconds: Length of the fault, shift of a clock, or absence of a killed host.
    """

    kind: FaultKind
    target: Target = Target.RANK
    in_save: bool = False
    at: tuple[float, float] = (0.1, 0.9)
    count: int = 1
    seconds: float = 0.0

    @property
    def needs_hosts(self) -> bool:
        """True if the fault hits one of several hosts."""
        is_kill = self.kind is FaultKind.KILL and self.target is Target.HOST
        return is_kill or self.kind is FaultKind.CUT

    @property
    def is_of_host(self) -> bool:
        """True if the fault hits one host, and not a rank of any host or all hosts."""
        is_agent = self.kind is FaultKind.KILL and self.target is Target.AGENT
        return self.needs_hosts or is_agent or self.kind is FaultKind.NOTICE


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """Plan of faults from one file.

    Attributes:
        name: Name of the file.
        description: Purpose of the plan in one line.
        faults: Entries of the plan.
    """

    name: str
    description: str
    faults: tuple[PlannedFault, ...] = ()

    def has(self, kind: FaultKind) -> bool:
        """Return whether any fault has this kind."""
        return any(fault.kind is kind for fault in self.faults)

    @property
    def needs_hosts(self) -> bool:
        """True if any fault hits one of several hosts."""
        return any(fault.needs_hosts for fault in self.faults)


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault at its place in the run.

    Attributes:
        fault: Entry of the plan.
        share: Time of the fault, as a share of the run's steps.
        victim: Rank or host to hit, as a share of their number.
        draw: Random number for other choices, such as the bit to flip.
    """

    fault: PlannedFault
    share: float
    victim: float
    draw: int

    def step(self, steps: int) -> int:
        """Return the step of the fault in a run of ``steps`` steps; never the last one."""
        return min(max(1, round(self.share * steps)), max(1, steps - 1))

    def rank(self, ranks: int) -> int:
        """Return the rank to hit, of ``ranks`` ranks."""
        return min(int(self.victim * ranks), ranks - 1)

    def host(self, hosts: int) -> int:
        """Return the host to hit, of ``hosts`` hosts."""
        return self.rank(hosts)


def draw_injections(plan: ChaosPlan, seed: int) -> tuple[Injection, ...]:
    """Return the injections of a plan in the order of the run; equal for equal plans and seeds.

    Each injection is drawn separately, so that a new entry at the end of a plan changes no other.
    """
    strikes = []
    for number, fault in enumerate(plan.faults):
        for nth in range(fault.count):
            random = Random(f"{seed}/{number}/{nth}")  # noqa: S311 - repeatable is the point
            share = random.uniform(*fault.at)
            strikes.append(Injection(fault, share, random.random(), random.randrange(1 << 32)))
    return tuple(sorted(strikes, key=lambda injection: injection.share))


PLANS = Path(__file__).parent / "plans"
COUNT_MAX = 100
_SECONDS_MAX = 1e9
_TIMED = {
    FaultKind.STOP: 5.0,
    FaultKind.SLOW: 5.0,
    FaultKind.NOTICE: 30.0,
    FaultKind.STORAGE_ERROR: 60.0,
    FaultKind.DISK_FULL: 60.0,
    FaultKind.CLOCK_SKEW: 3600.0,
    FaultKind.CUT: 30.0,
}
"""Kinds with ``seconds``, and their defaults."""
_AWAY_SECONDS = 10.0


def shipped() -> list[ChaosPlan]:
    """Return the plans shipped with the package, by name."""
    return [read_plan(path.stem) for path in sorted(PLANS.glob("*.toml"))]


def read_plan(name: str) -> ChaosPlan:
    """Return a plan, by the name of a shipped plan or from a file.

    Raises:
        ConfigError: The plan does not exist or is invalid.
    """
    is_path = name.endswith(".toml") or "/" in name
    path = Path(name) if is_path else PLANS / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        plan_names = ", ".join(sorted(plan_file.stem for plan_file in PLANS.glob("*.toml")))
        raise ConfigError(
            f"no plan `{name}`: {error}"
            if is_path
            else f"no plan `{name}`: there are {plan_names}",
            hint="resilient chaos list, or the path of a .toml file",
        ) from error
    return parse_plan(text, path.stem)


def parse_plan(text: str, name: str) -> ChaosPlan:
    """Parse a plan in TOML.

    Raises:
        ConfigError: The text is not TOML, or the plan is invalid.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"plan `{name}` is not TOML: {error}") from error
    _require_known_keys(document, ("description", "fault"), f"plan `{name}`")
    entries = document.get("fault", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"plan `{name}`: `fault` is not a list of tables", hint="[[fault]]")
    faults = (
        _fault(entry, f"fault {nth} of plan `{name}`") for nth, entry in enumerate(entries, 1)
    )
    return ChaosPlan(name, str(document.get("description", "")), tuple(faults))


def _fault(entry: Mapping[str, Any], where: str) -> PlannedFault:
    kind = FaultKind(_word(entry, "kind", [member.value for member in FaultKind], where))
    kind_keys = ("target", "during") if kind is FaultKind.KILL else ()
    target = Target(_word(entry, "target", [member.value for member in Target], where, "rank"))
    seconds = _AWAY_SECONDS if target is Target.HOST else _TIMED.get(kind)
    time_keys = () if seconds is None else ("seconds",)
    _require_known_keys(
        entry, ("kind", "at", "count", *kind_keys, *time_keys), f"{where} (`{kind}`)"
    )
    return PlannedFault(
        kind,
        target=target,
        in_save=_word(entry, "during", ["save", ""], where, "") == "save",
        at=_window(entry.get("at", [0.1, 0.9]), where),
        count=_count(entry.get("count", 1), where),
        seconds=_seconds(entry.get("seconds", seconds or 0.0), kind, where),
    )


def _require_known_keys(entry: Mapping[str, Any], names: Collection[str], where: str) -> None:
    for name in entry:
        if name not in names:
            similar_names = get_close_matches(name, names, 1)
            suggestion = (
                f"did you mean `{similar_names[0]}`?"
                if similar_names
                else f"known: {', '.join(names)}"
            )
            raise ConfigError(f"{where}: `{name}` is unknown there", hint=suggestion)


def _word(
    entry: Mapping[str, Any], name: str, words: list[str], where: str, default: str | None = None
) -> str:
    word = entry.get(name, default)
    if word not in words:
        problem = "is missing" if word is None else f"is {word!r}"
        options = ", ".join(choice for choice in words if choice)
        raise ConfigError(f"{where}: `{name}` {problem}", hint=f"one of {options}")
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


def _seconds(value: Any, kind: FaultKind, where: str) -> float:
    lowest = -_SECONDS_MAX if kind is FaultKind.CLOCK_SKEW else 0
    if not _is_number(value) or not lowest <= value <= _SECONDS_MAX:
        raise ConfigError(f"{where}: `seconds` is {value!r}", hint="a number such as 5.0")
    return float(value)


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)
