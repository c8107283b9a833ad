"""Health monitor of the ranks of one host: heartbeats, devices, memory kills, stragglers.

Device errors (Xid, ECC) come from NVML and need ``pip install resilient-train[gpu]``
(nvidia-ml-py). Without the package or a driver, devices are not watched. The Xid numbers of
broken devices are from NVIDIA's "XID Errors" (r575).

A SIGKILL does not name its sender. The module therefore reads the counters of out-of-memory kills
before and after an attempt. The counters are those of the victim's control group (``memory.events``
in version 2, ``memory.oom_control`` in version 1) and of the machine (``/proc/vmstat``).

Ranks that train together have equally long steps, since all wait for the slowest. A straggler is
visible in the time that a rank needs without others: loading its batch, and its forward pass. A
straggler is only reported, never killed.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from resilient.distributed.heartbeat import (
    Phase,
    ProgressRecord,
    progress_path,
    read_progress,
    stacks_path,
)
from resilient.elastic.hang_detection import (
    Hang,
    HostHangStatus,
    LearnedDeadlines,
    ObservedRank,
    RankStatus,
    are_quiet,
    find_hang,
    find_starting,
    find_stuck_end,
    find_stuck_start,
    standing_of,
)
from resilient.elastic.outcome import Evidence
from resilient.elastic.stack_dump import RankStacks, collect_stacks, state_of
from resilient.elastic.suspend_detection import SuspendCorrectedProgress, SuspendDetector
from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from resilient.clock import Clock
    from resilient.elastic.hang_detection import HangRule
    from resilient.events import Emitter

# Xids for double-bit ECC, row remapping, NVLink, off the bus, contained and uncontained ECC, GSP.
BROKEN_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
_CHECKS_MAX = 64


@dataclass(frozen=True, slots=True)
class GpuFaulted(Event):
    """A device reported an error.

    Attributes:
        device: Number of the device on this host.
        kind: ``xid``, ``ecc_double_bit`` or ``ecc_single_bit``.
        number: Number of the Xid; 0 for ECC.
        is_broken: Whether the device needs a reset or a technician.
    """

    level: ClassVar[Level] = Level.WARNING
    device: int
    kind: str
    number: int
    is_broken: bool

    def message(self) -> str:
        """Return the message: device, error and the user's next command."""
        text = f"Xid {self.number}" if self.kind == "xid" else self.kind.replace("_", " ")
        hint = "; drain this host: nvidia-smi -q, dmesg | grep Xid" if self.is_broken else ""
        return f"GPU {self.device} reported {text}{hint}"


class GpuWatch:
    """Non-blocking reader of the driver's error events for all devices."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._events: Any = None

    def start(self) -> bool:
        """Register for error events; return False without a driver or package."""
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return False
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            for number in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(number)
                event_types = (
                    nvml.nvmlEventTypeXidCriticalError
                    | nvml.nvmlEventTypeDoubleBitEccError
                    | nvml.nvmlEventTypeSingleBitEccError
                )
                supported_types = nvml.nvmlDeviceGetSupportedEventTypes(device) & event_types
                if supported_types:
                    nvml.nvmlDeviceRegisterEvents(device, supported_types, self._events)
        except nvml.NVMLError:
            return False
        self._nvml = nvml
        return True

    def look(self) -> list[GpuFaulted]:
        """Return the errors reported since the last call."""
        nvml, faults = self._nvml, []
        for _ in range(_CHECKS_MAX if nvml is not None else 0):
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # A timeout is also an NVMLError: no more events.
                break
            faults.append(self._fault(data))
        return faults

    def _fault(self, data: Any) -> GpuFaulted:
        nvml = self._nvml
        kinds = {
            nvml.nvmlEventTypeXidCriticalError: "xid",
            nvml.nvmlEventTypeDoubleBitEccError: "ecc_double_bit",
            nvml.nvmlEventTypeSingleBitEccError: "ecc_single_bit",
        }
        kind = kinds.get(data.eventType, "xid")
        xid = int(data.eventData) if kind == "xid" else 0
        is_broken = kind == "ecc_double_bit" or xid in BROKEN_XIDS
        return GpuFaulted(nvml.nvmlDeviceGetIndex(data.device), kind, xid, is_broken)


_ROOT = Path("/")
_NAME = "oom_kill"


class OomWatch:
    """Counter of out-of-memory kills since ``begin``.

    Args:
        root: Folder that contains ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._before: dict[Path, int] = {}
        self._machine_before: int | None = None

    def begin(self) -> None:
        """Reset the counters for a new attempt."""
        self._before.clear()
        self._machine_before = _count(self._root / "proc/vmstat")

    def learn(self, pids: Iterable[int]) -> None:
        """Find the control groups of running processes; a process may move to another group."""
        for path in {path for pid in pids for path in self._counters_of(pid)}:
            if path not in self._before and (count := _count(path)) is not None:
                self._before[path] = count

    def kills(self) -> int | None:
        """Return the number of kills in those groups; None if no group reports it."""
        if not self._before:
            return None
        count_by_path = {path: _count(path) for path in self._before}
        return sum(
            max(0, (count_by_path[path] or 0) - count_before)
            for path, count_before in self._before.items()
        )

    def machine_kills(self) -> int | None:
        """Return the number of kills on this machine; None if the machine does not report it."""
        kill_count = _count(self._root / "proc/vmstat")
        if kill_count is None or self._machine_before is None:
            return None
        return kill_count - self._machine_before

    def _counters_of(self, pid: int) -> list[Path]:
        counters = []
        for line in _lines(self._root / f"proc/{pid}/cgroup"):
            _, controllers, name = line.split(":", 2)
            relative_path = name.strip("/")
            if not controllers:
                counters.append(self._root / "sys/fs/cgroup" / relative_path / "memory.events")
            elif "memory" in controllers.split(","):
                counters.append(
                    self._root / "sys/fs/cgroup/memory" / relative_path / "memory.oom_control"
                )
        return counters


def _count(path: Path) -> int | None:
    pairs = (line.split() for line in _lines(path))
    return next((int(pair[1]) for pair in pairs if len(pair) > 1 and pair[0] == _NAME), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


STEPS_MIN = 10
FACTOR = 1.5
_SECONDS_MIN = 0.01


@dataclass(frozen=True, slots=True)
class StragglerFound(Event):
    """One rank needs much longer for its own work than the median rank, so all others wait."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "rank {rank} is a straggler: its own work takes {own_seconds:.3g} s per step, that of the "
        "median rank {group_seconds:.3g} s"
    )
    rank: int
    own_seconds: float
    group_seconds: float


def find_stragglers(signs: Mapping[int, ProgressRecord]) -> list[StragglerFound]:
    """Return the ranks whose own time per step is far above the median of the group.

    Args:
        signs: Heartbeats by rank; ranks with too few measured times are skipped.
    """
    median_seconds_by_rank = {
        rank: statistics.median(progress.own_seconds)
        for rank, progress in signs.items()
        if len(progress.own_seconds) >= STEPS_MIN
    }
    if len(median_seconds_by_rank) < 2:  # noqa: PLR2004 - one rank alone has no median to exceed
        return []
    # The lower median, so that the slow rank of two is found.
    median = statistics.median_low(median_seconds_by_rank.values())
    limit = max(FACTOR * median, median + _SECONDS_MIN)
    return [
        StragglerFound(rank, value, median)
        for rank, value in median_seconds_by_rank.items()
        if value > limit
    ]


_LOOK_SECONDS = 0.25
_TELL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ProgressReported(Event):
    """Progress of the ranks of this host, every 10 s and after the first step of an attempt.

    Attributes:
        step: Last step that all ranks finished, -1 before the first.
        rank: A rank with the fewest finished steps.
        phase: Phase of that rank.
        median_seconds: Median time of a step in this run; 0 until it is known.
    """

    level: ClassVar[Level] = Level.DEBUG
    step: int
    rank: int
    phase: str
    median_seconds: float


@dataclass(frozen=True, slots=True)
class AgentSuspended(Event):
    """The agent itself did not run for some time; that time counts against no rank.

    Attributes:
        seconds: Length of that time.
    """

    template: ClassVar[str] = (
        "this agent did not run for {seconds:.1f} s (the job was suspended, or the host was "
        "frozen or busy): that time counts against no rank"
    )
    seconds: float


class HealthMonitor:
    """Monitor of the ranks of this host, with the durations learned over all attempts.

    Args:
        notes: Folder of the agent, where the ranks write their heartbeats.
        rule: Limits on the time without progress.
        clock: Clock whose monotonic time the ranks share.
        emit: Listener for stragglers, device faults and progress.

    Attributes:
        standing: Status of the rank of this host that delays the others most, at the last check.
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
        self._learned_deadlines = LearnedDeadlines()
        self._earlier_deadlines = LearnedDeadlines()
        self._ranks: Mapping[int, int] = {}
        self._began_seconds = 0.0
        self._ended_seconds: float | None = None
        self._stopped_at_seconds: dict[int, float] = {}
        self.standing: HostHangStatus | None = None
        self._hangs = 0
        self._steps = self._steps_at_hang = -1
        self._looked_at_seconds = 0.0
        self._sight = SuspendDetector()
        self._progress = SuspendCorrectedProgress(self._sight)
        self._told_at_seconds = -math.inf
        self._told_step = -1

    def begin(self, ranks: Mapping[int, int]) -> None:
        """Forget the ranks of the previous attempt and keep the learned durations.

        Args:
            ranks: Global rank by local rank.
        """
        for local in {*ranks, *self._ranks}:
            progress_path(self._notes, local).unlink(missing_ok=True)
            stacks_path(self._notes, local).unlink(missing_ok=True)
        self._ranks = dict(ranks)
        self._began_seconds, self._ended_seconds = self._clock.monotonic_seconds(), None
        self._sight.begin(self._began_seconds)
        self._progress.begin()
        self.standing = None
        self._stopped_at_seconds.clear()
        self._stragglers.clear()
        self._gpu_faults.clear()
        self._told_at_seconds, self._told_step = -math.inf, -1
        self._oom.begin()
        self._earlier_deadlines = self._learned_deadlines

    def look(
        self,
        pids: Mapping[int, int],
        running: Collection[int],
        is_over_elsewhere: Callable[[], bool] = bool,
    ) -> Hang | None:
        """Return the hang of this host's ranks, None if there is none.

        Args:
            pids: Process id by local rank.
            running: Global ranks that still run; the others ended with 0.
            is_over_elsewhere: Query whether all ranks of another host ended; called only if no
                rank trains here.
        """
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - self._looked_at_seconds < _LOOK_SECONDS:
            return None
        self._looked_at_seconds = now_seconds
        away_seconds = self._sight.open(now_seconds)
        if away_seconds:
            self._emit(AgentSuspended(away_seconds))
        self._oom.learn(pids.values())
        self._look_at_gpus()
        vitals_of_ranks = (
            self._vital(local, pid, now_seconds, away_seconds) for local, pid in pids.items()
        )
        vitals = [
            rank_vitals
            for rank_vitals in vitals_of_ranks
            if rank_vitals is not None and rank_vitals.rank in running
        ]
        self._tell_stragglers(vitals)
        self._tell_progress(vitals, now_seconds)
        if not self._rule.is_on:
            return None
        self._learned_deadlines = self._earlier_deadlines.after(
            [rank_vitals.signs for rank_vitals in vitals]
        )
        self._steps = max((rank_vitals.signs.step for rank_vitals in vitals), default=-1)
        if self._steps > self._steps_at_hang:
            self._hangs = 0
        observed_ranks = self._observe_ranks(pids, vitals, running)
        self._look_for_an_end(observed_ranks, is_over_elsewhere, now_seconds)
        self._sight.close(self._clock.monotonic_seconds())
        return self._find(
            [*vitals, *self._silent(pids, observed_ranks, now_seconds)], observed_ranks, now_seconds
        )

    def count_hang(self) -> None:
        """Double all deadlines until there is progress, as a deadline may have been too short."""
        self._hangs += 1
        self._steps_at_hang = max(self._steps, self._steps_at_hang)

    def _look_for_an_end(
        self,
        seen: Collection[ObservedRank],
        is_over_elsewhere: Callable[[], bool],
        now_seconds: float,
    ) -> None:
        """Record the end of the first rank; query other hosts only if no rank trains here."""
        if self._ended_seconds is not None:
            return
        began_seconds = self._sight.shifted(self._began_seconds)
        is_idle = are_quiet(seen, self._rule, began_seconds, now_seconds)
        if len(seen) < len(self._ranks) or (is_idle and is_over_elsewhere()):
            self._ended_seconds = now_seconds

    def _find(
        self, vitals: Collection[RankStatus], seen: Collection[ObservedRank], now_seconds: float
    ) -> Hang | None:
        rule, shifted = self._rule.doubled(self._hangs), self._sight.shifted
        began_seconds, ended_seconds = shifted(self._began_seconds), self._ended_seconds
        ended_seconds = None if ended_seconds is None else shifted(ended_seconds)
        self.standing = standing_of(vitals, self._learned_deadlines, rule, now_seconds)
        if find_starting(seen):
            # Ranks in training only wait for the starting ranks, except stopped ranks.
            vitals = [
                rank_vitals
                for rank_vitals in vitals
                if rank_vitals.stopped_since_seconds is not None
            ]
        return (
            find_hang([*vitals], self._learned_deadlines, rule, now_seconds)
            or find_stuck_start(seen, rule, began_seconds, now_seconds)
            or find_stuck_end(seen, rule, ended_seconds, now_seconds)
        )

    def evidence(self) -> Evidence:
        """Return the observations of this attempt beside the exits of its workers."""
        self._look_at_gpus()
        return Evidence(self._oom.kills(), self._oom.machine_kills(), tuple(self._gpu_faults))

    def stacks(self, pids: Mapping[int, int]) -> list[RankStacks]:
        """Return the stacks of all ranks of this host; a stopped rank is continued for its dump."""
        return collect_stacks(self._notes, pids, self._ranks, self._clock)

    def last_step(self) -> int:
        """Return the last step that a rank of this host finished in this attempt, -1 for none."""
        signs = (read_progress(progress_path(self._notes, local)) for local in self._ranks)
        return max((progress.step for progress in signs if progress is not None), default=-1)

    def _look_at_gpus(self) -> None:
        for fault in self._gpus.look():
            self._emit(fault)
            if fault.is_broken:
                self._gpu_faults.append(fault.message())

    def _tell_stragglers(self, vitals: Collection[RankStatus]) -> None:
        """Report a straggler once, and again if it had caught up meanwhile."""
        stragglers = find_stragglers(
            {rank_vitals.rank: rank_vitals.signs for rank_vitals in vitals}
        )
        for straggler in stragglers:
            if straggler.rank not in self._stragglers:
                self._emit(straggler)
        self._stragglers = {straggler.rank for straggler in stragglers}

    def _tell_progress(self, vitals: Collection[RankStatus], now_seconds: float) -> None:
        """Report progress every 10 s and after the first finished step."""
        slowest = min(vitals, key=lambda rank_vitals: rank_vitals.signs.step, default=None)
        if slowest is None:
            return
        step, is_first = slowest.signs.step, slowest.signs.step >= 0 > self._told_step
        if is_first or now_seconds - self._told_at_seconds >= _TELL_SECONDS:
            self._told_at_seconds, self._told_step = now_seconds, step
            phase, median_seconds = (
                slowest.signs.phase.name.lower(),
                self._learned_deadlines.median_seconds,
            )
            self._emit(ProgressReported(step, slowest.rank, phase, median_seconds or 0.0))

    def _observe_ranks(
        self, pids: Mapping[int, int], vitals: Collection[RankStatus], running: Collection[int]
    ) -> list[ObservedRank]:
        """Return all running ranks, with or without a heartbeat."""
        by_rank = {rank_vitals.rank: rank_vitals for rank_vitals in vitals}
        pid_of = {self._ranks[local]: pid for local, pid in pids.items()}
        return [
            ObservedRank(rank, by_rank[rank].signs, by_rank[rank].state)
            if rank in by_rank
            else ObservedRank(rank, None, state_of(pid_of[rank]))
            for rank in running
        ]

    def _silent(
        self, pids: Mapping[int, int], seen: Collection[ObservedRank], now_seconds: float
    ) -> list[RankStatus]:
        """Return stopped ranks without a heartbeat: a stopped rank is overdue without one."""
        local_of = {rank: local for local, rank in self._ranks.items()}
        silent_ranks = []
        for rank_vitals in seen:
            local = local_of[rank_vitals.rank]
            if rank_vitals.signs is None and local in pids:
                signs = ProgressRecord(
                    -1, Phase.OUTSIDE, self._began_seconds, (0.0,) * len(Phase), ()
                )
                silent_ranks.append(self._at(local, rank_vitals.state, signs, now_seconds))
        return [
            rank_vitals
            for rank_vitals in silent_ranks
            if rank_vitals.stopped_since_seconds is not None
        ]

    def _vital(
        self, local: int, pid: int, now_seconds: float, away_seconds: float
    ) -> RankStatus | None:
        record = read_progress(progress_path(self._notes, local))
        if record is None:
            return None
        signs = self._progress.signs(self._ranks[local], record, away_seconds)
        return self._at(local, state_of(pid), signs, now_seconds)

    def _at(self, local: int, state: str, signs: ProgressRecord, now_seconds: float) -> RankStatus:
        """Return the current status of a rank, with the time since which it is stopped."""
        if state != "T":
            self._stopped_at_seconds.pop(local, None)
            return RankStatus(self._ranks[local], signs, state)
        stopped_seconds = self._stopped_at_seconds.setdefault(local, now_seconds)
        return RankStatus(self._ranks[local], signs, state, self._sight.shifted(stopped_seconds))
