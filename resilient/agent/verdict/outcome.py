"""How the life of a worker group ended, as far as what follows depends on it (values)."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum

from resilient.agent.verdict.causes import Cause
from resilient.errors import Preempted

CODE_PREEMPTED = Preempted.exit_code


class Kind(Enum):
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

    kind: Kind
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
        return self.kind is Kind.FAILED and self.is_taken and self.has_stepped

    def in_a_stop(self) -> Outcome:
        """Return what a failure is that falls into a stop: part of it, if its rank was taken."""
        is_part = self.kind is Kind.FAILED and self.is_taken
        return replace(self, kind=Kind.STOPPED) if is_part else self

    @property
    def is_loss(self) -> bool:
        """Whether all that ended it here was the loss of ranks of other hosts."""
        return self.kind is Kind.REGROUPED and self.is_echo

    @property
    def is_deserted(self) -> bool:
        """Whether ranks here lost others while they were being stopped, and something is safe."""
        return self.kind is Kind.STOPPED and self.cause is Cause.PEER and bool(self.newest)

    @property
    def is_interruption(self) -> bool:
        """Whether somebody took machines away, or asked to stop, and nobody failed."""
        if self.kind is Kind.STOPPED:
            is_asked = self.status in (CODE_PREEMPTED, -signal.SIGTERM)
            return self.is_taken or is_asked or self.is_deserted
        is_left = self.kind is Kind.REGROUPED and not (self.is_joined or self.is_echo)
        return self.kind is Kind.PREEMPTED or is_left
