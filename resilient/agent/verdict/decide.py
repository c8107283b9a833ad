"""What to do when the life of a worker group ends: a table, and nothing but values.

``resilient train --dry-run`` prints it, made by this module itself (:func:`table`); the same is
in docs/elasticity.md.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from resilient.agent.verdict.causes import Cause
from resilient.agent.verdict.naming import SIGNAL_BASE, exit_code, name_of
from resilient.agent.verdict.outcome import CODE_PREEMPTED, Kind, Outcome
from resilient.errors import CrashLoop, PeerFailed

PERMANENT_CODES = frozenset({2, 3, 65, 66, 69, 70, 73, 77, 78, 80})
"""Exit codes that say that another try would end the same way."""

_CODE_HOST_UNHEALTHY = 71
_BACKOFF_SECONDS = 1.0
_BACKOFF_SECONDS_MAX = 300.0
CODES_OF_LEAVING_AT_ONCE = frozenset({SIGNAL_BASE + signal.SIGTERM, SIGNAL_BASE + signal.SIGINT})
"""What a worker that listened ends with when its time is over, unlike one killed by the signal."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much more failing is allowed.

    Attributes:
        restarts_left: restarts after a failure, within the window of time; a change of
            membership costs none.
        no_progress_lives: lives in a row, the last included, that failed and committed nothing,
            those not counted that were robbed.
        no_progress_lives_max: this many of them are a crash loop; 0 is any number.
        preemptions_left: interruptions, the last counted already; None is any number.
        host_failures: of this host within the window, the last included.
        host_failures_max: this many of them, and the host is left out; 0 is any number.
        may_leave: whether the other hosts can go on without this one.
        jitter: factor of a wait, so that hosts do not come back all at once.
        again: what to type so that the run goes on; see
            :func:`resilient.agent.verdict.naming.name_command`.
        losses_left: lives that may lose ranks of other hosts while nothing tells of progress.
    """

    restarts_left: int = 3
    no_progress_lives: int = 0
    no_progress_lives_max: int = 3
    preemptions_left: int | None = None
    host_failures: int = 0
    host_failures_max: int = 0
    may_leave: bool = False
    jitter: float = 1.0
    again: str = "the same command"
    losses_left: int = 3

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
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaveHost:
    """Leave this host to others to look at: they go on without it, or start it elsewhere."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave with ``code`` because of ``reason``."""

    code: int
    reason: str


Action = Finish | Restart | LeaveHost | GiveUp


def decide(outcome: Outcome, budget: Budget) -> Action:
    """Return what to do after a life that ended like ``outcome``."""
    match outcome.kind:
        case Kind.FAILED:
            return _after_failure(outcome, budget)
        case Kind.STOPPED:
            return _after_stop(outcome, budget)
        case Kind.REGROUPED:
            return _after_regrouping(outcome, budget)
    return _leave(outcome, budget)


def _after_regrouping(outcome: Outcome, budget: Budget) -> Action:
    if outcome.is_loss:
        return _after_loss(outcome, budget)
    if outcome.is_joined:
        return Restart("membership", is_paid=False)
    return _interrupted(budget) or Restart("membership", is_paid=False)


def _after_loss(outcome: Outcome, budget: Budget) -> Action:
    if budget.losses_left <= 0:
        why = "ranks of other hosts were lost too often, and no progress was seen between"
        return GiveUp(PeerFailed.exit_code, why)
    again = Restart("failure", is_paid=False, delay_seconds=_delay_seconds(outcome, budget))
    return _of_crash_loop(outcome, budget) or again


def _interrupted(budget: Budget) -> Action | None:
    """Return how a run ends that was interrupted too often, None while it was not."""
    if budget.preemptions_left is None or budget.preemptions_left >= 0:
        return None
    return GiveUp(
        SIGNAL_BASE + signal.SIGTERM,
        "interrupted more often than --max-preemptions allows: what is committed is safe, and "
        f"{budget.again} with a higher number resumes",
    )


def _leave(outcome: Outcome, budget: Budget) -> Action:
    """Cover the kinds that leave whatever the budget is."""
    if outcome.kind is Kind.SUCCEEDED:
        return Finish(0, "all workers are done")
    if outcome.kind is Kind.PREEMPTED:
        return _interrupted(budget) or _after_save(outcome, budget)
    if outcome.kind is Kind.KILLED:
        return GiveUp(
            SIGNAL_BASE + (outcome.stop_signal or signal.SIGKILL),
            "workers had to be killed before they had saved; the last durable checkpoint is "
            f"intact and {budget.again} resumes from it",
        )
    told = exit_code(outcome.status) or PeerFailed.exit_code
    return GiveUp(told, outcome.reason or "the other nodes cannot be reached")


def _after_save(outcome: Outcome, budget: Budget) -> Action:
    """Cover ranks that all agreed to leave, because some hosts were asked to or all were."""
    if outcome.hosts_left:
        return Restart("membership", is_paid=False)
    return Finish(CODE_PREEMPTED, f"preempted and saved: {budget.again} resumes")


def _after_failure(outcome: Outcome, budget: Budget) -> Action:
    code = exit_code(outcome.status) or 1
    is_own = not outcome.is_echo and outcome.cause is not Cause.HANG
    if code in PERMANENT_CODES and is_own:
        return GiveUp(code, f"exit code {code} says that another try would end the same way")
    # What was damaged on the way may be whole at the next attempt: only a start is refused.
    if outcome.is_refusal and not outcome.has_stepped and is_own:
        why = "a rank refused the checkpoint before its first step, and would refuse it again"
        return GiveUp(code, why)
    return (
        _of_broken_host(outcome)
        # Before it is held against this host: a script that fails everywhere fails here first too,
        # and a run that nobody brings further is not helped by whoever is left.
        or _of_crash_loop(outcome, budget)
        or _of_worn_host(outcome, budget)
        or _of_budget(outcome, budget, code)
    )


def _of_broken_host(outcome: Outcome) -> Action | None:
    """Return what follows when it is this host that is to blame, None when it is not."""
    if outcome.is_echo:
        return None
    if outcome.cause is Cause.GPU and outcome.is_host_broken:
        return LeaveHost(_CODE_HOST_UNHEALTHY, "a device of this host is broken: start elsewhere")
    if outcome.is_host_broken:
        return LeaveHost(
            _CODE_HOST_UNHEALTHY, "a worker of this host cannot even be killed: start elsewhere"
        )
    return None


def _of_worn_host(outcome: Outcome, budget: Budget) -> Action | None:
    """Return what follows when this host failed too often, None when it did not."""
    if outcome.is_echo:
        return None
    is_worn = 0 < budget.host_failures_max <= budget.host_failures
    if is_worn and budget.may_leave:
        return LeaveHost(
            _CODE_HOST_UNHEALTHY,
            f"this host failed {budget.host_failures} times (--max-host-failures) and is left "
            "out: the others go on without it",
        )
    return None


def _of_crash_loop(outcome: Outcome, budget: Budget) -> Action | None:
    is_loop = 0 < budget.no_progress_lives_max <= budget.no_progress_lives
    if not is_loop or outcome.is_robbed:
        return None
    return GiveUp(
        CrashLoop.exit_code,
        f"crash loop: {budget.no_progress_lives} lives in a row failed without a new checkpoint "
        f"(--max-no-progress), the last with {name_of(outcome.status)}; the traceback of the rank "
        "that failed first says where to look",
    )


def _of_budget(outcome: Outcome, budget: Budget, code: int) -> Action:
    if budget.restarts_left <= 0:
        return GiveUp(code, "no restart is left (--max-restarts, within --restart-window)")
    if outcome.stop_signal:
        return Finish(
            CODE_PREEMPTED, f"asked to stop during a restart: {budget.again} resumes instead"
        )
    cause = "hang" if outcome.cause is Cause.HANG else "failure"
    return Restart(cause, is_paid=True, delay_seconds=_delay_seconds(outcome, budget))


def _delay_seconds(outcome: Outcome, budget: Budget) -> float:
    """Return how long to wait: not at all while there is progress, then longer and longer."""
    repeats = 0 if outcome.is_robbed else budget.no_progress_lives - 1
    if repeats <= 0:
        return 0.0
    wait_seconds = min(_BACKOFF_SECONDS_MAX, _BACKOFF_SECONDS * 2.0 ** (repeats - 1))
    return wait_seconds * budget.jitter


def _after_stop(outcome: Outcome, budget: Budget) -> Action:
    if outcome.status == 0:
        return Finish(0, "all workers are done")
    if outcome.is_interruption:
        return _interrupted(budget) or _as_asked(outcome, budget)
    if outcome.status in CODES_OF_LEAVING_AT_ONCE:
        return GiveUp(
            outcome.status,
            "workers left at once before they had saved: the work since the last checkpoint is "
            f"lost, that checkpoint is intact and {budget.again} resumes from it; --grace "
            "gives them longer",
        )
    code = exit_code(outcome.status)
    return GiveUp(code, f"a worker failed while stopping, with {name_of(outcome.status)}")


def _as_asked(outcome: Outcome, budget: Budget) -> Action:
    """Cover workers that have saved, and those that were killed before they could."""
    if outcome.status == CODE_PREEMPTED:
        return Finish(CODE_PREEMPTED, f"stopped and saved: {budget.again} resumes")
    if outcome.is_taken:
        return _of_doomed(outcome, budget)
    if outcome.is_deserted:
        why = "other ranks were lost or silent while the run was being stopped: the work since "
        why += f"{outcome.newest} is lost at most; it is intact and {budget.again} resumes"
        return Finish(CODE_PREEMPTED, why)
    if not outcome.is_unsaved:
        return Finish(
            CODE_PREEMPTED,
            "stopped outside training, as far as the workers told: no step is lost, and the same "
            "command starts it again",
        )
    what = "stopped by SIGTERM without a save"
    if outcome.newest is None:
        why = f"{what}: nothing was committed yet, so all work is lost and it starts from scratch"
    else:
        newest = outcome.newest or "the last checkpoint"
        why = f"{what}: the work since {newest} is lost; it is intact and {budget.again} resumes"
    return GiveUp(exit_code(outcome.status), why)


def _of_doomed(outcome: Outcome, budget: Budget) -> Action:
    """Cover a rank that was killed from outside before all had saved, as hosts go that are lost."""
    what = "a rank was killed from outside (SIGKILL) while the run was being stopped"
    if outcome.newest:
        why = f"{what}: the work since {outcome.newest} is lost at most"
        return Finish(CODE_PREEMPTED, f"{why}; it is intact and {budget.again} resumes")
    known = (
        "nothing was committed yet" if outcome.newest is None else "what is committed is not known"
    )
    return GiveUp(exit_code(outcome.status), f"{what}, and {known}")
