"""How an attempt ended and why (values).

Why a worker failed, as one word that machines count and people understand (pure).

How the life of a worker group ended, as far as what follows depends on it (values).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import Enum

from resilient.errors import (
    ConfigError,
    DeadlineExceeded,
    IncompatibleCheckpoint,
    IntegrityError,
    NoIntactCheckpoint,
    NotExclusive,
    NothingToResume,
    NumbersBroken,
    PeerFailed,
    Preempted,
    RepositoryNotFound,
    SaveAbandoned,
    SignatureRefused,
    StartOverRefused,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownLayout,
    UnsavableState,
    UsageError,
    WriterAlive,
)


class Cause(Enum):
    """What was behind a failure."""

    EXIT = "exit"
    """It ended with a code of its own."""
    SIGNAL = "signal"
    """A signal ended it, and nothing says who sent it."""
    OOM_KILL = "oom_kill"
    """The kernel's out-of-memory killer ended it."""
    HANG = "hang"
    """It made no progress within its deadline."""
    NUMBERS = "numbers"
    """Its loss was no number, or far from those before."""
    DISK_FULL = "disk_full"
    STORAGE_UNREACHABLE = "storage_unreachable"
    GPU = "gpu"
    """A device failed under it."""
    PEER = "peer"
    """It only tells that another rank failed or went silent."""


ECHO_CODES = frozenset({PeerFailed.code, DeadlineExceeded.code, SaveAbandoned.code})
REFUSAL_CODES = frozenset(
    kind.code
    for kind in (
        ConfigError,
        IncompatibleCheckpoint,
        IntegrityError,
        NoIntactCheckpoint,
        NotExclusive,
        NothingToResume,
        RepositoryNotFound,
        SignatureRefused,
        StartOverRefused,
        UnknownLayout,
        UnsavableState,
        UsageError,
        WriterAlive,
    )
)
"""RES ids of errors by which a rank refuses to begin: the next attempt would refuse as well."""
_BY_CODE = {
    StoreFull.code: Cause.DISK_FULL,
    StoreUnavailable.code: Cause.STORAGE_UNREACHABLE,
    StoreError.code: Cause.STORAGE_UNREACHABLE,
    NumbersBroken.code: Cause.NUMBERS,
    **dict.fromkeys(ECHO_CODES, Cause.PEER),
}
# OSError prints its number: ENOSPC and EDQUOT.
_DISK_FULL = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded")
_GPU = re.compile(
    r"CUDA error: (?!out of memory)|CUDNN_STATUS_(INTERNAL|EXECUTION)|uncorrectable ECC|"
    r"unspecified launch failure|device-side assert|fallen off the bus"
)
_CHILD_KILLED = re.compile(r"killed by signal: Killed")
# Only in the words of a collective, or of the store that all share: a script has connections too.
_PEER_GONE = re.compile(
    r"gloo/transport/.*(Read error|Write error|Connection (closed|reset) by peer|Socket closed)|"
    r"ncclRemoteError|remote process exit|"
    r"^Dist\w+Error: .*(Broken pipe|Connection reset by peer|Connection was likely closed)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen beside a worker's end.

    Attributes:
        oom_kills: processes of the workers' control groups that the kernel killed for memory in
            this life; None where no control group tells.
        machine_oom_kills: the same of the whole machine; None where it does not tell.
        gpu_faults: what the devices of this host reported in this life.
    """

    oom_kills: int | None = None
    machine_oom_kills: int | None = None
    gpu_faults: tuple[str, ...] = ()


NOTHING_SEEN = Evidence()


def is_echo(code: str, message: str) -> bool:
    """Say whether an error only tells that another rank failed or went silent.

    It comes after what it tells of, whenever it was written: a rank that ends without a word has
    its connections closed before anybody can see that it ended.

    Args:
        code: the RES id of the error, if it was one of ours.
        message: with its type in front.
    """
    return code in ECHO_CODES or bool(_PEER_GONE.search(message))


def find_cause(status: int, code: str, message: str, seen: Evidence) -> tuple[Cause, str]:
    """Return why a worker failed, and what proves it, for a person.

    Args:
        status: its exit code, or minus the signal that ended it.
        code: the RES id of its error, if it was one of ours.
        message: of its error, empty if it left no word.
        seen: what was seen beside it.
    """
    if status == -signal.SIGKILL or _CHILD_KILLED.search(message):
        found = _of_kill(status, seen)
        if found is not None:
            return found
    # A device that breaks takes its own connections along.
    if code in _BY_CODE or (is_echo(code, message) and not seen.gpu_faults):
        return _BY_CODE.get(code, Cause.PEER), ""
    if _DISK_FULL.search(message):
        return Cause.DISK_FULL, ""
    if _GPU.search(message) or seen.gpu_faults:
        return Cause.GPU, "; ".join(seen.gpu_faults)
    return (Cause.SIGNAL if status < 0 else Cause.EXIT), ""


def _of_kill(status: int, seen: Evidence) -> tuple[Cause, str] | None:
    """Return what the counters prove of a kill, None if they prove nothing."""
    if seen.oom_kills:
        return Cause.OOM_KILL, f"the control group counts {seen.oom_kills} killed for memory"
    if seen.oom_kills is None and seen.machine_oom_kills:
        count = seen.machine_oom_kills
        return Cause.OOM_KILL, f"most likely: this host killed {count} for memory meanwhile"
    if status == -signal.SIGKILL and seen.oom_kills == 0:
        return Cause.SIGNAL, "not the out-of-memory killer: the control group counts none"
    return None


CODE_PREEMPTED = Preempted.exit_code


class OutcomeKind(Enum):
    """How a life ended; the first column of the table."""

    SUCCEEDED = "succeeded"
    PREEMPTED = "preempted"
    FAILED = "failed"
    REGROUPED = "regrouped"
    STOPPED = "stopped"
    KILLED = "killed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to the group.

    Attributes:
        kind: how the life ended.
        status: of the worker that failed first: its exit code, or minus the signal's number; of
            UNREACHABLE with which code another host gave up, if it said so.
        stop_signal: the signal that asked the agent to stop, 0 when none did.
        is_echo: the worker only reports that a rank elsewhere failed.
        reason: detail for a person, where the kind alone does not say it.
        cause: why the worker failed that failed first.
        is_joined: of REGROUPED, whether nodes want to join; else some have left.
        is_host_broken: whether a device reported a fault, or a worker cannot be killed.
        is_unsaved: whether a worker of this life said that SIGTERM costs it what it has not saved.
        has_stepped: of FAILED, whether a worker of this host had finished a step in this life.
        newest: the newest checkpoint, None where nothing was committed; empty when not known.
        is_refusal: Whether the first rank ended by an error that refuses what it was given.
        hosts_left: of PREEMPTED, how many hosts go on without others that were asked to leave;
            0 where all leave.
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
    def is_taken(self) -> bool:
        """Whether the rank that ended first was killed from outside, and not for memory."""
        return self.status == -signal.SIGKILL and self.cause is Cause.SIGNAL

    @property
    def is_robbed(self) -> bool:
        """Whether a life that trained was ended from outside: no sign that its script loops."""
        return self.kind is OutcomeKind.FAILED and self.is_taken and self.has_stepped

    def in_a_stop(self) -> Outcome:
        """Return what a failure is that falls into a stop: part of it, if its rank was taken."""
        is_part = self.kind is OutcomeKind.FAILED and self.is_taken
        return replace(self, kind=OutcomeKind.STOPPED) if is_part else self

    @property
    def is_loss(self) -> bool:
        """Whether all that ended it here was the loss of ranks of other hosts."""
        return self.kind is OutcomeKind.REGROUPED and self.is_echo

    @property
    def is_deserted(self) -> bool:
        """Whether ranks here lost others while they were being stopped, and something is safe."""
        return self.kind is OutcomeKind.STOPPED and self.cause is Cause.PEER and bool(self.newest)

    @property
    def is_interruption(self) -> bool:
        """Whether somebody took machines away, or asked to stop, and nobody failed."""
        if self.kind is OutcomeKind.STOPPED:
            is_asked = self.status in (CODE_PREEMPTED, -signal.SIGTERM)
            return self.is_taken or is_asked or self.is_deserted
        is_left = self.kind is OutcomeKind.REGROUPED and not (self.is_joined or self.is_echo)
        return self.kind is OutcomeKind.PREEMPTED or is_left
