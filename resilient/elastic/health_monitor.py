"""Health monitor of a host's ranks: heartbeats, device errors, out-of-memory kills, slow ranks.

Device errors (Xid, ECC) come from NVML and need ``pip install resilient-train[gpu]``
(nvidia-ml-py). Without the package or a driver, devices are not watched. The Xid numbers of
broken devices are from NVIDIA's "XID Errors" (r575).

A SIGKILL does not name its sender. The module therefore reads the counters of out-of-memory kills
before and after an attempt. The counters are those of the victim's control group (``memory.events``
in version 2, ``memory.oom_control`` in version 1) and of the machine (``/proc/vmstat``).

Ranks that train together have equally long steps, since all wait for the slowest. A straggler (slow
rank) is visible only in the time that a rank needs without other ranks, for its batch and its
forward pass. The agent only reports a straggler, and never kills it.
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
    host_status_of,
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
        """Return the number of kills in these control groups; None if no group reports it."""
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


def find_stragglers(heartbeat: Mapping[int, ProgressRecord]) -> list[StragglerFound]:
    """Return the ranks whose own time per step is far above the median of the group.

    Args:
        heartbeat: Heartbeats by rank; ranks with too few measured times are skipped.
    """
    median_seconds_by_rank = {
        rank: statistics.median(progress.own_seconds)
        for rank, progress in heartbeat.items()
        if len(progress.own_seconds) >= STEPS_MIN
    }
    if len(median_seconds_by_rank) < 2:  # noqa: PLR2004 - one rank alone has no median to exceed
        return []
    # Use the lower median, so that the slower one of two ranks is found.
    median = statistics.median_low(median_seconds_by_rank.values())
    limit = max(FACTOR * median, median + _SECONDS_MIN)
    return [
        StragglerFound(rank, value, median)
        for rank, value in median_seconds_by_rank.items()
        if value > limit
    ]


_LOOK_SECONDS = 0.25
_REPORT_SECONDS = 10.0


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
        agent_folder: Folder of the agent, where the ranks write their heartbeats.
        rule: Limits on the time without progress.
        clock: Clock whose monotonic time the ranks share.
        emit: Listener for stragglers, device faults and progress.

    Attributes:
        host_status: Status of the rank of this host that delays the others most, at the last check.
    """

    def __init__(self, agent_folder: Path, rule: HangRule, clock: Clock, emit: Emitter) -> None:
        self._emit = emit
        self._oom = OomWatch()
        self._gpus = GpuWatch()
        self._gpus.start()
        self._gpu_faults: list[str] = []
        self._stragglers: set[int] = set()
        self._agent_folder = str(agent_folder)
        self._rule = rule
        self._clock = clock
        self._learned_deadlines = LearnedDeadlines()
        self._earlier_deadlines = LearnedDeadlines()
        self._ranks: Mapping[int, int] = {}
        self._began_seconds = 0.0
        self._ended_seconds: float | None = None
        self._stopped_at_seconds: dict[int, float] = {}
        self.host_status: HostHangStatus | None = None
        self._hangs = 0
        self._steps = self._steps_at_hang = -1
        self._looked_at_seconds = 0.0
        self._suspend_detector = SuspendDetector()
        self._progress = SuspendCorrectedProgress(self._suspend_detector)
        self._reported_at_seconds = -math.inf
        self._reported_step = -1

    def begin(self, ranks: Mapping[int, int]) -> None:
        """Forget the ranks of the previous attempt and keep the learned durations.

        Args:
            ranks: Global rank by local rank.
        """
        for local in {*ranks, *self._ranks}:
            progress_path(self._agent_folder, local).unlink(missing_ok=True)
            stacks_path(self._agent_folder, local).unlink(missing_ok=True)
        self._ranks = dict(ranks)
        self._began_seconds, self._ended_seconds = self._clock.monotonic_seconds(), None
        self._suspend_detector.begin(self._began_seconds)
        self._progress.begin()
        self.host_status = None
        self._stopped_at_seconds.clear()
        self._stragglers.clear()
        self._gpu_faults.clear()
        self._reported_at_seconds, self._reported_step = -math.inf, -1
        self._oom.begin()
        self._earlier_deadlines = self._learned_deadlines

    def look(
        self,
        pids: Mapping[int, int],
        running: Collection[int],
        has_other_host_ended: Callable[[], bool] = bool,
    ) -> Hang | None:
        """Return the hang of this host's ranks, None if there is none.

        Args:
            pids: Process id by local rank.
            running: Global ranks that still run; the others ended with 0.
            has_other_host_ended: Query whether all ranks of another host ended; called only if no
                rank trains here.
        """
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - self._looked_at_seconds < _LOOK_SECONDS:
            return None
        self._looked_at_seconds = now_seconds
        away_seconds = self._suspend_detector.open(now_seconds)
        if away_seconds:
            self._emit(AgentSuspended(away_seconds))
        self._oom.learn(pids.values())
        self._look_at_gpus()
        all_rank_statuses = (
            self._rank_status(local, pid, now_seconds, away_seconds) for local, pid in pids.items()
        )
        rank_statuses = [
            rank_status
            for rank_status in all_rank_statuses
            if rank_status is not None and rank_status.rank in running
        ]
        self._report_stragglers(rank_statuses)
        self._report_progress(rank_statuses, now_seconds)
        if not self._rule.is_on:
            return None
        self._learned_deadlines = self._earlier_deadlines.after(
            [rank_status.heartbeat for rank_status in rank_statuses]
        )
        self._steps = max((rank_status.heartbeat.step for rank_status in rank_statuses), default=-1)
        if self._steps > self._steps_at_hang:
            self._hangs = 0
        observed_ranks = self._observe_ranks(pids, rank_statuses, running)
        self._record_first_end(observed_ranks, has_other_host_ended, now_seconds)
        self._suspend_detector.close(self._clock.monotonic_seconds())
        return self._find(
            [*rank_statuses, *self._stopped_before_heartbeat(pids, observed_ranks, now_seconds)],
            observed_ranks,
            now_seconds,
        )

    def count_hang(self) -> None:
        """Double all deadlines until there is progress, as a deadline may have been too short."""
        self._hangs += 1
        self._steps_at_hang = max(self._steps, self._steps_at_hang)

    def _record_first_end(
        self,
        seen: Collection[ObservedRank],
        has_other_host_ended: Callable[[], bool],
        now_seconds: float,
    ) -> None:
        """Record the end of the first rank; query other hosts only if no rank trains here."""
        if self._ended_seconds is not None:
            return
        began_seconds = self._suspend_detector.shifted(self._began_seconds)
        is_idle = are_quiet(seen, self._rule, began_seconds, now_seconds)
        if len(seen) < len(self._ranks) or (is_idle and has_other_host_ended()):
            self._ended_seconds = now_seconds

    def _find(
        self,
        rank_statuses: Collection[RankStatus],
        seen: Collection[ObservedRank],
        now_seconds: float,
    ) -> Hang | None:
        rule, shifted = self._rule.doubled(self._hangs), self._suspend_detector.shifted
        began_seconds, ended_seconds = shifted(self._began_seconds), self._ended_seconds
        ended_seconds = None if ended_seconds is None else shifted(ended_seconds)
        self.host_status = host_status_of(rank_statuses, self._learned_deadlines, rule, now_seconds)
        if find_starting(seen):
            # Ranks in training only wait for the starting ranks, except stopped ranks.
            rank_statuses = [
                rank_status
                for rank_status in rank_statuses
                if rank_status.stopped_since_seconds is not None
            ]
        return (
            find_hang([*rank_statuses], self._learned_deadlines, rule, now_seconds)
            or find_stuck_start(seen, rule, began_seconds, now_seconds)
            or find_stuck_end(seen, rule, ended_seconds, now_seconds)
        )

    def evidence(self) -> Evidence:
        """Return the observations of this attempt beside the exits of its workers."""
        self._look_at_gpus()
        return Evidence(self._oom.kills(), self._oom.machine_kills(), tuple(self._gpu_faults))

    def stacks(self, pids: Mapping[int, int]) -> list[RankStacks]:
        """Return the stacks of all ranks of this host; a stopped rank is continued for its dump."""
        return collect_stacks(self._agent_folder, pids, self._ranks, self._clock)

    def last_step(self) -> int:
        """Return the last step that a rank of this host finished in this attempt, -1 for none."""
        heartbeat = (
            read_progress(progress_path(self._agent_folder, local)) for local in self._ranks
        )
        return max((progress.step for progress in heartbeat if progress is not None), default=-1)

    def _look_at_gpus(self) -> None:
        for fault in self._gpus.look():
            self._emit(fault)
            if fault.is_broken:
                self._gpu_faults.append(fault.message())

    def _report_stragglers(self, rank_statuses: Collection[RankStatus]) -> None:
        """Report a straggler once, and again if it had caught up meanwhile."""
        stragglers = find_stragglers(
            {rank_status.rank: rank_status.heartbeat for rank_status in rank_statuses}
        )
        for straggler in stragglers:
            if straggler.rank not in self._stragglers:
                self._emit(straggler)
        self._stragglers = {straggler.rank for straggler in stragglers}

    def _report_progress(self, rank_statuses: Collection[RankStatus], now_seconds: float) -> None:
        """Report progress every 10 s and after the first finished step."""
        slowest = min(
            rank_statuses, key=lambda rank_status: rank_status.heartbeat.step, default=None
        )
        if slowest is None:
            return
        step, is_first = slowest.heartbeat.step, slowest.heartbeat.step >= 0 > self._reported_step
        if is_first or now_seconds - self._reported_at_seconds >= _REPORT_SECONDS:
            self._reported_at_seconds, self._reported_step = now_seconds, step
            phase, median_seconds = (
                slowest.heartbeat.phase.name.lower(),
                self._learned_deadlines.median_seconds,
            )
            self._emit(ProgressReported(step, slowest.rank, phase, median_seconds or 0.0))

    def _observe_ranks(
        self,
        pids: Mapping[int, int],
        rank_statuses: Collection[RankStatus],
        running: Collection[int],
    ) -> list[ObservedRank]:
        """Return all running ranks, with or without a heartbeat."""
        by_rank = {rank_status.rank: rank_status for rank_status in rank_statuses}
        pid_of = {self._ranks[local]: pid for local, pid in pids.items()}
        return [
            ObservedRank(rank, by_rank[rank].heartbeat, by_rank[rank].state)
            if rank in by_rank
            else ObservedRank(rank, None, state_of(pid_of[rank]))
            for rank in running
        ]

    def _stopped_before_heartbeat(
        self, pids: Mapping[int, int], seen: Collection[ObservedRank], now_seconds: float
    ) -> list[RankStatus]:
        """Return the stopped ranks without a heartbeat, because these can be overdue too."""
        local_of = {rank: local for local, rank in self._ranks.items()}
        silent_ranks = []
        for rank_status in seen:
            local = local_of[rank_status.rank]
            if rank_status.heartbeat is None and local in pids:
                heartbeat = ProgressRecord(
                    -1, Phase.OUTSIDE, self._began_seconds, (0.0,) * len(Phase), ()
                )
                silent_ranks.append(
                    self._with_stop_time(local, rank_status.state, heartbeat, now_seconds)
                )
        return [
            rank_status
            for rank_status in silent_ranks
            if rank_status.stopped_since_seconds is not None
        ]

    def _rank_status(
        self, local: int, pid: int, now_seconds: float, away_seconds: float
    ) -> RankStatus | None:
        record = read_progress(progress_path(self._agent_folder, local))
        if record is None:
            return None
        heartbeat = self._progress.corrected(self._ranks[local], record, away_seconds)
        return self._with_stop_time(local, state_of(pid), heartbeat, now_seconds)

    def _with_stop_time(
        self, local: int, state: str, heartbeat: ProgressRecord, now_seconds: float
    ) -> RankStatus:
        """Return the current status of a rank, with the time since which it is stopped."""
        if state != "T":
            self._stopped_at_seconds.pop(local, None)
            return RankStatus(self._ranks[local], heartbeat, state)
        stopped_seconds = self._stopped_at_seconds.setdefault(local, now_seconds)
        return RankStatus(
            self._ranks[local], heartbeat, state, self._suspend_detector.shifted(stopped_seconds)
        )
