"""Monitor of one attempt of the workers, from its start to the exit of its last worker.

The monitor returns an :class:`Outcome`. For a hang, the monitor first reports the stacks of all
ranks of this host and then kills the group.
"""

from __future__ import annotations

import math
import os
import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from resilient.distributed.launch_env import exited_without_save
from resilient.distributed.stop_request import StopRequest, write_stop_request
from resilient.elastic.events import RendezvousLost, StopRequested, WorkersKilled
from resilient.elastic.outcome import CODE_PREEMPTED, Cause, Outcome, OutcomeKind
from resilient.elastic.rendezvous.remote_hangs import RemoteRankLost
from resilient.elastic.restart_policy import CODES_OF_LEAVING_AT_ONCE
from resilient.elastic.stack_dump import RankStacks, group_by_stack, main_stack
from resilient.elastic.worker_errors import WorkerError, WorkerFailure, find_failures
from resilient.elastic.workers.build_locks import describe_process, find_locks, held_files, users_of
from resilient.errors import DeadlineExceeded
from resilient.events import Event, Level
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.elastic.hang_detection import Hang, OverdueRank
    from resilient.elastic.health_monitor import HealthMonitor
    from resilient.elastic.options import Timeouts
    from resilient.elastic.outcome import Evidence
    from resilient.elastic.rendezvous.membership import ExitBarrier, MembershipWatch
    from resilient.elastic.rendezvous.remote_hangs import PeerHangExchange
    from resilient.elastic.signals import StopSignals
    from resilient.elastic.workers.group import WorkerGroup
    from resilient.events import Emitter

_KILL_SECONDS = 5.0
_LINES_MAX = 16
_HINT = (
    "if the ranks only needed more time, set --hang-floor, --hang-patience or --hang-deadline off"
)
_HINT_OF_EDGES = (
    "if the rank had work to do, raise --hang-patience, or call resilient.heartbeat() regularly"
)
_STATES = {"T": "stopped (SIGSTOP)", "D": "stuck in the kernel (D)", "R": "running", "S": "asleep"}


@dataclass(frozen=True, slots=True)
class HangFound(Event):
    """No rank makes progress and one rank is blamed; no worker was killed yet.

    Attributes:
        rank: Rank that is behind or stopped.
        step: Last step that the rank finished, -1 before the first.
        phase: Phase of the rank: one of :class:`resilient.distributed.heartbeat.Phase`,
            `starting` or `ending`.
        state: State of the rank's process, as readable text.
        waited_seconds: Time without progress.
        deadline_seconds: Allowed time without progress.
        median_seconds: Median time of a step in this run; 0 until it is known.
        overdue: All ranks of this host that exceeded the deadline.
        stacks: Stacks of all ranks of this host.
        locks: Text lines about the lock files that ranks may wait for.
    """

    level: ClassVar[Level] = Level.WARNING
    rank: int
    step: int
    phase: str
    state: str
    waited_seconds: float
    deadline_seconds: float
    median_seconds: float
    overdue: list[int]
    stacks: list[RankStacks]
    locks: list[str]

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event, with the stacks as text by rank."""
        names = set(self.__dataclass_fields__) - {"stacks", "template"}
        fields: dict[str, Any] = {name: getattr(self, name) for name in sorted(names)}
        fields["stacks"] = {
            str(stack.rank): {"kernel": stack.kernel, "stacks": stack.stacks}
            for stack in self.stacks
        }
        return fields

    def message(self) -> str:
        """Return the message: the blamed rank, its phase, and the stacks of all ranks."""
        median_text = f", the median step takes {self.median_seconds:.3g} s" * bool(
            self.median_seconds
        )
        waited = f"{self.waited_seconds:.1f} s, and the deadline is {self.deadline_seconds:.1f} s"
        rows = [
            f"hang: no progress for {waited}{median_text}",
            f"  rank {self.rank} is {self.state}, {_place(self.step)}, in phase `{self.phase}`",
        ]
        for ranks, value in group_by_stack(self.stacks).items():
            rows += _stack_lines(ranks, value)
        rows += [f"  {line}" for line in self.locks]
        return "\n".join(rows)


def _stack_lines(ranks: tuple[int, ...], stacks: RankStacks) -> list[str]:
    """Return the stack lines of ranks that are at the same place."""
    ranks_text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if stacks.is_answered:
        lines, text = main_stack(stacks.stacks)[1:], "main thread, innermost call first"
    else:
        lines, text = stacks.kernel.splitlines(), "no answer; state in the kernel:"
    omission_lines = (
        [f"      ... {len(lines) - _LINES_MAX} more"] if len(lines) > _LINES_MAX else []
    )
    return [
        f"  {ranks_text}: {text}",
        *(f"    {line}" for line in lines[:_LINES_MAX]),
        *omission_lines,
    ]


def end_hung(
    group: WorkerGroup, health: HealthMonitor, hang: Hang, emit: Emitter
) -> tuple[Outcome, list[WorkerFailure]]:
    """Dump all stacks, kill the hung group, and return the outcome and the blamed rank's failure.

    The agent does not ask for a save first, because a stuck rank cannot save. The saver daemon
    commits the bytes that were staged before.
    """
    health.count_hang()
    stacks = health.stacks(group.pids)
    emit(_hang_event(hang, stacks))
    group.kill()
    is_unkillable = not group.wait_for_all(_KILL_SECONDS)
    blamed_rank = hang.first.rank
    message = f"hang: {describe_overdue(hang.first)}"
    inner = next((stack.innermost for stack in stacks if stack.rank == blamed_rank), "")
    error = WorkerError(
        message=f"{message}{f', in {inner}' * bool(inner)}",
        hint=_HINT_OF_EDGES if hang.first.stage_name else _HINT,
    )
    failures = [
        WorkerFailure(worker_exit, error, Cause.HANG)
        for worker_exit in group.exits
        if worker_exit.command.rank == blamed_rank
    ]
    status = DeadlineExceeded.exit_code
    outcome = Outcome(
        OutcomeKind.FAILED, status, reason=message, cause=Cause.HANG, is_host_broken=is_unkillable
    )
    return outcome, failures


def describe_overdue(rank: OverdueRank) -> str:
    """Return one line: the state of an overdue rank, its wait and its deadline."""
    state = _STATES.get(rank.state, rank.state)
    return (
        f"{state} for {rank.waited_seconds:.1f} s {_place(rank.step)} (phase `{rank.activity}`, "
        f"deadline {rank.deadline_seconds:.1f} s)"
    )


def _place(step: int) -> str:
    return f"after step {step}" if step >= 0 else "before any step"


def _hang_event(hang: Hang, stacks: list[RankStacks]) -> HangFound:
    first_rank = hang.first
    return HangFound(
        rank=first_rank.rank,
        step=first_rank.step,
        phase=first_rank.activity,
        state=_STATES.get(first_rank.state, first_rank.state or "silent"),
        waited_seconds=first_rank.waited_seconds,
        deadline_seconds=first_rank.deadline_seconds,
        median_seconds=hang.median_seconds or 0.0,
        overdue=sorted(culprit.rank for culprit in hang.culprits),
        stacks=stacks,
        locks=awaited_locks(stacks, os.environ),
    )


# An exit ends the wait at once. Signals are checked at this interval.
_TICK_SECONDS = 0.1
# Peers may see a rank as lost before its process has exited: its connections close first.
_PEER_REPORT_SECONDS = 1.0
# Time reserved at the end of a stop after a rank was killed from outside. The agent queries the
# newest commit and exits in this time.
_EXIT_RESERVE_SECONDS = 2.0
_EXIT_RESERVE_SHARE = 0.2
_ENDS_OF_A_STOP = frozenset({0, CODE_PREEMPTED, -signal.SIGTERM, *CODES_OF_LEAVING_AT_ONCE})


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """Collaborators and settings of a monitor.

    The monitor calls ``tend`` often, so ``tend`` must return quickly.
    """

    stops: StopSignals
    members: MembershipWatch
    barrier: ExitBarrier
    health: HealthMonitor
    peer_hangs: PeerHangExchange
    patience: Timeouts
    clock: Clock
    emit: Emitter
    tend: Callable[[], None]
    notes: str = ""
    attempt: str = ""
    nodes: int = 1


class AttemptMonitor:
    """Monitor of one worker group until no worker of the group runs.

    Attributes:
        failures: Failed workers, ordered by the time of their failures.
        stop_seconds: Time from the end of the attempt until the other workers had stopped.
    """

    def __init__(self, group: WorkerGroup, context: MonitorContext) -> None:
        self.failures: list[WorkerFailure] = []
        self.stop_seconds = 0.0
        self._group = group
        self._stops = context.stops
        self._members = context.members
        self._barrier = context.barrier
        self._health = context.health
        self._peer_hangs = context.peer_hangs
        self._timeouts = context.patience
        self._clock = context.clock
        self._emit = context.emit
        self._notes, self._nodes = context.notes, context.nodes
        self._attempt = context.attempt
        self._stop_request: StopRequest | None = None
        self._run_periodic_work = context.tend
        self._is_loss_reported = False

    def observe(self) -> Outcome:
        """Wait for the end of the attempt, stop the remaining workers, and return the outcome."""
        while True:
            self._group.wait(_TICK_SECONDS)
            seen_at_seconds = self._clock.monotonic_seconds()
            outcome = self._look()
            if outcome is not None:
                self.stop_seconds = self._clock.monotonic_seconds() - seen_at_seconds
                return outcome

    def _look(self) -> Outcome | None:
        statuses = {exit_.status for exit_ in self._group.exits}
        if self._stops.asked_by:
            return self._stop()
        if CODE_PREEMPTED in statuses:
            return self._finish_agreed_exit()
        if statuses - {0}:
            return self._fail()
        if not self._group.is_running and self._barrier.is_passed():
            return Outcome(OutcomeKind.SUCCEEDED)
        return self._check_progress() or self._check_membership()

    def _check_progress(self) -> Outcome | None:
        running_ranks = set(self._group.running_ranks)
        pids = self._group.pids
        hang = self._health.look(pids, running_ranks, self._barrier.is_begun)
        self._peer_hangs.publish(self._health.host_status)
        # The culprit's agent kills the culprit and then joins this agent in the next rendezvous.
        if hang is None or self._peer_hangs.has_culprit(hang):
            return None
        outcome, self.failures = end_hung(self._group, self._health, hang, self._emit)
        return replace(outcome, has_stepped=self._health.last_step() >= 0)

    def _check_membership(self) -> Outcome | None:
        self._run_periodic_work()
        if self._members.is_changed:
            if not self._barrier.can_pass(self._members.left()):
                return self._regroup()
            self._members.ignore_change()
        lost_for_seconds = self._members.lost_for_seconds()
        if lost_for_seconds and not self._is_loss_reported:
            self._is_loss_reported = True
            self._emit(RendezvousLost(self._timeouts.grace_seconds))
        # A node that saved and left may have served the rendezvous. The workers of this host may
        # still be ending then.
        if lost_for_seconds > self._timeouts.grace_seconds:
            self._group.stop(self._timeouts.survivor_seconds)
            self._members.report_silent_nodes()
            return Outcome(
                OutcomeKind.UNREACHABLE, reason="the rendezvous does not answer any more"
            )
        return None

    def _regroup(self) -> Outcome:
        if self._members.lost:
            # All saves possible without the lost ranks are done. Further saves would wait for those
            # ranks.
            self._group.stop(self._timeouts.survivor_seconds)
        else:
            self._members.publish_regrouping()
            self._end(sends_request=True)
        return Outcome(OutcomeKind.REGROUPED, is_joined=self._members.is_joined)

    def _fail(self) -> Outcome:
        _wait_for_origin(self._group, self._clock)
        stopping_at_seconds = self._clock.monotonic_seconds()
        self._group.stop(self._timeouts.survivor_seconds)
        return self._failed(stopping_at_seconds)

    def _failed(self, before_seconds: float) -> Outcome:
        evidence = self._health.evidence()
        self.failures = find_failures(self._group.exits, before_seconds, evidence)
        first_failure, asked_by = self.failures[0], self._stops.asked_by
        has_stepped = self._health.last_step() >= 0
        if self._nodes > 1 and first_failure.is_mere_echo and not asked_by:
            self.failures = []
            return _remote_loss_outcome(first_failure, self._emit, has_stepped=has_stepped)
        outcome = _outcome_of(
            first_failure, evidence, is_other_host_blamed=self._peer_hangs.is_to_blame
        )
        outcome = replace(outcome, stop_signal=asked_by, has_stepped=has_stepped)
        return outcome.as_part_of_stop() if asked_by else outcome

    def _finish_agreed_exit(self) -> Outcome:
        """Wait for ranks that agreed to leave before this agent received a stop request.

        A rank that ends with a failure meanwhile did not agree to leave.
        """
        is_ended = self._end(sends_request=False)
        has_failed = self._has_failed()
        outcome = self._failed(math.inf).as_part_of_stop() if has_failed else None
        status = self._status_of_stop()
        is_saved = is_ended and outcome is None and status not in CODES_OF_LEAVING_AT_ONCE
        # Publish the decision first, because the other hosts may already wait for the decision.
        hosts_left = self._members.leave_or_stay(self._stops.request) if is_saved else 0
        # Another node may have stopped its workers because of a change that this node has not seen.
        self._members.look_uncached()
        if self._members.is_changed and not hosts_left:
            return Outcome(OutcomeKind.REGROUPED, is_joined=self._members.is_joined)
        if outcome is not None:
            return outcome
        if not is_ended:
            return Outcome(OutcomeKind.KILLED, stop_signal=self._stops.asked_by)
        if not is_saved:
            return Outcome(OutcomeKind.STOPPED, status=status, stop_signal=self._stops.asked_by)
        return Outcome(OutcomeKind.PREEMPTED, hosts_left=hosts_left)

    def _has_failed(self) -> bool:
        """Return whether a worker failed by itself, and not because of a known request to stop."""
        accepted_codes = {0, CODE_PREEMPTED, *CODES_OF_LEAVING_AT_ONCE}
        if self._stops.asked_by:
            accepted_codes.add(-signal.SIGTERM)
        return any(
            worker_exit.status not in accepted_codes and not worker_exit.is_killed
            for worker_exit in self._group.exits
        )

    def _stop(self) -> Outcome:
        asked_by = self._stops.asked_by
        now_seconds = self._clock.monotonic_seconds()
        request = self._stops.request or StopRequest(signal.Signals(asked_by).name, now_seconds)
        self._emit(StopRequested(request.reason, request.left_seconds(now_seconds)))
        is_ended = self._end(sends_request=True)
        self.failures = self._failures_of_stop()
        first_failure = self.failures[0] if self.failures else None
        outcome = Outcome(
            OutcomeKind.STOPPED,
            status=first_failure.status if first_failure else self._status_of_stop(),
            stop_signal=asked_by,
            cause=first_failure.cause if first_failure else None,
            is_unsaved=bool(self._attempt) and exited_without_save(self._notes) == self._attempt,
        )
        if is_ended and outcome.status == 0:
            self._report_done_and_wait(request)
        # Ranks that waited for a killed rank could not save without that rank.
        return (
            outcome
            if is_ended or outcome.is_killed_from_outside
            else replace(outcome, kind=OutcomeKind.KILLED)
        )

    def _report_done_and_wait(self, request: StopRequest) -> None:
        """Report that the ranks of this host are done, and wait for the other hosts."""
        while not self._barrier.is_passed() and not self._stops.is_urgent:
            if self._left_seconds(self._stops.request or request) <= _EXIT_RESERVE_SECONDS:
                return
            self._clock.sleep(_TICK_SECONDS)

    def _failures_of_stop(self) -> list[WorkerFailure]:
        """Return the workers that failed during a requested stop."""
        failures = find_failures(self._group.exits, math.inf, self._health.evidence())
        return [failure for failure in failures if failure.exit.status not in _ENDS_OF_A_STOP]

    def _status_of_stop(self) -> int:
        statuses = [exit_.status for exit_ in self._group.exits]
        # A rank killed by SIGTERM comes last, because its status does not show whether it saved.
        order = (CODES_OF_LEAVING_AT_ONCE, {CODE_PREEMPTED}, {-signal.SIGTERM})
        return next((status for codes in order for status in statuses if status in codes), 0)

    def _end(self, *, sends_request: bool) -> bool:
        """Give all workers the grace period, and return whether all ended without being killed."""
        grace = StopRequest("", self._clock.monotonic_seconds() + self._timeouts.grace_seconds)
        if sends_request:
            self._send_stop_request()
        while (
            self._group.is_running
            and not self._stops.is_urgent
            and self._left_seconds(self._stops.request or grace) > 0
        ):
            self._group.wait(_TICK_SECONDS)
            if sends_request and self._stops.request is not self._stop_request:
                # The request is new: less time is left, a stop follows a membership change, or
                # the stop is now for all hosts.
                self._send_stop_request()
        running_ranks = self._group.running_ranks
        if running_ranks:
            self._group.kill()
            self._group.wait_for_all(_KILL_SECONDS)
            reason = "asked twice" if self._stops.is_urgent else "the grace is over"
            self._emit(WorkersKilled(ranks=running_ranks, reason=reason))
        return not running_ranks

    def _left_seconds(self, request: StopRequest) -> float:
        left_seconds = request.left_seconds(self._clock.monotonic_seconds())
        if any(
            worker_exit.status == -signal.SIGKILL and not worker_exit.is_killed
            for worker_exit in self._group.exits
        ):
            # No save that needs the killed rank can finish. Keep time to query the newest commit.
            left_seconds -= min(
                _EXIT_RESERVE_SECONDS, _EXIT_RESERVE_SHARE * self._timeouts.grace_seconds
            )
        return left_seconds

    def _send_stop_request(self) -> None:
        self._stop_request = self._stops.request
        if self._stop_request is not None:
            self._members.leave_or_stay(self._stop_request)
            write_stop_request(self._notes, self._stop_request)
        self._group.signal(signal.SIGTERM)


def _wait_for_origin(group: WorkerGroup, clock: Clock) -> None:
    """Wait up to 1 s for the failed rank's exit, if only its peers have reported so far."""
    end_seconds = clock.monotonic_seconds() + _PEER_REPORT_SECONDS
    while clock.monotonic_seconds() < end_seconds:
        failures = find_failures(group.exits, math.inf)
        if not failures or not failures[0].error.is_echo or not group.is_running:
            return
        group.wait(_TICK_SECONDS)


def _outcome_of(first: WorkerFailure, evidence: Evidence, *, is_other_host_blamed: bool) -> Outcome:
    # A rank that waited for a hung rank of another host ends once that rank is killed. It reports
    # the loss or aborts. A rank that was itself killed, for memory or with its host, did not end
    # because of that hang.
    is_caused_remotely = is_other_host_blamed and first.status != -signal.SIGKILL
    return Outcome(
        OutcomeKind.FAILED,
        status=first.status,
        is_echo=first.is_mere_echo or is_caused_remotely,
        cause=Cause.PEER if is_caused_remotely else first.cause,
        is_host_broken=first.cause is Cause.GPU and bool(evidence.gpu_faults),
        is_refusal=first.is_refusal,
    )


def _remote_loss_outcome(first: WorkerFailure, emit: Emitter, *, has_stepped: bool) -> Outcome:
    """Return the outcome if the ranks of this host report only the loss of other ranks."""
    emit(RemoteRankLost(first.exit.command.rank, first.status, first.error.message))
    return Outcome(
        OutcomeKind.REGROUPED, first.status, is_echo=True, cause=Cause.PEER, has_stepped=has_stepped
    )


_BUILD_WAIT = re.compile(r'File "[^"]*torch/utils/file_baton\.py", line \d+ in wait')
_FILE_LOCK = re.compile(r'File "[^"]*/filelock/[^"]*\.py", line \d+ in ')
_LOCK_SUFFIX = ".lock"
_LOCKS_MAX = 4


def awaited_locks(stacks: Iterable[RankStacks], environ: Mapping[str, str]) -> list[str]:
    """Return a line for each lock file that a rank may wait for.

    The stacks show the kind of lock but no path. So the lines name the build locks of torch's
    extension cache, or the files that a process of this host has locked by ``flock``.

    Args:
        stacks: Stacks of the ranks of this host.
        environ: Environment of the ranks, which names the cache.
    """
    lines = []
    mains = {stack.rank: "\n".join(main_stack(stack.stacks)) for stack in stacks}
    if ranks := [rank for rank, text in mains.items() if _BUILD_WAIT.search(text)]:
        lines += _build_locks(ranks, find_locks(environ))
    if ranks := [rank for rank, text in mains.items() if _FILE_LOCK.search(text)]:
        lines += _file_locks(ranks, held_files(_LOCK_SUFFIX))
    return lines


def _build_locks(ranks: list[int], locks: list[Path]) -> list[str]:
    waiting_ranks = _waiting_ranks(ranks)
    if not locks:
        folder_text = "a folder outside torch's extension cache (`build_directory`)"
        return [f"{waiting_ranks} for a build lock of torch, the file `lock` in {folder_text}"]
    return [
        f"{waiting_ranks} for the build lock {lock}: {_lock_owner(lock)}"
        for lock in locks[:_LOCKS_MAX]
    ]


def _lock_owner(lock: Path) -> str:
    holders = users_of(lock).holders
    if holders:
        return f"{describe_process(holders[0])} has the lock open"
    command = f"rm {shell_quote(str(lock))}"
    return f"no process of this host has the lock open; if no other host builds: {command}"


def _file_locks(ranks: list[int], owners: Mapping[str, int]) -> list[str]:
    waiting_ranks = _waiting_ranks(ranks)
    if not owners:
        return [f"{waiting_ranks} for a file lock that no process of this host holds"]
    rows = sorted(owners.items())[:_LOCKS_MAX]
    return [
        f"{waiting_ranks} for a file lock; {describe_process(pid)} holds {path}"
        for path, pid in rows
    ]


def _waiting_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, ranks))} wait"
