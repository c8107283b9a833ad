"""The ranks of this host under observation: their pulses, their processes, and what they did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient.agent.health.edges import (
    Seen,
    are_quiet,
    find_starting,
    find_stuck_end,
    find_stuck_start,
)
from resilient.agent.health.gpus import GpuWatch
from resilient.agent.health.heartbeat import Hang, Learned, Vital, find_hang
from resilient.agent.health.oom import OomWatch
from resilient.agent.health.sight import Corrected, Sight
from resilient.agent.health.stacks import RankStacks, collect_stacks, state_of
from resilient.agent.health.standing import Standing, standing_of
from resilient.agent.health.stragglers import find_stragglers
from resilient.agent.verdict.causes import Evidence
from resilient.events import Event, Level
from resilient.world.pulse import Phase, Signs, pulse_path, read_signs, stacks_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from resilient.agent.health.heartbeat import HangRule
    from resilient.clock import Clock
    from resilient.events import Emitter

_LOOK_SECONDS = 0.25
_TELL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ProgressSeen(Event):
    """What the ranks of this host show, now and then, and when the first step of a life is done.

    Attributes:
        step: the last that all of them have finished, -1 before the first.
        rank: one that has finished no more.
        phase: what that one is doing.
        median_seconds: of a step in this run, 0 when it was not learned yet.
    """

    level: ClassVar[Level] = Level.DEBUG
    step: int
    rank: int
    phase: str
    median_seconds: float


@dataclass(frozen=True, slots=True)
class AgentWasAway(Event):
    """The agent itself did not run for a while; that time counts against no rank.

    Attributes:
        seconds: how long.
    """

    seconds: float

    def line(self) -> str:
        """Say for how long, and what most likely did it."""
        return (
            f"this agent did not run for {self.seconds:.1f} s (the job was suspended, or the host "
            "frozen or very busy): that time counts against no rank"
        )


class Health:
    """Looks whether the ranks of this host get on; remembers what a run's lives have shown.

    Args:
        notes: the agent's folder, where the ranks show their signs.
        rule: how long is too long.
        clock: whose monotonic time the ranks show too.
        emit: where stragglers and faults of devices are told.

    Attributes:
        standing: of the rank here that holds the others up most, when it was looked last.
    """

    def __init__(self, notes: Path, rule: HangRule, clock: Clock, emit: Emitter) -> None:
        self._emit = emit
        self._oom = OomWatch()
        self._gpus = GpuWatch()
        self._gpus.start()
        self._gpu_faults: list[str] = []
        self._stragglers: set[int] = set()
        self._notes = str(notes)
        self._rule = rule
        self._clock = clock
        self._learned = Learned()
        self._known = Learned()
        self._ranks: Mapping[int, int] = {}
        self._began_seconds = 0.0
        self._ended_seconds: float | None = None
        self._stopped: dict[int, float] = {}
        self.standing: Standing | None = None
        self._hangs = 0
        self._steps = self._steps_at_hang = -1
        self._looked_at_seconds = 0.0
        self._sight = Sight()
        self._corrected = Corrected(self._sight)
        self._told_at_seconds = -math.inf
        self._told_step = -1

    def begin(self, ranks: Mapping[int, int]) -> None:
        """Forget the ranks of the life before, and keep what was learned from them.

        Args:
            ranks: rank among all, by local rank.
        """
        for local in {*ranks, *self._ranks}:
            pulse_path(self._notes, local).unlink(missing_ok=True)
            stacks_path(self._notes, local).unlink(missing_ok=True)
        self._ranks = dict(ranks)
        self._began_seconds, self._ended_seconds = self._clock.monotonic_seconds(), None
        self._sight.begin(self._began_seconds)
        self._corrected.begin()
        self.standing = None
        self._stopped.clear()
        self._stragglers.clear()
        self._gpu_faults.clear()
        self._told_at_seconds, self._told_step = -math.inf, -1
        self._oom.begin()
        self._known = self._learned

    def look(
        self,
        pids: Mapping[int, int],
        running: Collection[int],
        is_over_elsewhere: Callable[[], bool] = bool,
    ) -> Hang | None:
        """Return the hang of this host's ranks, None while there is none.

        Args:
            pids: process of each local rank.
            running: the ranks, among all, that have not ended; the others did with 0.
            is_over_elsewhere: asked whether all ranks of another host have; only of late.
        """
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - self._looked_at_seconds < _LOOK_SECONDS:
            return None
        self._looked_at_seconds = now_seconds
        away_seconds = self._sight.open(now_seconds)
        if away_seconds:
            self._emit(AgentWasAway(away_seconds))
        self._oom.learn(pids.values())
        self._look_at_gpus()
        found = (self._vital(local, pid, now_seconds, away_seconds) for local, pid in pids.items())
        vitals = [one for one in found if one is not None and one.rank in running]
        self._tell_stragglers(vitals)
        self._tell_progress(vitals, now_seconds)
        if not self._rule.is_on:
            return None
        self._learned = self._known.after([one.signs for one in vitals])
        self._steps = max((one.signs.step for one in vitals), default=-1)
        if self._steps > self._steps_at_hang:
            self._hangs = 0
        seen = self._seen(pids, vitals, running)
        self._look_for_an_end(seen, is_over_elsewhere, now_seconds)
        self._sight.close(self._clock.monotonic_seconds())
        return self._find([*vitals, *self._silent(pids, seen, now_seconds)], seen, now_seconds)

    def count_hang(self) -> None:
        """Double all deadlines until there is progress: one of them may have been too short."""
        self._hangs += 1
        self._steps_at_hang = max(self._steps, self._steps_at_hang)

    def _look_for_an_end(
        self, seen: Collection[Seen], is_over_elsewhere: Callable[[], bool], now_seconds: float
    ) -> None:
        """Note when the first rank had ended; other hosts are asked only where none trains."""
        if self._ended_seconds is not None:
            return
        began_seconds = self._sight.shifted(self._began_seconds)
        is_idle = are_quiet(seen, self._rule, began_seconds, now_seconds)
        if len(seen) < len(self._ranks) or (is_idle and is_over_elsewhere()):
            self._ended_seconds = now_seconds

    def _find(
        self, vitals: Collection[Vital], seen: Collection[Seen], now_seconds: float
    ) -> Hang | None:
        rule, shifted = self._rule.doubled(self._hangs), self._sight.shifted
        began_seconds, ended_seconds = shifted(self._began_seconds), self._ended_seconds
        ended_seconds = None if ended_seconds is None else shifted(ended_seconds)
        self.standing = standing_of(vitals, self._learned, rule, now_seconds)
        if find_starting(seen):
            # Who is in training only waits for those; who is stopped does not.
            vitals = [one for one in vitals if one.stopped_since_seconds is not None]
        return (
            find_hang([*vitals], self._learned, rule, now_seconds)
            or find_stuck_start(seen, rule, began_seconds, now_seconds)
            or find_stuck_end(seen, rule, ended_seconds, now_seconds)
        )

    def evidence(self) -> Evidence:
        """Return what was seen in this life beside the ends of its workers."""
        self._look_at_gpus()
        return Evidence(self._oom.kills(), self._oom.machine_kills(), tuple(self._gpu_faults))

    def stacks(self, pids: Mapping[int, int]) -> list[RankStacks]:
        """Return what every rank of this host is doing; a stopped one goes on for it."""
        return collect_stacks(self._notes, pids, self._ranks, self._clock)

    def last_step(self) -> int:
        """Return the last step that a rank of this host has finished in this life, -1 for none."""
        signs = (read_signs(pulse_path(self._notes, local)) for local in self._ranks)
        return max((one.step for one in signs if one is not None), default=-1)

    def _look_at_gpus(self) -> None:
        for fault in self._gpus.look():
            self._emit(fault)
            if fault.is_broken:
                self._gpu_faults.append(fault.line())

    def _tell_stragglers(self, vitals: Collection[Vital]) -> None:
        """Tell a straggler once, and again if it had caught up meanwhile."""
        found = find_stragglers({one.rank: one.signs for one in vitals})
        for one in found:
            if one.rank not in self._stragglers:
                self._emit(one)
        self._stragglers = {one.rank for one in found}

    def _tell_progress(self, vitals: Collection[Vital], now_seconds: float) -> None:
        """Tell where the ranks are, every ten seconds and as soon as a step is done."""
        last = min(vitals, key=lambda one: one.signs.step, default=None)
        if last is None:
            return
        step, is_first = last.signs.step, last.signs.step >= 0 > self._told_step
        if is_first or now_seconds - self._told_at_seconds >= _TELL_SECONDS:
            self._told_at_seconds, self._told_step = now_seconds, step
            phase, median_seconds = last.signs.phase.name.lower(), self._learned.median_seconds
            self._emit(ProgressSeen(step, last.rank, phase, median_seconds or 0.0))

    def _seen(
        self, pids: Mapping[int, int], vitals: Collection[Vital], running: Collection[int]
    ) -> list[Seen]:
        """Return the ranks that run, also those that have not shown a sign."""
        heard = {one.rank: one for one in vitals}
        pid_of = {self._ranks[local]: pid for local, pid in pids.items()}
        return [
            Seen(rank, heard[rank].signs, heard[rank].state)
            if rank in heard
            else Seen(rank, None, state_of(pid_of[rank]))
            for rank in running
        ]

    def _silent(
        self, pids: Mapping[int, int], seen: Collection[Seen], now_seconds: float
    ) -> list[Vital]:
        """Return those that are stopped and have shown no sign: who is stopped needs none."""
        local_of = {rank: local for local, rank in self._ranks.items()}
        found = []
        for one in seen:
            local = local_of[one.rank]
            if one.signs is None and local in pids:
                signs = Signs(-1, Phase.OUTSIDE, self._began_seconds, (0.0,) * len(Phase), ())
                found.append(self._at(local, one.state, signs, now_seconds))
        return [one for one in found if one.stopped_since_seconds is not None]

    def _vital(self, local: int, pid: int, now_seconds: float, away_seconds: float) -> Vital | None:
        shown = read_signs(pulse_path(self._notes, local))
        if shown is None:
            return None
        signs = self._corrected.signs(self._ranks[local], shown, away_seconds)
        return self._at(local, state_of(pid), signs, now_seconds)

    def _at(self, local: int, state: str, signs: Signs, now_seconds: float) -> Vital:
        """Return a rank as it is now, and since when it is stopped."""
        if state != "T":
            self._stopped.pop(local, None)
            return Vital(self._ranks[local], signs, state)
        stopped_seconds = self._stopped.setdefault(local, now_seconds)
        return Vital(self._ranks[local], signs, state, self._sight.shifted(stopped_seconds))
