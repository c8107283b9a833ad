"""Hang detection by deadlines learned from this run, and choice of the rank or host to blame.

All functions are pure. A rank is overdue if it makes no progress for the following time:

============================== ========================================================
a rank is                      it is overdue after
============================== ========================================================
in a step                      the greatest of: the floor, 10 x the median step, twice
                               the longest step seen
in its first step, or between  the greatest of: the patience, twice the longest time of
steps, loading, compiling ...  the rank in that phase
stopped (SIGSTOP)              the deadline of a step, in any phase
outside training               see the next table
============================== ========================================================

Ranks that train together wait for the rank with the fewest steps. So the group hangs when every
rank with the fewest steps done is overdue. Ranks with more steps only wait and are not blamed. The
floor is the option ``--hang-floor`` (60 s by default), and the patience is ``--hang-patience``.
Until 5 steps have been timed, the patience replaces the deadline of a step.

The time before and after training has no learned deadline:

============================== ========================================================
a rank is                      it is overdue when the patience has passed since
============================== ========================================================
without a heartbeat, or not    the last heartbeat of any rank, while a rank at a later
in training yet (`starting`)   stage waits, and before any rank did a step
out of training (`ending`)     the exit of another rank with 0, or a later heartbeat of
                               any rank, once no rank trains any more
============================== ========================================================

A slow start is not a hang, and ranks may leave a job one after the other. So a rank is blamed only
if another rank waits for it. A rank without a heartbeat is blamed only if another rank cannot begin
without it. A job whose ranks write no heartbeat never counts as hung.

With several hosts, an agent sees only its own ranks. When one rank hangs, all others wait for this
rank in a collective, and become overdue at the same moment on every host. Each host therefore
publishes the status of its rank that delays the others most. The hosts blame ranks in this order:

1. a stopped rank at any step, because it delays all others;
2. the rank with the fewest steps;
3. among ranks with equally many steps, no rank while one of these ranks is not overdue;
4. a rank stuck in the kernel, then a busy rank, because a sleeping rank usually waits;
5. a rank in a phase that needs no other rank, then the rank that has waited longest.
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
    """Limits on the time that a rank may show no progress.

    Attributes:
        is_on: Whether hangs are detected at all.
        floor_seconds: Lower bound of a step's deadline.
        median_factor: Factor of the median step in a step's deadline.
        patience_seconds: Deadline outside steps, and of steps while no step time is known.
        fixed_seconds: Deadline of a step from the user; None to learn the deadline.
    """

    is_on: bool = True
    floor_seconds: float = 60.0
    median_factor: float = 10.0
    patience_seconds: float = 1800.0
    fixed_seconds: float | None = None

    def describe(self) -> str:
        """Return the rule in one line."""
        if not self.is_on:
            return "off"
        floor, factor = f"{self.floor_seconds:g} s", f"{self.median_factor:g} x the median step"
        fixed = "" if self.fixed_seconds is None else f"a step above {self.fixed_seconds:g} s"
        return f"{fixed or f'a step above {floor} and {factor}'}; else {self.patience_seconds:g} s"

    def doubled(self, times: int) -> HangRule:
        """Return the rule with all deadlines doubled ``times`` times, after consecutive hangs."""
        factor = 2.0**times
        return replace(
            self,
            floor_seconds=self.floor_seconds * factor,
            patience_seconds=self.patience_seconds * factor,
            median_factor=self.median_factor * factor,
            fixed_seconds=None if self.fixed_seconds is None else self.fixed_seconds * factor,
        )


def parse_hang_rule(deadline: str, floor_seconds: float, patience_seconds: float) -> HangRule:
    """Parse the hang options of the user.

    Args:
        deadline: ``auto``, ``off``, or the deadline of a step in seconds.
        floor_seconds: Lower bound of a learned deadline.
        patience_seconds: Deadline outside steps.

    Raises:
        ConfigError: ``deadline`` has none of these forms.
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
            f"--hang-deadline {deadline!r} is not auto, off or a number of seconds",
            hint="for example --hang-deadline 300",
        )
    return HangRule(patience_seconds=patience_seconds, fixed_seconds=seconds)


@dataclass(frozen=True, slots=True)
class LearnedDeadlines:
    """Durations learned from the attempts of a run; one value for all ranks.

    Attributes:
        median_seconds: Median time of a step; None before enough steps were seen.
        longest_seconds: Longest time in each phase, by phase.
    """

    median_seconds: float | None = None
    longest_seconds: tuple[float, ...] = (0.0,) * len(Phase)

    def after(self, record: Sequence[ProgressRecord]) -> LearnedDeadlines:
        """Return the durations updated with these heartbeats; the slowest rank counts."""
        medians = [
            statistics.median(progress.step_seconds)
            for progress in record
            if len(progress.step_seconds) >= STEPS_TO_LEARN
        ]
        longest = zip(
            *(progress.longest_seconds for progress in record), self.longest_seconds, strict=True
        )
        return LearnedDeadlines(
            max(medians, default=self.median_seconds),
            tuple(max(durations) for durations in longest),
        )

    def deadline_seconds(self, phase: Phase, rule: HangRule) -> float | None:
        """Return the time that a rank may spend in ``phase``; None for no limit."""
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
        """Return the time that a rank may be stopped; a stopped rank never continues by itself."""
        if self.median_seconds is None and rule.fixed_seconds is None:
            return rule.floor_seconds
        return self.deadline_seconds(Phase.STEP, rule) or rule.floor_seconds


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of one rank at one moment.

    Attributes:
        rank: Global rank.
        heartbeat: Last heartbeat of the rank.
        state: State of the process as the kernel reports it: R running, S sleeping, D in the
            kernel, T stopped, empty if unknown.
        stopped_since_seconds: Time at which the rank was first seen stopped; None if it runs.
    """

    rank: int
    heartbeat: ProgressRecord
    state: str = ""
    stopped_since_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class OverdueRank:
    """Rank without progress within its deadline; outside training, ``stage_name`` is the stage."""

    rank: int
    step: int
    phase: Phase
    state: str
    waited_seconds: float
    deadline_seconds: float
    stage_name: str = ""

    @property
    def activity(self) -> str:
        """Stage or phase of the rank in one word."""
        return self.stage_name or self.phase.name.lower()


@dataclass(frozen=True, slots=True)
class Hang:
    """Hang of the group.

    Attributes:
        culprits: Ranks that are behind, the most suspect first.
        median_seconds: Median time of a step, if learned.
    """

    culprits: tuple[OverdueRank, ...] = field(default=())
    median_seconds: float | None = None

    @property
    def first(self) -> OverdueRank:
        """Rank that is blamed."""
        return self.culprits[0]


def find_hang(
    rank_statuses: Sequence[RankStatus],
    learned: LearnedDeadlines,
    rule: HangRule,
    now_seconds: float,
) -> Hang | None:
    """Return the hang of a group, None if there is none.

    Args:
        rank_statuses: Status of the running ranks that wrote a heartbeat.
        learned: Durations learned from this run.
        rule: Limits on the time without progress.
        now_seconds: Current time, monotonic.
    """
    training = [
        rank_status
        for rank_status in rank_statuses
        if rank_status.heartbeat.phase is not Phase.OUTSIDE
    ]
    stopped_ranks = [
        rank_status
        for rank_status in rank_statuses
        if rank_status.stopped_since_seconds is not None
    ]
    step_min = min((rank_status.heartbeat.step for rank_status in training), default=0)
    slowest = [rank_status for rank_status in training if rank_status.heartbeat.step == step_min]
    overdue_by_rank = {
        rank_status.rank: find_overdue(rank_status, learned, rule, now_seconds)
        for rank_status in [*slowest, *stopped_ranks]
    }
    overdue_ranks = [value for value in overdue_by_rank.values() if value is not None]
    # A stopped rank delays all others at any step.
    is_stopped = any(overdue_by_rank[rank_status.rank] is not None for rank_status in stopped_ranks)
    if not overdue_ranks or not (
        is_stopped or all(overdue_by_rank[rank_status.rank] is not None for rank_status in slowest)
    ):
        return None
    return Hang(tuple(sorted(overdue_ranks, key=suspicion)), learned.median_seconds)


def find_overdue(
    rank_status: RankStatus, learned: LearnedDeadlines, rule: HangRule, now_seconds: float
) -> OverdueRank | None:
    """Return the rank as overdue; None if it still has time."""
    heartbeat = rank_status.heartbeat
    since_seconds, deadline_seconds = (
        heartbeat.since_seconds,
        learned.deadline_seconds(heartbeat.phase, rule),
    )
    if rank_status.stopped_since_seconds is not None:
        stopped_seconds = learned.stopped_deadline_seconds(rule)
        if now_seconds - rank_status.stopped_since_seconds > stopped_seconds:
            since_seconds, deadline_seconds = rank_status.stopped_since_seconds, stopped_seconds
    if deadline_seconds is None or now_seconds - since_seconds <= deadline_seconds:
        return None
    return OverdueRank(
        rank=rank_status.rank,
        step=heartbeat.step,
        phase=heartbeat.phase,
        state=rank_status.state,
        waited_seconds=now_seconds - since_seconds,
        deadline_seconds=deadline_seconds,
    )


_STATES = ("T", "D", "R")


def suspicion(rank: OverdueRank) -> tuple[int, float, int]:
    """Return the sort key: stopped ranks, ranks stuck in the kernel, busy ranks, longest wait.

    A sleeping rank usually waits for another rank.
    """
    return state_place(rank.state), -rank.waited_seconds, rank.rank


def state_place(state: str) -> int:
    """Return the position of a process state in the order of :func:`suspicion`."""
    return _STATES.index(state) if state in _STATES else len(_STATES)


STARTING = "starting"
ENDING = "ending"


class StartupStage(IntEnum):
    """Stage that a rank has reached."""

    NOWHERE = 0
    STARTED = 1
    TRAINING = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """Running rank, with or without a heartbeat.

    Attributes:
        rank: Global rank.
        heartbeat: Last heartbeat, None without one.
        state: State of the process as the kernel reports it.
    """

    rank: int
    heartbeat: ProgressRecord | None = None
    state: str = ""

    @property
    def stage(self) -> StartupStage:
        """Stage that the rank has reached."""
        if self.heartbeat is None:
            return StartupStage.NOWHERE
        if self.heartbeat.phase is not Phase.OUTSIDE:
            return StartupStage.TRAINING
        return StartupStage.LEFT if self.heartbeat.has_trained else StartupStage.STARTED

    @property
    def step(self) -> int:
        """Last finished step, -1 before the first."""
        return -1 if self.heartbeat is None else self.heartbeat.step

    def quiet_since(self, from_seconds: float) -> float:
        """Return the time of the last heartbeat, but not earlier than ``from_seconds``."""
        return max(from_seconds, self.heartbeat.since_seconds if self.heartbeat else from_seconds)


def find_starting(seen: Collection[ObservedRank]) -> list[ObservedRank]:
    """Return the ranks that others wait for before the first step; empty if no rank waits."""
    stages = [
        rank_status.stage for rank_status in seen if rank_status.stage is not StartupStage.LEFT
    ]
    if (
        not stages
        or min(stages) == max(stages)
        or any(rank_status.step >= 0 for rank_status in seen)
    ):
        return []
    return [rank_status for rank_status in seen if rank_status.stage is min(stages)]


def find_stuck_start(
    seen: Collection[ObservedRank], rule: HangRule, began_seconds: float, now_seconds: float
) -> Hang | None:
    """Return the hang of a group in which some ranks never reach training.

    Args:
        seen: Running ranks.
        rule: Rule whose patience limits the time without any heartbeat.
        began_seconds: Start of the ranks, monotonic seconds.
        now_seconds: Current time, monotonic.
    """
    quiet_since = max(
        [began_seconds, *(rank_status.quiet_since(began_seconds) for rank_status in seen)]
    )
    starting = find_starting(seen)
    if not starting or now_seconds - quiet_since <= rule.patience_seconds:
        return None
    return _make_hang(starting, STARTING, rule, began_seconds, now_seconds)


def find_stuck_end(
    seen: Collection[ObservedRank], rule: HangRule, ended_seconds: float | None, now_seconds: float
) -> Hang | None:
    """Return the hang of a group in which one rank has ended and the others do not end.

    Args:
        seen: Running ranks.
        rule: Its patience limits the time without any heartbeat.
        ended_seconds: Time at which the first rank ended with 0, None before.
        now_seconds: Current time, monotonic.
    """
    if ended_seconds is None or not are_quiet(seen, rule, ended_seconds, now_seconds):
        return None
    reporting = [rank_status for rank_status in seen if rank_status.heartbeat is not None]
    return _make_hang(reporting, ENDING, rule, ended_seconds, now_seconds)


def are_quiet(
    seen: Collection[ObservedRank], rule: HangRule, from_seconds: float, now_seconds: float
) -> bool:
    """Return whether no rank trains and no rank wrote a heartbeat within the patience.

    Without any heartbeat so far the result is False.
    """
    reporting = [rank_status for rank_status in seen if rank_status.heartbeat is not None]
    if not reporting or any(
        rank_status.stage is StartupStage.TRAINING for rank_status in reporting
    ):
        return False
    last_seconds = max(rank_status.quiet_since(from_seconds) for rank_status in reporting)
    return now_seconds - last_seconds > rule.patience_seconds


def _make_hang(
    ranks: Collection[ObservedRank],
    stage_name: str,
    rule: HangRule,
    from_seconds: float,
    now_seconds: float,
) -> Hang:
    overdue_ranks = [
        OverdueRank(
            rank=rank.rank,
            step=rank.step,
            phase=Phase.OUTSIDE,
            state=rank.state,
            waited_seconds=now_seconds - rank.quiet_since(from_seconds),
            deadline_seconds=rule.patience_seconds,
            stage_name=stage_name,
        )
        for rank in ranks
    ]
    return Hang(tuple(sorted(overdue_ranks, key=suspicion)))


_LOCAL_PHASES = frozenset({Phase.BETWEEN, Phase.LOADING, Phase.COMPILING})


@dataclass(frozen=True, slots=True)
class HostHangStatus:
    """Status of the rank of one host that delays the others most.

    Attributes:
        rank: Global rank.
        step: Last finished step.
        phase: Phase of the rank.
        state: State of its process.
        waited_seconds: Time since its last heartbeat.
        is_overdue: Whether ``waited_seconds`` exceeds the deadline.
    """

    rank: int
    step: int
    phase: Phase
    state: str
    waited_seconds: float
    is_overdue: bool

    @property
    def place(self) -> tuple[int, int, Phase]:
        """Progress of the rank, as a value that changes with any progress."""
        return self.rank, self.step, self.phase

    def order(self) -> tuple[bool, int, bool, int, bool, float, int]:
        """Return the sort key for blame; the smallest is to blame."""
        return (
            self.state != "T",
            self.step,
            self.is_overdue,
            state_place(self.state),
            self.phase not in _LOCAL_PHASES,
            -self.waited_seconds,
            self.rank,
        )

    def dump(self, number: int) -> str:
        """Return the status as JSON, with a growing number."""
        return json.dumps({"number": number, **asdict(self)})


def parse_host_status(text: str) -> tuple[int, HostHangStatus]:
    """Parse the text of :meth:`HostHangStatus.dump`.

    Raises:
        ValueError: The text is not such a status.
    """
    try:
        fields = json.loads(text)
        number, phase = int(fields.pop("number")), Phase(fields.pop("phase"))
        return number, HostHangStatus(phase=phase, **fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid rank status: {text[:80]}") from error


def host_status_of(
    rank_statuses: Iterable[RankStatus],
    learned: LearnedDeadlines,
    rule: HangRule,
    now_seconds: float,
) -> HostHangStatus | None:
    """Return the status of the rank that delays the others most; None if no rank trains."""
    statuses = [
        HostHangStatus(
            rank=rank_status.rank,
            step=rank_status.heartbeat.step,
            phase=rank_status.heartbeat.phase,
            state=rank_status.state,
            waited_seconds=now_seconds - rank_status.heartbeat.since_seconds,
            is_overdue=find_overdue(rank_status, learned, rule, now_seconds) is not None,
        )
        for rank_status in rank_statuses
        if rank_status.heartbeat.phase is not Phase.OUTSIDE or rank_status.state == "T"
    ]
    return min(statuses, key=HostHangStatus.order, default=None)


def find_culprit(
    own_status: HostHangStatus, peers: Iterable[HostHangStatus]
) -> HostHangStatus | None:
    """Return the blamed rank of another host; None if the rank of this host is to blame."""
    slowest_host = min(peers, key=HostHangStatus.order, default=own_status)
    return slowest_host if slowest_host.order() < own_status.order() else None
