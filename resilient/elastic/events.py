"""Events of the agent.

Events of the agent.

Events of notices.

Events of metrics.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class AgentStarted(Event):
    """An agent is there; what it says from here on is told under its name."""

    level: ClassVar[Level] = Level.DEBUG  # the start of its first life says it to people


@dataclass(frozen=True, slots=True)
class WorkerGroupStarted(Event):
    """The workers of one life run on this host.

    Attributes:
        life: its number.
        attempt: its name.
        cause: why it began.
        world_size: workers of all hosts.
        local_world_size: workers of this host.
        nodes: how many hosts.
        is_warm: whether the workers were forked from a process that had imported what they need.
        met_seconds: how long it took to meet the other hosts.
        start_seconds: how long it took to start the processes.
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

    def line(self) -> str:
        """Say how many workers started and why."""
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"life {self.life}: {ranks}{where} ({self.cause})"


@dataclass(frozen=True, slots=True)
class WorkerFailed(Event):
    """The worker that failed first, and what follows: one block for a person.

    Attributes:
        rank: of the worker, among all.
        local_rank: among those of this host.
        host: where it ran.
        pid: its process.
        life: in which life of the group.
        status: exit code, or minus the signal's number.
        cause: why, as one word of :class:`resilient.elastic.outcome.Cause`.
        proof: what proves the cause; empty where it needs no proof or there is none.
        error: the exception, ``ValueError: boom``; empty when the worker left no word.
        hint: what an error of ours says to run next.
        traceback: as python prints it.
        others: how many other workers of this host failed after it.
        safe: which checkpoint nothing can take away any more.
        follows: what the agent does now.
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

    def line(self) -> str:
        """Say who failed first, how, what is safe and what follows."""
        rows = [
            ("where", f"host {self.host}, pid {self.pid}, local rank {self.local_rank}"),
            ("exit", _explain(self)),
            ("others", _count(self.others)),
            ("safe", self.safe),
            ("hint", self.hint),
            ("next", self.follows),
        ]
        head = f"rank {self.rank} failed first in life {self.life}: " + (
            self.error or name_of(self.status)
        )
        body = [f"  {name:<7} {text}" for name, text in rows if text]
        quoted = [f"    {row}" for row in self.traceback.splitlines()[-_TRACEBACK_LINES_MAX:]]
        return "\n".join([head, *quoted, *body])


def tell_failure(
    failures: Sequence[WorkerFailure], life: int, safe: str, follows: str
) -> WorkerFailed:
    """Return the fact of the first of ``failures``; the others are counted."""
    first = failures[0]
    return WorkerFailed(
        rank=first.exit.command.rank,
        local_rank=first.exit.command.local_rank,
        host=socket.gethostname(),
        pid=first.exit.pid,
        life=life,
        status=first.status,
        cause=first.cause.value,
        proof=first.proof,
        error=first.error.message,
        hint=first.error.hint,
        traceback=first.error.traceback,
        others=len(failures) - 1,
        safe=safe,
        follows=follows,
    )


@dataclass(frozen=True, slots=True)
class AttemptEnded(Event):
    """The last worker of this host is gone.

    Attributes:
        life: its number.
        attempt: its name.
        ended: how, as one word of :class:`resilient.elastic.outcome.OutcomeKind`.
        step: the last that a worker of this host had finished, -1 for none.
        stop_seconds: from the first sign that the life was over to this.
    """

    level: ClassVar[Level] = Level.DEBUG  # what follows says it to people
    life: int
    attempt: str
    ended: str
    step: int
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class ProgressUnknown(Event):
    """A life failed, and the repository does not say whether it had committed anything."""

    level: ClassVar[Level] = Level.WARNING

    def line(self) -> str:
        """Say what that means for the rule against crash loops."""
        return (
            "the repository did not answer in time: whether this life made progress is not known, "
            "and it counts neither for nor against a crash loop"
        )


@dataclass(frozen=True, slots=True)
class LaunchCountUnknown(Event):
    """Nobody knows how often the run was launched before."""

    level: ClassVar[Level] = Level.WARNING

    def line(self) -> str:
        """Say what --max-preemptions means then."""
        return (
            "the repository did not answer in time: earlier launches are not known, so "
            "--max-preemptions counts the interruptions from here on only"
        )


@dataclass(frozen=True, slots=True)
class ResumeOptionRepeated(Event):
    """The user said how to resume.

    Attributes:
        resume: Value of ``--resume``.
        job: Name of the scheduler job; empty without one.
    """

    level: ClassVar[Level] = Level.WARNING
    resume: str
    job: str = ""

    def line(self) -> str:
        """Say how long the wish holds."""
        until = f"--resume {self.resume} holds until this run has saved a checkpoint"
        if self.job:
            return f"{until}; restarts and requeues of {self.job} then continue from its newest"
        return (
            f"{until}; restarts then continue from its newest. The next start of this command "
            "obeys the wish again: leave it out to continue"
        )


@dataclass(frozen=True, slots=True)
class RestartDecisionMade(Event):
    """What the table says to a life's end.

    Attributes:
        ended: how the life ended.
        cause: why its first worker failed, if one did.
        status: of that worker.
        action: ``Finish``, ``Restart``, ``LeaveHost`` or ``GiveUp``.
        reason: of the action.
        restarts_left: within the window, the action paid.
        no_progress_lives: in a row.
    """

    level: ClassVar[Level] = Level.DEBUG  # the report and the last line say it to people
    ended: str
    cause: str
    status: int
    action: str
    reason: str
    restarts_left: int
    no_progress_lives: int


@dataclass(frozen=True, slots=True)
class GroupRestarted(Event):
    """A life ended and another begins.

    Attributes:
        cause: why, as one word.
        next_life: its number.
        restarts_left: after failures.
        stop_seconds: from the first sign that the life was over to the end of its last worker.
    """

    level: ClassVar[Level] = Level.DEBUG  # the start of the next life says it to people
    cause: str
    next_life: int
    restarts_left: int
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """Somebody asked the agent to stop; the workers were told once."""

    reason: str
    grace_seconds: float

    def line(self) -> str:
        """Say who asked and how long the workers have."""
        return f"{self.reason}: the workers have {self.grace_seconds:.0f} s to save and end"


@dataclass(frozen=True, slots=True)
class WorkersKilled(Event):
    """Workers did not end in time."""

    level: ClassVar[Level] = Level.WARNING
    ranks: list[int]
    reason: str

    def line(self) -> str:
        """Say who was killed and why."""
        return f"killed ranks {self.ranks}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RendezvousLost(Event):
    """The place where the nodes meet does not answer."""

    level: ClassVar[Level] = Level.WARNING
    grace_seconds: float

    def line(self) -> str:
        """Say what the workers may still do."""
        return f"the rendezvous is gone: the workers have {self.grace_seconds:g} s to end"


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The agent leaves."""

    exit_code: int
    reason: str

    def line(self) -> str:
        """Say the exit code and why."""
        return f"exit {self.exit_code}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RunAborted(RunEnded):
    """The agent leaves, and the run is not done."""

    level: ClassVar[Level] = Level.ERROR


def _explain(failed: WorkerFailed) -> str:
    status, proof = failed.status, f" ({failed.proof})" * bool(failed.proof)
    if failed.cause == Cause.HANG.value:
        return "killed by the agent after its stacks were taken"
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
    """Somebody is asked whether this host will be taken away."""

    sources: tuple[str, ...]

    def line(self) -> str:
        """Say who is asked."""
        return f"watching for notices of preemption: {', '.join(self.sources)}"


@dataclass(frozen=True, slots=True)
class NoticeSourceLost(Event):
    """A source of notices cannot be asked; it is tried again, more and more rarely."""

    level: ClassVar[Level] = Level.WARNING
    source: str
    reason: str

    def line(self) -> str:
        """Say who, why, and what still works."""
        return (
            f"notices of {self.source} cannot be had: {self.reason}; signals still stop the run, "
            "and it is asked again"
        )


@dataclass(frozen=True, slots=True)
class NoticeSourceFound(Event):
    """A source of notices that was lost answers."""

    source: str

    def line(self) -> str:
        """Say who."""
        return f"notices of {self.source} are heard again"


@dataclass(frozen=True, slots=True)
class NoticeInvalid(Event):
    """A source said something that is no notice; it is ignored."""

    level: ClassVar[Level] = Level.WARNING
    source: str
    reason: str

    def line(self) -> str:
        """Say who and what."""
        return f"{self.source} said what makes no sense, which is ignored: {self.reason}"


@dataclass(frozen=True, slots=True)
class NoticeReceived(Event):
    """This host will be taken away.

    Attributes:
        reason: the source first.
        left_seconds: until then; None if nobody says.
        stops_in_seconds: when training is asked to stop, 0 for now.
    """

    reason: str
    left_seconds: float | None
    stops_in_seconds: float

    def line(self) -> str:
        """Say why, when, and what follows."""
        left = "soon" if self.left_seconds is None else f"in {self.left_seconds:.0f} s"
        follows = (
            "stopping now"
            if not self.stops_in_seconds
            else f"training goes on for {self.stops_in_seconds:.0f} s"
        )
        return f"notice: {self.reason}, this host goes {left}: {follows}"


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn(Event):
    """What was announced for later is not announced any more."""

    reason: str

    def line(self) -> str:
        """Say what it was."""
        return f"notice withdrawn: {self.reason}; training goes on"


@dataclass(frozen=True, slots=True)
class NoticeExpired(Event):
    """A notice of the past, which this host has outlived; it is ignored."""

    level: ClassVar[Level] = Level.WARNING
    reason: str
    ago_seconds: float

    def line(self) -> str:
        """Say what and how old."""
        return f"notice: {self.reason} was due {self.ago_seconds:.0f} s ago, which is ignored"


@dataclass(frozen=True, slots=True)
class PreemptionAdvised(Event):
    """This host is likelier than before to be taken away; nothing is stopped for that."""

    level: ClassVar[Level] = Level.WARNING
    reason: str

    def line(self) -> str:
        """Say what was advised."""
        return f"notice: {self.reason}; training goes on until the host is really to go"


@dataclass(frozen=True, slots=True)
class NoticeAckFailed(Event):
    """The cloud was not told that it may take the host; it takes it later."""

    level: ClassVar[Level] = Level.WARNING
    source: str
    reason: str

    def line(self) -> str:
        """Say who was not told, and why."""
        return f"{self.source} was not told that all is saved: {self.reason}"


@dataclass(frozen=True, slots=True)
class MetricsServed(Event):
    """Prometheus may ask here."""

    url: str

    def line(self) -> str:
        """Say where."""
        return f"metrics at {self.url}"


@dataclass(frozen=True, slots=True)
class MetricsFailed(Event):
    """Figures could not be had or written; training and the agent go on without them."""

    level: ClassVar[Level] = Level.WARNING
    where: str
    reason: str

    def line(self) -> str:
        """Say what failed, and that nothing else did."""
        return f"metrics: {self.where}: {self.reason}; training is not affected"
