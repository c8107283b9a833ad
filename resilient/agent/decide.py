"""What to do when the life of a worker group ends: a table, and nothing but values.

========== =============================== ==========================================
what ended   how                             what follows
========== =============================== ==========================================
succeeded  all workers ended with 0        finish 0
preempted  a worker ended with 75          finish 75: all ranks agreed and saved
failed     with a permanent code           give up with that code
failed     again without a new checkpoint  give up with 70
failed     hung, and no restart is left    give up with 69
failed     no restart is left              give up with the code, a signal as 128 + n
failed     while a stop was asked for      finish 75: the requeue is the restart
failed     otherwise                       restart, one restart less
regrouped  nodes joined or left            restart, free of charge
stopped    as asked: 0, 75 or SIGTERM      finish 0 or 75
stopped    leaving at once: 130 or 143     give up with that code: work was lost
stopped    and failed while stopping       give up with the code
killed     had to be killed while stopping give up with 128 + the signal asked with
unreachable  peers or rendezvous are gone  give up with 69
========== =============================== ==========================================
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum

from resilient.agent.causes import Cause
from resilient.errors import CrashLoop, PeerFailed, Preempted

CODE_PREEMPTED = Preempted.exit_code
PERMANENT_CODES = frozenset({2, 3, 65, 66, 69, 73, 77, 78, 80})
"""Exit codes that say that another try would end the same way."""

_SIGNAL_BASE = 128
CODES_OF_LEAVING_AT_ONCE = frozenset({_SIGNAL_BASE + signal.SIGTERM, _SIGNAL_BASE + signal.SIGINT})
"""What a worker that listened ends with when its time is over, unlike one killed by the signal."""


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
        status: of the worker that failed first: its exit code, or minus the signal's number.
        stop_signal: the signal that asked the agent to stop, 0 when none did.
        is_echo: the worker only reports that a rank elsewhere failed.
        reason: detail for a person, where the kind alone does not say it.
        cause: why the worker failed that failed first.
    """

    kind: Kind
    status: int = 0
    stop_signal: int = 0
    is_echo: bool = False
    reason: str = ""
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """How much more failing is allowed.

    Attributes:
        restarts_left: restarts after a failure; a change of membership costs none.
        no_progress_lives: lives in a row, the last included, that failed and committed nothing.
        no_progress_lives_max: this many of them are a crash loop.
    """

    restarts_left: int = 3
    no_progress_lives: int = 0
    no_progress_lives_max: int = 3

    def after_failure(self, *, progressed: bool) -> Budget:
        """Return the budget with the life that just failed counted."""
        return replace(self, no_progress_lives=0 if progressed else self.no_progress_lives + 1)

    def after(self, action: Action) -> Budget:
        """Return the budget with the action paid for."""
        cost = 1 if isinstance(action, Restart) and action.is_paid else 0
        return replace(self, restarts_left=self.restarts_left - cost)


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave with ``code``; nothing went wrong."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the group again; ``cause`` is one word for the next life."""

    cause: str
    is_paid: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave with ``code`` because of ``reason``."""

    code: int
    reason: str


Action = Finish | Restart | GiveUp


def decide(outcome: Outcome, budget: Budget) -> Action:
    """Return what to do after a life that ended like ``outcome``."""
    match outcome.kind:
        case Kind.FAILED:
            return _after_failure(outcome, budget)
        case Kind.STOPPED:
            return _after_stop(outcome)
        case Kind.REGROUPED:
            return Restart("membership", is_paid=False)
    return _leave(outcome)


def exit_code(status: int) -> int:
    """Return a worker's status as a shell would: its code, or 128 plus the signal's number."""
    return _SIGNAL_BASE - status if status < 0 else status


def name_of(status: int) -> str:
    """Return a worker's status for a person: ``exit code 7`` or ``SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _leave(outcome: Outcome) -> Action:
    """Cover the kinds that leave whatever the budget is."""
    if outcome.kind is Kind.SUCCEEDED:
        return Finish(0, "all workers are done")
    if outcome.kind is Kind.PREEMPTED:
        return Finish(CODE_PREEMPTED, "preempted and saved: the same command resumes")
    if outcome.kind is Kind.KILLED:
        return GiveUp(
            _SIGNAL_BASE + outcome.stop_signal,
            "workers had to be killed before they had saved; the last durable checkpoint is "
            "intact and the same command resumes from it",
        )
    return GiveUp(PeerFailed.exit_code, outcome.reason or "the other nodes cannot be reached")


def _after_failure(outcome: Outcome, budget: Budget) -> Action:
    code = exit_code(outcome.status)
    is_hang = outcome.cause is Cause.HANG
    if code in PERMANENT_CODES and not outcome.is_echo and not is_hang:
        return GiveUp(code, f"exit code {code} says that another try would end the same way")
    if budget.no_progress_lives >= budget.no_progress_lives_max:
        return GiveUp(
            CrashLoop.exit_code,
            f"crash loop: {budget.no_progress_lives} lives in a row failed without a new "
            f"checkpoint, the last with {name_of(outcome.status)}; the traceback of the rank "
            "that failed first says where to look",
        )
    if budget.restarts_left <= 0:
        return GiveUp(code, "no restart is left (--max-restarts)")
    if outcome.stop_signal:
        return Finish(
            CODE_PREEMPTED, "asked to stop during a restart: the same command resumes instead"
        )
    return Restart("hang" if is_hang else "failure", is_paid=True)


def _after_stop(outcome: Outcome) -> Action:
    if outcome.status == 0:
        return Finish(0, "all workers are done")
    if outcome.status == CODE_PREEMPTED:
        return Finish(CODE_PREEMPTED, "stopped and saved: the same command resumes")
    if outcome.status == -signal.SIGTERM:
        # Whoever has something to save handles SIGTERM; this one had not come that far.
        return Finish(CODE_PREEMPTED, "stopped before there was anything to save")
    if outcome.status in CODES_OF_LEAVING_AT_ONCE:
        return GiveUp(
            outcome.status,
            "workers left at once before they had saved: the work since the last checkpoint is "
            "lost, that checkpoint is intact and the same command resumes from it; --grace "
            "gives them longer",
        )
    code = exit_code(outcome.status)
    return GiveUp(code, f"a worker failed while stopping, with {name_of(outcome.status)}")
