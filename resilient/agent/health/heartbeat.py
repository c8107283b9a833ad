"""Whether the ranks get on: signs of progress against deadlines learned from this run (pure).

============================== ========================================================
a rank is                      it is overdue after
============================== ========================================================
in a step                      the greatest of: the floor, 10 x the median step, twice
                               the longest step seen
in its first step, or between  the greatest of: the patience, twice the longest it has
steps, loading, compiling ...  been in that phase
stopped (SIGSTOP)              the deadline of a step, whatever it was doing
outside training               see :mod:`resilient.agent.health.edges`
============================== ========================================================

Ranks that train together wait for the one behind. So the group hangs when every rank with the
fewest steps done is overdue; who is ahead only waits, and is not blamed. Until a few steps were
seen the patience stands in for the deadline of a step.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.world.pulse import Phase, Signs

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS_TO_LEARN = 5
_LONGEST_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class HangRule:
    """How long a rank may show no progress.

    Attributes:
        is_on: whether a hang is looked for at all.
        floor_seconds: a step's deadline is never shorter.
        median_factor: of a step's deadline.
        patience_seconds: for all that is no step, and for steps before any is known.
        fixed_seconds: a step's deadline as the user gave it; None learns it.
    """

    is_on: bool = True
    floor_seconds: float = 60.0
    median_factor: float = 10.0
    patience_seconds: float = 1800.0
    fixed_seconds: float | None = None

    def describe(self) -> str:
        """Return the rule in a line."""
        if not self.is_on:
            return "not looked for"
        floor, factor = f"{self.floor_seconds:g} s", f"{self.median_factor:g} x the median step"
        fixed = "" if self.fixed_seconds is None else f"a step above {self.fixed_seconds:g} s"
        return f"{fixed or f'a step above {floor} and {factor}'}; else {self.patience_seconds:g} s"

    def doubled(self, times: int) -> HangRule:
        """Return the rule after so many hangs in a row: patience may have been what was missing."""
        factor = 2.0**times
        return replace(
            self,
            floor_seconds=self.floor_seconds * factor,
            patience_seconds=self.patience_seconds * factor,
            median_factor=self.median_factor * factor,
            fixed_seconds=None if self.fixed_seconds is None else self.fixed_seconds * factor,
        )


def parse_hang_rule(deadline: str, floor_seconds: float, patience_seconds: float) -> HangRule:
    """Return the rule that a user asks for.

    Args:
        deadline: ``auto``, ``off``, or a step's deadline in seconds.
        floor_seconds: of a deadline that is learned.
        patience_seconds: for all that is no step.

    Raises:
        ConfigError: it is none of these.
    """
    word = deadline.strip().lower()
    if word in ("auto", "off"):
        return HangRule(word == "auto", floor_seconds, patience_seconds=patience_seconds)
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"--hang-deadline {deadline!r} is neither auto nor off nor a number of seconds",
            hint="for example --hang-deadline 300",
        )
    return HangRule(patience_seconds=patience_seconds, fixed_seconds=seconds)


@dataclass(frozen=True, slots=True)
class Learned:
    """What the lives of a run have shown so far; one value for all ranks.

    Attributes:
        median_seconds: of a step; None before enough were seen.
        longest_seconds: in each phase, by phase.
    """

    median_seconds: float | None = None
    longest_seconds: tuple[float, ...] = (0.0,) * len(Phase)

    def after(self, shown: Sequence[Signs]) -> Learned:
        """Return what is known when these signs are as well; the slowest rank counts."""
        medians = [
            statistics.median(one.step_seconds)
            for one in shown
            if len(one.step_seconds) >= STEPS_TO_LEARN
        ]
        longest = zip(*(one.longest_seconds for one in shown), self.longest_seconds, strict=True)
        return Learned(
            max(medians, default=self.median_seconds), tuple(max(one) for one in longest)
        )

    def deadline_seconds(self, phase: Phase, rule: HangRule) -> float | None:
        """Return how long a rank may be in ``phase``; None for ever."""
        if phase is Phase.OUTSIDE:
            return None
        twice_seconds = _LONGEST_FACTOR * self.longest_seconds[phase]
        if phase is not Phase.STEP:
            return max(rule.patience_seconds, twice_seconds)
        if rule.fixed_seconds is not None:
            return rule.fixed_seconds
        if self.median_seconds is None:
            return max(rule.patience_seconds, twice_seconds)
        return max(rule.floor_seconds, rule.median_factor * self.median_seconds, twice_seconds)

    def stopped_deadline_seconds(self, rule: HangRule) -> float:
        """Return how long a rank may be stopped: nothing that is stopped gets on by itself."""
        if self.median_seconds is None and rule.fixed_seconds is None:
            return rule.floor_seconds
        return self.deadline_seconds(Phase.STEP, rule) or rule.floor_seconds


@dataclass(frozen=True, slots=True)
class Vital:
    """One rank at one moment.

    Attributes:
        rank: among all.
        signs: what it showed last.
        state: of its process, as the kernel has it: R running, S sleeping, D in the kernel,
            T stopped, empty when not known.
        stopped_since_seconds: since when it was seen stopped, None when it is not.
    """

    rank: int
    signs: Signs
    state: str = ""
    stopped_since_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Overdue:
    """A rank that made no progress within its deadline; outside training ``edge`` says where."""

    rank: int
    step: int
    phase: Phase
    state: str
    waited_seconds: float
    deadline_seconds: float
    edge: str = ""

    @property
    def doing(self) -> str:
        """What it was doing, in a word."""
        return self.edge or self.phase.name.lower()


@dataclass(frozen=True, slots=True)
class Hang:
    """The group makes no progress.

    Attributes:
        culprits: the ranks behind, the most suspect first.
        median_seconds: of a step, as far as it was learned.
    """

    culprits: tuple[Overdue, ...] = field(default=())
    median_seconds: float | None = None

    @property
    def first(self) -> Overdue:
        """The rank that is blamed."""
        return self.culprits[0]


def find_hang(
    vitals: Sequence[Vital], learned: Learned, rule: HangRule, now_seconds: float
) -> Hang | None:
    """Return the hang of a group, None while there is none.

    Args:
        vitals: of the ranks that run and have shown signs.
        learned: from this run.
        rule: how long is too long.
        now_seconds: on the monotonic clock.
    """
    training = [one for one in vitals if one.signs.phase is not Phase.OUTSIDE]
    stopped = [one for one in vitals if one.stopped_since_seconds is not None]
    fewest = min((one.signs.step for one in training), default=0)
    behind = [one for one in training if one.signs.step == fewest]
    late = {one.rank: find_overdue(one, learned, rule, now_seconds) for one in [*behind, *stopped]}
    found = [one for one in late.values() if one is not None]
    # Who is stopped holds all others up, however far it had come.
    is_stopped = any(late[one.rank] is not None for one in stopped)
    if not found or not (is_stopped or all(late[one.rank] is not None for one in behind)):
        return None
    return Hang(tuple(sorted(found, key=suspicion)), learned.median_seconds)


def find_overdue(
    vital: Vital, learned: Learned, rule: HangRule, now_seconds: float
) -> Overdue | None:
    """Return how a rank is overdue, None while it has time."""
    signs = vital.signs
    since_seconds, deadline_seconds = (
        signs.since_seconds,
        learned.deadline_seconds(signs.phase, rule),
    )
    if vital.stopped_since_seconds is not None:
        stopped_seconds = learned.stopped_deadline_seconds(rule)
        if now_seconds - vital.stopped_since_seconds > stopped_seconds:
            since_seconds, deadline_seconds = vital.stopped_since_seconds, stopped_seconds
    if deadline_seconds is None or now_seconds - since_seconds <= deadline_seconds:
        return None
    return Overdue(
        rank=vital.rank,
        step=signs.step,
        phase=signs.phase,
        state=vital.state,
        waited_seconds=now_seconds - since_seconds,
        deadline_seconds=deadline_seconds,
    )


_STATES = ("T", "D", "R")


def suspicion(one: Overdue) -> tuple[int, float, int]:
    """Order: the stopped, those stuck in the kernel, the busy; then whoever waits longest.

    Who sleeps waits for somebody, most often.
    """
    return state_place(one.state), -one.waited_seconds, one.rank


def state_place(state: str) -> int:
    """Return the place of a process's state in that order."""
    return _STATES.index(state) if state in _STATES else len(_STATES)
