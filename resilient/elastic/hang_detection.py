"""Deadlines learned from progress; who is to blame (pure).

Whether the ranks get on: signs of progress against deadlines learned from this run (pure).

============================== ========================================================
a rank is                      it is overdue after
============================== ========================================================
in a step                      the greatest of: the floor, 10 x the median step, twice
                               the longest step seen
in its first step, or between  the greatest of: the patience, twice the longest it has
steps, loading, compiling ...  been in that phase
stopped (SIGSTOP)              the deadline of a step, whatever it was doing
outside training               see :mod:`resilient.elastic.hang_detection`
============================== ========================================================

Ranks that train together wait for the one behind. So the group hangs when every rank with the
fewest steps done is overdue; who is ahead only waits, and is not blamed. Until a few steps were
seen the patience stands in for the deadline of a step.

Whether a rank is stuck before training, or after it: nobody knows how long that takes (pure).

============================== ========================================================
a rank is                      it is overdue the patience after
============================== ========================================================
not heard of, or not in        the last sign of any rank, while another one waits that has
training yet (`starting`)      come further, and before any of them has done a step
out of training (`ending`)     the end of another rank with 0, or a later sign of any rank,
                               once none is in training any more
============================== ========================================================

A slow start is no hang, and neither is a job that its ranks leave one after the other. So somebody
has to wait; and a rank that was never heard of is blamed only where another one cannot begin
without it. A job whose ranks show no signs is never judged.

Which host of several is to blame for a hang (pure).

An agent sees its own ranks alone. When one rank hangs all others wait for it in a collective, and
become overdue in the same moment on every host. So hosts tell each other how the rank stands that
holds them up most, if any does, and compare:

1. a stopped rank holds all others up, however far it had come;
2. else whoever has done the fewest steps;
3. of those, one that still has time: nobody is judged before it;
4. then who is stuck in the kernel, or busy: who sleeps waits for somebody, most often;
5. then who is in a phase that needs nobody else, and who waits longest.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from resilient.distributed.heartbeat import Phase, ProgressRecord
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

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
class LearnedDeadlines:
    """What the lives of a run have shown so far; one value for all ranks.

    Attributes:
        median_seconds: of a step; None before enough were seen.
        longest_seconds: in each phase, by phase.
    """

    median_seconds: float | None = None
    longest_seconds: tuple[float, ...] = (0.0,) * len(Phase)

    def after(self, shown: Sequence[ProgressRecord]) -> LearnedDeadlines:
        """Return what is known when these signs are as well; the slowest rank counts."""
        medians = [
            statistics.median(one.step_seconds)
            for one in shown
            if len(one.step_seconds) >= STEPS_TO_LEARN
        ]
        longest = zip(*(one.longest_seconds for one in shown), self.longest_seconds, strict=True)
        return LearnedDeadlines(
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
class RankStatus:
    """One rank at one moment.

    Attributes:
        rank: among all.
        signs: what it showed last.
        state: of its process, as the kernel has it: R running, S sleeping, D in the kernel,
            T stopped, empty when not known.
        stopped_since_seconds: since when it was seen stopped, None when it is not.
    """

    rank: int
    signs: ProgressRecord
    state: str = ""
    stopped_since_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class OverdueRank:
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

    culprits: tuple[OverdueRank, ...] = field(default=())
    median_seconds: float | None = None

    @property
    def first(self) -> OverdueRank:
        """The rank that is blamed."""
        return self.culprits[0]


def find_hang(
    vitals: Sequence[RankStatus], learned: LearnedDeadlines, rule: HangRule, now_seconds: float
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
    vital: RankStatus, learned: LearnedDeadlines, rule: HangRule, now_seconds: float
) -> OverdueRank | None:
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
    return OverdueRank(
        rank=vital.rank,
        step=signs.step,
        phase=signs.phase,
        state=vital.state,
        waited_seconds=now_seconds - since_seconds,
        deadline_seconds=deadline_seconds,
    )


_STATES = ("T", "D", "R")


def suspicion(one: OverdueRank) -> tuple[int, float, int]:
    """Order: the stopped, those stuck in the kernel, the busy; then whoever waits longest.

    Who sleeps waits for somebody, most often.
    """
    return state_place(one.state), -one.waited_seconds, one.rank


def state_place(state: str) -> int:
    """Return the place of a process's state in that order."""
    return _STATES.index(state) if state in _STATES else len(_STATES)


STARTING = "starting"
ENDING = "ending"


class StartupStage(IntEnum):
    """How far a rank came."""

    NOWHERE = 0
    STARTED = 1
    TRAINING = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """One rank that runs.

    Attributes:
        rank: among all.
        signs: what it showed last, None when nothing.
        state: of its process, as the kernel has it.
    """

    rank: int
    signs: ProgressRecord | None = None
    state: str = ""

    @property
    def reach(self) -> StartupStage:
        """How far it came."""
        if self.signs is None:
            return StartupStage.NOWHERE
        if self.signs.phase is not Phase.OUTSIDE:
            return StartupStage.TRAINING
        return StartupStage.LEFT if self.signs.has_trained else StartupStage.STARTED

    @property
    def step(self) -> int:
        """The last step that it finished, -1 before the first."""
        return -1 if self.signs is None else self.signs.step

    def quiet_since(self, from_seconds: float) -> float:
        """Return when it showed its last sign, at the earliest ``from_seconds``."""
        return max(from_seconds, self.signs.since_seconds if self.signs else from_seconds)


def find_starting(seen: Collection[ObservedRank]) -> list[ObservedRank]:
    """Return the ranks that others wait for before the first step; none if nobody waits."""
    reaches = [one.reach for one in seen if one.reach is not StartupStage.LEFT]
    if not reaches or min(reaches) == max(reaches) or any(one.step >= 0 for one in seen):
        return []
    return [one for one in seen if one.reach is min(reaches)]


def find_stuck_start(
    seen: Collection[ObservedRank], rule: HangRule, began_seconds: float, now_seconds: float
) -> Hang | None:
    """Return the hang of a group whose ranks do not all get into training.

    Args:
        seen: the ranks that run.
        rule: its patience is how long nobody may show a sign.
        began_seconds: when the ranks were started, on the monotonic clock.
        now_seconds: on the same.
    """
    quiet_since = max([began_seconds, *(one.quiet_since(began_seconds) for one in seen)])
    starting = find_starting(seen)
    if not starting or now_seconds - quiet_since <= rule.patience_seconds:
        return None
    return _hang_of(starting, STARTING, rule, began_seconds, now_seconds)


def find_stuck_end(
    seen: Collection[ObservedRank], rule: HangRule, ended_seconds: float | None, now_seconds: float
) -> Hang | None:
    """Return the hang of a group of which a rank has ended, and the others do not.

    Args:
        seen: the ranks that run.
        rule: its patience is how long nobody may show a sign.
        ended_seconds: when the first rank had ended with 0, None while none has.
        now_seconds: on the monotonic clock.
    """
    if ended_seconds is None or not are_quiet(seen, rule, ended_seconds, now_seconds):
        return None
    heard = [one for one in seen if one.signs is not None]
    return _hang_of(heard, ENDING, rule, ended_seconds, now_seconds)


def are_quiet(
    seen: Collection[ObservedRank], rule: HangRule, from_seconds: float, now_seconds: float
) -> bool:
    """Say whether ranks were heard of, but none trains, and none showed a sign for the patience."""
    heard = [one for one in seen if one.signs is not None]
    if not heard or any(one.reach is StartupStage.TRAINING for one in heard):
        return False
    last_seconds = max(one.quiet_since(from_seconds) for one in heard)
    return now_seconds - last_seconds > rule.patience_seconds


def _hang_of(
    ranks: Collection[ObservedRank],
    edge: str,
    rule: HangRule,
    from_seconds: float,
    now_seconds: float,
) -> Hang:
    late = [
        OverdueRank(
            rank=one.rank,
            step=one.step,
            phase=Phase.OUTSIDE,
            state=one.state,
            waited_seconds=now_seconds - one.quiet_since(from_seconds),
            deadline_seconds=rule.patience_seconds,
            edge=edge,
        )
        for one in ranks
    ]
    return Hang(tuple(sorted(late, key=suspicion)))


_ALONE = frozenset({Phase.BETWEEN, Phase.LOADING, Phase.COMPILING})


@dataclass(frozen=True, slots=True)
class HostHangStatus:
    """How the rank of a host stands that holds the others up most.

    Attributes:
        rank: among all.
        step: the last that it finished.
        phase: what it is doing.
        state: of its process.
        waited_seconds: since its last sign.
        is_overdue: whether that is too long.
    """

    rank: int
    step: int
    phase: Phase
    state: str
    waited_seconds: float
    is_overdue: bool

    @property
    def place(self) -> tuple[int, int, Phase]:
        """Where it is, which changes as soon as it gets on."""
        return self.rank, self.step, self.phase

    def order(self) -> tuple[bool, int, bool, int, bool, float, int]:
        """Return by what standings are compared; the least is to blame."""
        return (
            self.state != "T",
            self.step,
            self.is_overdue,
            state_place(self.state),
            self.phase not in _ALONE,
            -self.waited_seconds,
            self.rank,
        )

    def dump(self, number: int) -> str:
        """Return it as text, with a number that grows."""
        return json.dumps({"number": number, **asdict(self)})


def parse_standing(text: str) -> tuple[int, HostHangStatus]:
    """Return what :meth:`Standing.dump` made.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(text)
        number, phase = int(found.pop("number")), Phase(found.pop("phase"))
        return number, HostHangStatus(phase=phase, **found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no standing: {text[:80]}") from error


def standing_of(
    vitals: Iterable[RankStatus], learned: LearnedDeadlines, rule: HangRule, now_seconds: float
) -> HostHangStatus | None:
    """Return that of the rank which holds up the others most; None when none of them trains."""
    found = [
        HostHangStatus(
            rank=one.rank,
            step=one.signs.step,
            phase=one.signs.phase,
            state=one.state,
            waited_seconds=now_seconds - one.signs.since_seconds,
            is_overdue=find_overdue(one, learned, rule, now_seconds) is not None,
        )
        for one in vitals
        if one.signs.phase is not Phase.OUTSIDE or one.state == "T"
    ]
    return min(found, key=HostHangStatus.order, default=None)


def find_culprit(ours: HostHangStatus, theirs: Iterable[HostHangStatus]) -> HostHangStatus | None:
    """Return who of the other hosts is to blame rather than we; None when we are."""
    worst = min(theirs, key=HostHangStatus.order, default=ours)
    return worst if worst.order() < ours.order() else None
