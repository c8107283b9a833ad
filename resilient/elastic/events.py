"""Events of the agent, of preemption notices and of metrics."""

from __future__ import annotations

import re
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient.elastic.outcome import Cause
from resilient.elastic.restart_policy import name_of
from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.elastic.worker_errors import WorkerFailure

_TRACEBACK_LINES_MAX = 15
_CHAIN = "\nThe above exception was the direct cause of the following exception:\n\n"
_RANK = re.compile(r"rank \d+: ")


@dataclass(frozen=True, slots=True)
class AgentStarted(Event):
    """An agent started; later events contain its name."""

    level: ClassVar[Level] = Level.DEBUG  # Users see the start of the first attempt.


@dataclass(frozen=True, slots=True)
class WorkerGroupStarted(Event):
    """The workers of one attempt run on this host.

    Attributes:
        life: Number of the attempt.
        attempt: Name of the attempt.
        cause: Reason for the attempt.
        world_size: Number of workers of all hosts.
        local_world_size: Number of workers of this host.
        nodes: Number of hosts.
        is_warm: Whether the workers were forked from the pre-imported fork server.
        met_seconds: Time of the rendezvous with the other hosts.
        start_seconds: Time to start the processes.
    """

    life: int
    attempt: str
    cause: str
    world_size: int
    local_world_size: int
    nodes: int
    is_warm: bool
    met_seconds: float
    start_seconds: float

    def message(self) -> str:
        """Return the message: number of ranks and reason of the attempt."""
        nodes_text = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"attempt {self.life}: {ranks}{nodes_text} ({self.cause})"


@dataclass(frozen=True, slots=True)
class WorkerFailed(Event):
    """The worker that failed first and the agent's reaction, as one block for the user.

    Attributes:
        rank: Global rank of the worker.
        local_rank: Rank among the workers of this host.
        host: Name of the host.
        pid: Process id of the worker.
        life: Number of the attempt.
        status: Exit code, or minus the number of the signal.
        cause: Value of :class:`resilient.elastic.outcome.Cause`.
        proof: Evidence for the cause; empty if none is needed or known.
        error: The exception, such as ``ValueError: boom``; empty if the worker reported none.
        hint: Hint of one of our errors: the next command to run.
        traceback: Traceback as Python prints it; only the frames if the error rejects an input.
        others: Number of other workers of this host that failed later.
        safe: Newest checkpoint that is committed.
        follows: Next action of the agent.
    """

    level: ClassVar[Level] = Level.WARNING
    rank: int
    local_rank: int
    host: str
    pid: int
    life: int
    status: int
    cause: str
    proof: str
    error: str
    hint: str
    traceback: str
    others: int
    safe: str
    follows: str

    def message(self) -> str:
        """Return the message: first failure, its exit, the safe checkpoint and the next action."""
        rows = [
            ("where", f"host {self.host}, pid {self.pid}, local rank {self.local_rank}"),
            ("exit", _explain(self)),
            ("others", _count(self.others)),
            ("safe", self.safe),
            ("hint", self.hint),
            ("next", self.follows),
        ]
        head = f"rank {self.rank} failed first in attempt {self.life}: " + (
            self.error or name_of(self.status)
        )
        body = [f"  {name:<7} {text}" for name, text in rows if text]
        traceback_lines = [
            f"    {row}" for row in self.traceback.splitlines()[-_TRACEBACK_LINES_MAX:]
        ]
        return "\n".join([head, *traceback_lines, *body])


def frames_of(traceback: str, error: str) -> str:
    """Return a traceback without the text of its error, which the message already has.

    If a rank raises the error of another rank again, the traceback has the text twice.
    """
    text = _RANK.sub("", error.partition(": ")[2]).strip()
    if not text:
        return traceback
    *causes, last = traceback.split(_CHAIN)
    frames, found, rest = last.rpartition(text)
    if found and not rest.strip():
        last = frames.rpartition("\n")[0]
    return _CHAIN.join([*(cause for cause in causes if text not in cause), last])


def failure_event(
    failures: Sequence[WorkerFailure], attempt: int, safe: str, follows: str
) -> WorkerFailed:
    """Return the event for the first of ``failures``, with the number of the others."""
    first_failure = failures[0]
    error = first_failure.error
    return WorkerFailed(
        rank=first_failure.exit.command.rank,
        local_rank=first_failure.exit.command.local_rank,
        host=socket.gethostname(),
        pid=first_failure.exit.pid,
        life=attempt,
        status=first_failure.status,
        cause=first_failure.cause.value,
        proof=first_failure.proof,
        error=error.message,
        hint=error.hint,
        traceback=frames_of(error.traceback, error.message)
        if first_failure.is_refusal
        else error.traceback,
        others=len(failures) - 1,
        safe=safe,
        follows=follows,
    )


@dataclass(frozen=True, slots=True)
class AttemptEnded(Event):
    """The last worker of this host has exited.

    Attributes:
        life: Number of the attempt.
        attempt: Name of the attempt.
        ended: Value of :class:`resilient.elastic.outcome.OutcomeKind`.
        step: Last step that a worker of this host finished, -1 for none.
        stop_seconds: Time from the first sign of the end to this event.
    """

    level: ClassVar[Level] = Level.DEBUG  # The next event informs users.
    life: int
    attempt: str
    ended: str
    step: int
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class ProgressUnknown(Event):
    """An attempt failed, and the repository did not show whether the attempt committed anything."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "the repository did not answer in time: the progress of this attempt is unknown, and the "
        "attempt does not count for a crash loop"
    )


@dataclass(frozen=True, slots=True)
class LaunchCountUnknown(Event):
    """The number of earlier agent runs is unknown."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "the repository did not answer in time: earlier launches are unknown, so "
        "--max-preemptions counts only from here on"
    )


@dataclass(frozen=True, slots=True)
class ResumeOptionRepeated(Event):
    """The user chose with ``--resume`` where training continues.

    Attributes:
        resume: Value of ``--resume``.
        job: Name of the scheduler job; empty without one.
    """

    level: ClassVar[Level] = Level.WARNING
    resume: str
    job: str = ""

    def message(self) -> str:
        """Return the message, which says how long the option applies."""
        scope_text = f"--resume {self.resume} holds until this run has saved a checkpoint"
        if self.job:
            return (
                f"{scope_text}; restarts and requeues of {self.job} then continue from its newest "
                "checkpoint"
            )
        return (
            f"{scope_text}; restarts then continue from its newest checkpoint. The next start of "
            "this command applies --resume again: omit it to continue"
        )


@dataclass(frozen=True, slots=True)
class RestartDecisionMade(Event):
    """Decision of the restart policy at the end of an attempt.

    Attributes:
        ended: Kind of the outcome.
        cause: Cause of the first failure, if a worker failed.
        status: Exit status of that worker.
        action: ``Finish``, ``Restart``, ``LeaveHost`` or ``GiveUp``.
        reason: Reason of the action.
        restarts_left: Restarts left in the window after this action.
        no_progress_lives: Consecutive attempts without progress.
    """

    level: ClassVar[Level] = Level.DEBUG  # The failure report and the last line inform users.
    ended: str
    cause: str
    status: int
    action: str
    reason: str
    restarts_left: int
    no_progress_lives: int


@dataclass(frozen=True, slots=True)
class GroupRestarted(Event):
    """An attempt ended and the next one begins.

    Attributes:
        cause: Reason for the restart, one word.
        next_life: Number of the next attempt.
        restarts_left: Restarts left after failures.
        stop_seconds: Time from the first sign of the end to the exit of the last worker.
    """

    level: ClassVar[Level] = Level.DEBUG  # The start of the next attempt informs users.
    cause: str
    next_life: int
    restarts_left: int
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The agent was asked to stop and passed the request to its workers once."""

    template: ClassVar[str] = "{reason}: the workers have {grace_seconds:.0f} s to save and exit"
    reason: str
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class WorkersKilled(Event):
    """Workers did not end in time and were killed."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "killed ranks {ranks}: {reason}"
    ranks: list[int]
    reason: str


@dataclass(frozen=True, slots=True)
class RendezvousLost(Event):
    """The rendezvous of the nodes does not answer."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "the rendezvous is unreachable: the workers have {grace_seconds:g} s to exit"
    )
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The agent exits."""

    template: ClassVar[str] = "exit {exit_code}: {reason}"
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunAborted(RunEnded):
    """The agent exits before the run is complete."""

    level: ClassVar[Level] = Level.ERROR


def _explain(failed: WorkerFailed) -> str:
    status, proof = failed.status, f" ({failed.proof})" * bool(failed.proof)
    if failed.cause == Cause.HANG.value:
        return "killed by the agent after it had taken the stacks"
    by = " by the kernel's out-of-memory killer" * (failed.cause == Cause.OOM_KILL.value)
    if proof:
        return f"{name_of(status)}{by}{proof}"
    if status == -signal.SIGKILL:
        return "SIGKILL: most often the kernel's out-of-memory killer (dmesg says so)"
    if status == -signal.SIGBUS:
        return "SIGBUS: most often a full /dev/shm"
    return name_of(status)


def _count(others: int) -> str:
    if not others:
        return ""
    return f"{others} more {'worker' if others == 1 else 'workers'} of this host failed after it"


@dataclass(frozen=True, slots=True)
class NoticeSourcesStarted(Event):
    """The agent polls sources of preemption notices for this host."""

    sources: tuple[str, ...]

    def message(self) -> str:
        """Return the message: names of the sources."""
        return f"watching for notices of preemption: {', '.join(self.sources)}"


@dataclass(frozen=True, slots=True)
class NoticeSourceLost(Event):
    """A source of preemption notices fails; the agent polls it again at growing intervals."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "notices of {source} are unavailable: {reason}; signals still stop the run, and the agent "
        "retries"
    )
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeSourceFound(Event):
    """A lost source of preemption notices answers again."""

    template: ClassVar[str] = "notices of {source} are available again"
    source: str


@dataclass(frozen=True, slots=True)
class NoticeInvalid(Event):
    """A source returned an invalid preemption notice; the agent ignores it."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "{source} sent an invalid notice, which is ignored: {reason}"
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeReceived(Event):
    """A preemption notice announces that this host will be taken away.

    Attributes:
        reason: Reason of the notice, with the source first.
        left_seconds: Time until the host is taken away; None if unknown.
        stops_in_seconds: Time until training is asked to stop, 0 for now.
    """

    reason: str
    left_seconds: float | None
    stops_in_seconds: float

    def message(self) -> str:
        """Return the message: reason, time left, and the agent's reaction."""
        time_left = "soon" if self.left_seconds is None else f"in {self.left_seconds:.0f} s"
        follows = (
            "stopping now"
            if not self.stops_in_seconds
            else f"training continues for {self.stops_in_seconds:.0f} s"
        )
        return f"notice: {self.reason}, this host stops {time_left}: {follows}"


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn(Event):
    """The source withdrew a preemption notice that was due later."""

    template: ClassVar[str] = "notice withdrawn: {reason}; training continues"
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeExpired(Event):
    """A preemption notice was due in the past, but the host still runs; the agent ignores it."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "notice: {reason} was due {ago_seconds:.0f} s ago, and is ignored"
    reason: str
    ago_seconds: float


@dataclass(frozen=True, slots=True)
class PreemptionAdvised(Event):
    """A preemption of this host became more likely; the run continues."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "notice: {reason}; training continues until the host must stop"
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeAckFailed(Event):
    """The agent could not report that the host is free, so the cloud takes the host later."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "cannot acknowledge to {source} that everything is saved: {reason}"
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class MetricsServed(Event):
    """Prometheus can scrape metrics at this URL."""

    template: ClassVar[str] = "metrics at {url}"
    url: str


@dataclass(frozen=True, slots=True)
class MetricsFailed(Event):
    """Metrics could not be collected or written; training and the agent continue without them."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "metrics: {where}: {reason}; training is not affected"
    where: str
    reason: str
