"""Classes for the outcome of an attempt and the cause of a worker failure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import Enum

from resilient.errors import (
    DeadlineExceeded,
    NumbersBroken,
    PeerFailed,
    Preempted,
    SaveAbandoned,
    StoreError,
    StoreFull,
    StoreUnavailable,
)


class Cause(Enum):
    """Cause of a failure, one word for machines and users."""

    EXIT = "exit"
    """The worker ended with its own exit code."""
    SIGNAL = "signal"
    """A signal of unknown origin ended the worker."""
    OOM_KILL = "oom_kill"
    """The kernel's out-of-memory killer ended the worker."""
    HANG = "hang"
    """The worker made no progress within its deadline."""
    NUMBERS = "numbers"
    """The loss was not a number, or far from earlier losses."""
    DISK_FULL = "disk_full"
    STORAGE_UNREACHABLE = "storage_unreachable"
    GPU = "gpu"
    """A device of the worker failed."""
    PEER = "peer"
    """The worker only reports that another rank failed or went silent."""


ECHO_CODES = frozenset({PeerFailed.code, DeadlineExceeded.code, SaveAbandoned.code})
_BY_CODE = {
    StoreFull.code: Cause.DISK_FULL,
    StoreUnavailable.code: Cause.STORAGE_UNREACHABLE,
    StoreError.code: Cause.STORAGE_UNREACHABLE,
    NumbersBroken.code: Cause.NUMBERS,
    **dict.fromkeys(ECHO_CODES, Cause.PEER),
}
# OSError prints its number: 28 is ENOSPC, 122 is EDQUOT.
_DISK_FULL = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded")
_GPU = re.compile(
    r"CUDA error: (?!out of memory)|CUDNN_STATUS_(INTERNAL|EXECUTION)|uncorrectable ECC|"
    r"unspecified launch failure|device-side assert|fallen off the bus"
)
_CHILD_KILLED = re.compile(r"killed by signal: Killed")
# Match only messages of a collective or of the shared store: scripts also open connections.
_PEER_LOST = re.compile(
    r"gloo/transport/.*(Read error|Write error|Connection (closed|reset) by peer|Socket closed)|"
    r"ncclRemoteError|remote process exit|"
    r"^Dist\w+Error: .*(Broken pipe|Connection reset by peer|Connection was likely closed)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations of the host beside the exit of a worker.

    Attributes:
        oom_kills: Processes in the workers' control groups that the kernel killed for memory
            in this attempt; None if no control group reports them.
        machine_oom_kills: The same count for the whole machine; None if it is not reported.
        gpu_faults: Faults that the devices of this host reported in this attempt.
    """

    oom_kills: int | None = None
    machine_oom_kills: int | None = None
    gpu_faults: tuple[str, ...] = ()


NO_EVIDENCE = Evidence()


def is_echo(code: str, message: str) -> bool:
    """Return whether an error only reports that another rank failed or went silent.

    Such an error counts as later than the reported failure, whatever its timestamp. The connections
    of a rank that exits without an error close before its exit is visible.

    Args:
        code: RES id of the error, if it is one of ours.
        message: Error message with its type in front.
    """
    return code in ECHO_CODES or bool(_PEER_LOST.search(message))


def find_cause(status: int, code: str, message: str, evidence: Evidence) -> tuple[Cause, str]:
    """Return the cause of a worker failure and its evidence as readable text.

    Args:
        status: Exit code, or minus the number of the signal.
        code: RES id of the error, if it is one of ours.
        message: Error message, empty if the worker reported none.
        evidence: Observations of the host.
    """
    if status == -signal.SIGKILL or _CHILD_KILLED.search(message):
        cause = _cause_of_kill(status, evidence)
        if cause is not None:
            return cause
    # A device that fails also breaks its connections.
    if code in _BY_CODE or (is_echo(code, message) and not evidence.gpu_faults):
        return _BY_CODE.get(code, Cause.PEER), ""
    if _DISK_FULL.search(message):
        return Cause.DISK_FULL, ""
    if _GPU.search(message) or evidence.gpu_faults:
        return Cause.GPU, "; ".join(evidence.gpu_faults)
    return (Cause.SIGNAL if status < 0 else Cause.EXIT), ""


def _cause_of_kill(status: int, evidence: Evidence) -> tuple[Cause, str] | None:
    """Return cause and evidence of a kill from the kernel's counters, None without evidence."""
    if evidence.oom_kills:
        return Cause.OOM_KILL, f"out-of-memory kills in the control group: {evidence.oom_kills}"
    if evidence.oom_kills is None and evidence.machine_oom_kills:
        count = evidence.machine_oom_kills
        return Cause.OOM_KILL, f"most likely: out-of-memory kills on this host meanwhile: {count}"
    if status == -signal.SIGKILL and evidence.oom_kills == 0:
        return Cause.SIGNAL, "not the out-of-memory killer: the control group counts none"
    return None


CODE_PREEMPTED = Preempted.exit_code


class OutcomeKind(Enum):
    """End of an attempt; the first column of the decision table."""

    SUCCEEDED = "succeeded"
    PREEMPTED = "preempted"
    FAILED = "failed"
    REGROUPED = "regrouped"
    STOPPED = "stopped"
    KILLED = "killed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an attempt of the worker group.

    Attributes:
        kind: Kind of the end.
        status: Exit code of the worker that failed first, or minus the number of the signal.
            For UNREACHABLE: the exit code of another host that gave up, if known.
        stop_signal: Signal that asked the agent to stop, 0 for none.
        is_echo: Whether the worker only reports that another rank failed.
        reason: Detail for the user, if the kind is not enough.
        cause: Cause of the first worker failure.
        is_joined: For REGROUPED: whether nodes want to join; otherwise nodes left.
        is_host_broken: Whether a device reported a fault, or a worker cannot be killed.
        is_unsaved: Whether a worker of this attempt reported that SIGTERM loses unsaved work.
        has_stepped: For FAILED: whether a worker of this host finished a step in this attempt.
        newest: Newest checkpoint, None if nothing was committed, empty if unknown.
        is_refusal: Whether the first rank ended with an error that rejects its input.
        hosts_left: For PREEMPTED: number of hosts that continue without the leaving hosts;
            0 if all leave.
    """

    kind: OutcomeKind
    status: int = 0
    stop_signal: int = 0
    is_echo: bool = False
    reason: str = ""
    cause: Cause | None = None
    is_joined: bool = False
    is_host_broken: bool = False
    is_unsaved: bool = False
    has_stepped: bool = False
    newest: str | None = ""
    hosts_left: int = 0
    is_refusal: bool = False

    @property
    def is_killed_from_outside(self) -> bool:
        """True if the rank that ended first was killed from outside, but not for lack of memory."""
        return self.status == -signal.SIGKILL and self.cause is Cause.SIGNAL

    @property
    def is_killed_in_training(self) -> bool:
        """True if a training attempt was killed from outside; this is not a crash loop."""
        return self.kind is OutcomeKind.FAILED and self.is_killed_from_outside and self.has_stepped

    def as_part_of_stop(self) -> Outcome:
        """Return this failure as part of a stop if its rank was killed from outside."""
        is_part = self.kind is OutcomeKind.FAILED and self.is_killed_from_outside
        return replace(self, kind=OutcomeKind.STOPPED) if is_part else self

    @property
    def is_peer_loss(self) -> bool:
        """True if only the loss of ranks of other hosts ended the attempt here."""
        return self.kind is OutcomeKind.REGROUPED and self.is_echo

    @property
    def has_lost_peers_in_stop(self) -> bool:
        """True if ranks lost their peers during a stop, and a checkpoint is committed."""
        return self.kind is OutcomeKind.STOPPED and self.cause is Cause.PEER and bool(self.newest)

    @property
    def is_interruption(self) -> bool:
        """True if the attempt ended by preemption or a stop request, without a failure."""
        if self.kind is OutcomeKind.STOPPED:
            is_requested_stop = self.status in (CODE_PREEMPTED, -signal.SIGTERM)
            return self.is_killed_from_outside or is_requested_stop or self.has_lost_peers_in_stop
        is_left = self.kind is OutcomeKind.REGROUPED and not (self.is_joined or self.is_echo)
        return self.kind is OutcomeKind.PREEMPTED or is_left
