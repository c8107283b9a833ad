"""Restart policy and budgets: pure decision to restart, finish, leave the host, or give up.

``resilient train --dry-run`` prints the decision table of :func:`reaction_table`, which calls
:func:`decide` for each row. docs/elasticity.md shows the same table.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, replace

from resilient.elastic.outcome import CODE_PREEMPTED, Cause, Outcome, OutcomeKind
from resilient.errors import CrashLoop, PeerFailed

SIGNAL_BASE = 128
"""Base of a shell's exit code for a program ended by a signal: 128 plus the signal number."""


def name_command(resume: str) -> str:
    """Return the command that a user types to continue a run started with ``--resume``.

    Only a scheduler requeue continues with the same command. A manual start obeys the option.
    """
    return "the same command" + (f" without --resume {resume}" if resume != "auto" else "")


def exit_code(status: int) -> int:
    """Return a worker status as a shell shows it: the exit code, or 128 plus the signal number."""
    return SIGNAL_BASE - status if status < 0 else status


def name_of(status: int) -> str:
    """Return a worker status as readable text: ``exit code 7`` or ``SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


PERMANENT_CODES = frozenset({2, 3, 65, 66, 69, 70, 73, 77, 78, 80})
"""Exit codes of failures that every retry would repeat."""

_CODE_HOST_UNHEALTHY = 71
_BACKOFF_SECONDS = 1.0
_BACKOFF_SECONDS_MAX = 300.0
CODES_OF_LEAVING_AT_ONCE = frozenset({SIGNAL_BASE + signal.SIGTERM, SIGNAL_BASE + signal.SIGINT})
"""Exit codes of a worker that handled the signal and then ran out of time.

A worker killed by the signal has a negative status instead.
"""


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Remaining allowance for failures, restarts and interruptions.

    Attributes:
        restarts_left: Restarts after a failure, in the time window; a membership change
            costs none.
        no_progress_lives: Consecutive attempts, the last included, that failed and committed
            nothing. Attempts that were killed from outside while training do not count.
        no_progress_lives_max: Number of such attempts that counts as a crash loop; 0 for no limit.
        preemptions_left: Interruptions left, the last one already counted; None for no limit.
        host_failures: Failures of this host in the window, the last included.
        host_failures_max: Number of failures after which this host leaves; 0 for no limit.
        may_leave: Whether the other hosts can continue without this one.
        jitter: Factor of a wait, so that hosts do not restart at the same moment.
        again: Command that continues the run; see
            :func:`resilient.elastic.restart_policy.name_command`.
        losses_left: Attempts left that may lose ranks of other hosts without known progress.
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

    def after(self, action: Action) -> RestartBudget:
        """Return the budget after the cost of the action."""
        cost = 1 if isinstance(action, Restart) and action.is_paid else 0
        return replace(self, restarts_left=self.restarts_left - cost)


@dataclass(frozen=True, slots=True)
class Finish:
    """Decision to exit with ``code`` after an orderly end."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Decision to start the group again; ``cause`` names the reason in one word."""

    cause: str
    is_paid: bool
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaveHost:
    """Decision to leave this host: a scheduler replaces it, or the others continue without it."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to exit with ``code`` because of ``reason``."""

    code: int
    reason: str


Action = Finish | Restart | LeaveHost | GiveUp


def decide(outcome: Outcome, budget: RestartBudget) -> Action:
    """Return the action after an attempt that ended with ``outcome``."""
    match outcome.kind:
        case OutcomeKind.FAILED:
            return _after_failure(outcome, budget)
        case OutcomeKind.STOPPED:
            return _after_stop(outcome, budget)
        case OutcomeKind.REGROUPED:
            return _after_regrouping(outcome, budget)
    return _decide_final(outcome, budget)


def _after_regrouping(outcome: Outcome, budget: RestartBudget) -> Action:
    if outcome.is_peer_loss:
        return _after_loss(outcome, budget)
    if outcome.is_joined:
        return Restart("membership", is_paid=False)
    return _interrupted(budget) or Restart("membership", is_paid=False)


def _after_loss(outcome: Outcome, budget: RestartBudget) -> Action:
    if budget.losses_left <= 0:
        reason = "ranks of other hosts were lost too often without progress in between"
        return GiveUp(PeerFailed.exit_code, reason)
    restart = Restart("failure", is_paid=False, delay_seconds=_delay_seconds(outcome, budget))
    return _decide_crash_loop(outcome, budget) or restart


def _interrupted(budget: RestartBudget) -> Action | None:
    """Return the end of a run with too many interruptions, None within the limit."""
    if budget.preemptions_left is None or budget.preemptions_left >= 0:
        return None
    return GiveUp(
        SIGNAL_BASE + signal.SIGTERM,
        "preempted more often than --max-preemptions allows: committed checkpoints are safe, and "
        f"{budget.again} with a higher number resumes",
    )


def _decide_final(outcome: Outcome, budget: RestartBudget) -> Action:
    """Handle the kinds that end the run regardless of the budget."""
    if outcome.kind is OutcomeKind.SUCCEEDED:
        return Finish(0, "all workers are done")
    if outcome.kind is OutcomeKind.PREEMPTED:
        return _interrupted(budget) or _after_save(outcome, budget)
    if outcome.kind is OutcomeKind.KILLED:
        return GiveUp(
            SIGNAL_BASE + (outcome.stop_signal or signal.SIGKILL),
            "workers had to be killed before they had saved; the last durable checkpoint is "
            f"intact and {budget.again} resumes from it",
        )
    code = exit_code(outcome.status) or PeerFailed.exit_code
    return GiveUp(code, outcome.reason or "the other nodes cannot be reached")


def _after_save(outcome: Outcome, budget: RestartBudget) -> Action:
    """Handle ranks that all agreed to leave, because some or all hosts were asked to."""
    if outcome.hosts_left:
        return Restart("membership", is_paid=False)
    return Finish(CODE_PREEMPTED, f"preempted and saved: {budget.again} resumes")


def _after_failure(outcome: Outcome, budget: RestartBudget) -> Action:
    code = exit_code(outcome.status) or 1
    is_own = not outcome.is_echo and outcome.cause is not Cause.HANG
    if code in PERMANENT_CODES and is_own:
        return GiveUp(code, f"exit code {code} means that another try would fail the same way")
    # Give up only before the first step: the next attempt may not have damage from training.
    if outcome.is_refusal and not outcome.has_stepped and is_own:
        reason = "a rank rejected the checkpoint before its first step, and would reject it again"
        return GiveUp(code, reason)
    return (
        _decide_broken_host(outcome)
        # Check for a crash loop before a failing host. A script that fails on every host also fails
        # on this host, and would not make progress on the remaining hosts.
        or _decide_crash_loop(outcome, budget)
        or _decide_failing_host(outcome, budget)
        or _decide_by_budget(outcome, budget, code)
    )


def _decide_broken_host(outcome: Outcome) -> Action | None:
    """Return the action if this host is broken, None otherwise."""
    if outcome.is_echo:
        return None
    if outcome.cause is Cause.GPU and outcome.is_host_broken:
        return LeaveHost(
            _CODE_HOST_UNHEALTHY, "a device of this host is broken: start on another host"
        )
    if outcome.is_host_broken:
        return LeaveHost(
            _CODE_HOST_UNHEALTHY, "a worker of this host cannot be killed: start on another host"
        )
    return None


def _decide_failing_host(outcome: Outcome, budget: RestartBudget) -> Action | None:
    """Return the action if this host failed too often, None otherwise."""
    if outcome.is_echo:
        return None
    is_worn = 0 < budget.host_failures_max <= budget.host_failures
    if is_worn and budget.may_leave:
        return LeaveHost(
            _CODE_HOST_UNHEALTHY,
            f"this host failed {budget.host_failures} times (--max-host-failures) and is "
            "excluded: the other hosts continue without it",
        )
    return None


def _decide_crash_loop(outcome: Outcome, budget: RestartBudget) -> Action | None:
    is_loop = 0 < budget.no_progress_lives_max <= budget.no_progress_lives
    if not is_loop or outcome.is_killed_in_training:
        return None
    return GiveUp(
        CrashLoop.exit_code,
        f"crash loop: {budget.no_progress_lives} attempts in a row failed without a new "
        f"checkpoint (--max-no-progress), the last with {name_of(outcome.status)}; see the "
        "traceback of the rank that failed first",
    )


def _decide_by_budget(outcome: Outcome, budget: RestartBudget, code: int) -> Action:
    if budget.restarts_left <= 0:
        return GiveUp(code, "no restart is left (--max-restarts, within --restart-window)")
    if outcome.stop_signal:
        return Finish(
            CODE_PREEMPTED, f"asked to stop during a restart: {budget.again} resumes instead"
        )
    cause = "hang" if outcome.cause is Cause.HANG else "failure"
    return Restart(cause, is_paid=True, delay_seconds=_delay_seconds(outcome, budget))


def _delay_seconds(outcome: Outcome, budget: RestartBudget) -> float:
    """Return the wait before a restart: 0 with progress, then exponential up to 300 s."""
    repeats = 0 if outcome.is_killed_in_training else budget.no_progress_lives - 1
    if repeats <= 0:
        return 0.0
    wait_seconds = min(_BACKOFF_SECONDS_MAX, _BACKOFF_SECONDS * 2.0 ** (repeats - 1))
    return wait_seconds * budget.jitter


def _after_stop(outcome: Outcome, budget: RestartBudget) -> Action:
    if outcome.status == 0:
        return Finish(0, "all workers are done")
    if outcome.is_interruption:
        return _interrupted(budget) or _decide_requested_stop(outcome, budget)
    if outcome.status in CODES_OF_LEAVING_AT_ONCE:
        return GiveUp(
            outcome.status,
            "workers exited at once before they had saved: the work since the last checkpoint is "
            f"lost, that checkpoint is intact and {budget.again} resumes from it; --grace gives "
            "more time",
        )
    code = exit_code(outcome.status)
    return GiveUp(code, f"a worker failed while stopping, with {name_of(outcome.status)}")


def _decide_requested_stop(outcome: Outcome, budget: RestartBudget) -> Action:
    """Handle workers that saved, and workers that were killed before they could save."""
    if outcome.status == CODE_PREEMPTED:
        return Finish(CODE_PREEMPTED, f"stopped and saved: {budget.again} resumes")
    if outcome.is_killed_from_outside:
        return _decide_outside_kill(outcome, budget)
    if outcome.has_lost_peers_in_stop:
        reason = (
            "other ranks were lost or stopped responding during the stop: at most the work since "
        )
        reason += f"{outcome.newest} is lost; it is intact and {budget.again} resumes"
        return Finish(CODE_PREEMPTED, reason)
    if not outcome.is_unsaved:
        return Finish(
            CODE_PREEMPTED,
            "stopped outside training, according to the workers: no step is lost, and the same "
            "command starts it again",
        )
    text = "stopped by SIGTERM without a save"
    if outcome.newest is None:
        reason = (
            f"{text}: nothing was committed yet, so all work is lost and the run starts from "
            "scratch"
        )
    else:
        newest = outcome.newest or "the last checkpoint"
        reason = f"{text}: the work since {newest} is lost; it is intact and {budget.again} resumes"
    return GiveUp(exit_code(outcome.status), reason)


def _decide_outside_kill(outcome: Outcome, budget: RestartBudget) -> Action:
    """Handle a rank killed from outside before all ranks saved, as on a lost host."""
    text = "a rank was killed from outside (SIGKILL) during the stop"
    if outcome.newest:
        reason = f"{text}: at most the work since {outcome.newest} is lost"
        return Finish(CODE_PREEMPTED, f"{reason}; it is intact and {budget.again} resumes")
    progress_text = (
        "nothing was committed yet"
        if outcome.newest is None
        else "the committed checkpoints are unknown"
    )
    return GiveUp(exit_code(outcome.status), f"{text}, and {progress_text}")


_NO_RESTARTS_LEFT = RestartBudget(restarts_left=0)
_LOOP = RestartBudget(no_progress_lives=3)
_TOO_MANY_PREEMPTIONS = RestartBudget(preemptions_left=-1)
_HOST_FAILED_OFTEN = RestartBudget(host_failures=3, host_failures_max=3, may_leave=True)
_SECOND_FAILURE = RestartBudget(no_progress_lives=2)
_LOSS = Outcome(OutcomeKind.REGROUPED, 1, is_echo=True, cause=Cause.PEER)
_TERM = int(signal.SIGTERM)
_KILL = -int(signal.SIGKILL)

_CASES: tuple[tuple[str, str, Outcome, RestartBudget], ...] = (
    ("succeeded", "all workers ended with 0", Outcome(OutcomeKind.SUCCEEDED), RestartBudget()),
    (
        "preempted",
        "all ranks agreed, saved, exited",
        Outcome(OutcomeKind.PREEMPTED, 75),
        RestartBudget(),
    ),
    (
        "preempted",
        "only other hosts must stop, MIN are left",
        Outcome(OutcomeKind.PREEMPTED, 75, hosts_left=1),
        RestartBudget(),
    ),
    (
        "preempted",
        "more than --max-preemptions",
        Outcome(OutcomeKind.PREEMPTED, 75),
        _TOO_MANY_PREEMPTIONS,
    ),
    (
        "failed",
        "exit code 78, or another permanent one",
        Outcome(OutcomeKind.FAILED, 78),
        RestartBudget(),
    ),
    (
        "failed",
        "killed, exception, any other code",
        Outcome(OutcomeKind.FAILED, _KILL),
        RestartBudget(),
    ),
    ("failed", "again, without a new checkpoint", Outcome(OutcomeKind.FAILED, 1), _SECOND_FAILURE),
    ("failed", "without one too often: --max-no-progress", Outcome(OutcomeKind.FAILED, 1), _LOOP),
    (
        "failed",
        "a rank that trained was killed from outside",
        Outcome(OutcomeKind.FAILED, _KILL, cause=Cause.SIGNAL, has_stepped=True),
        _LOOP,
    ),
    (
        "failed",
        "no restart left: --max-restarts",
        Outcome(OutcomeKind.FAILED, _KILL),
        _NO_RESTARTS_LEFT,
    ),
    (
        "failed",
        "while a stop was asked for",
        Outcome(OutcomeKind.FAILED, 1, _TERM),
        RestartBudget(),
    ),
    (
        "failed",
        "a peer's failure was reported",
        Outcome(OutcomeKind.FAILED, 69, is_echo=True),
        RestartBudget(),
    ),
    (
        "failed",
        "a device of this host is broken",
        Outcome(OutcomeKind.FAILED, 1, cause=Cause.GPU, is_host_broken=True),
        RestartBudget(),
    ),
    (
        "failed",
        "this host: --max-host-failures",
        Outcome(OutcomeKind.FAILED, 1),
        _HOST_FAILED_OFTEN,
    ),
    (
        "failed",
        "loss broken, rollbacks did not help",
        Outcome(OutcomeKind.FAILED, 70, cause=Cause.NUMBERS),
        RestartBudget(),
    ),
    (
        "hung",
        "no progress within the deadline",
        Outcome(OutcomeKind.FAILED, 69, cause=Cause.HANG),
        RestartBudget(),
    ),
    (
        "hung",
        "no restart left",
        Outcome(OutcomeKind.FAILED, 69, cause=Cause.HANG),
        _NO_RESTARTS_LEFT,
    ),
    (
        "hung",
        "and a worker cannot be killed",
        Outcome(OutcomeKind.FAILED, 69, cause=Cause.HANG, is_host_broken=True),
        RestartBudget(),
    ),
    (
        "regrouped",
        "nodes want to join",
        Outcome(OutcomeKind.REGROUPED, is_joined=True),
        RestartBudget(),
    ),
    ("regrouped", "nodes have left", Outcome(OutcomeKind.REGROUPED), RestartBudget()),
    ("regrouped", "ranks here only lost a rank of another host", _LOSS, RestartBudget()),
    ("regrouped", "too often, without a new checkpoint", _LOSS, _LOOP),
    (
        "stopped",
        "saved on request",
        Outcome(OutcomeKind.STOPPED, CODE_PREEMPTED, _TERM),
        RestartBudget(),
    ),
    ("stopped", "done meanwhile", Outcome(OutcomeKind.STOPPED, 0, _TERM), RestartBudget()),
    (
        "stopped",
        "before or after training",
        Outcome(OutcomeKind.STOPPED, -_TERM, _TERM),
        RestartBudget(),
    ),
    (
        "stopped",
        "by SIGTERM, which this script does not handle",
        Outcome(OutcomeKind.STOPPED, -_TERM, _TERM, is_unsaved=True),
        RestartBudget(),
    ),
    (
        "stopped",
        "a rank was killed meanwhile, a checkpoint exists",
        Outcome(OutcomeKind.STOPPED, _KILL, _TERM, cause=Cause.SIGNAL, newest="checkpoint-20-g1"),
        RestartBudget(),
    ),
    (
        "stopped",
        "a rank was killed meanwhile, none is known",
        Outcome(OutcomeKind.STOPPED, _KILL, _TERM, cause=Cause.SIGNAL, newest=None),
        RestartBudget(),
    ),
    (
        "stopped",
        "other ranks were lost meanwhile, a checkpoint exists",
        Outcome(OutcomeKind.STOPPED, 69, _TERM, cause=Cause.PEER, newest="checkpoint-20-g1"),
        RestartBudget(),
    ),
    (
        "stopped",
        "exited at once: work was lost",
        Outcome(OutcomeKind.STOPPED, 143, _TERM),
        RestartBudget(),
    ),
    (
        "stopped",
        "a worker failed while stopping",
        Outcome(OutcomeKind.STOPPED, 1, _TERM),
        RestartBudget(),
    ),
    (
        "killed",
        "had to be killed: --grace was over",
        Outcome(OutcomeKind.KILLED, 0, _TERM),
        RestartBudget(),
    ),
    (
        "unreachable",
        "peers or rendezvous are unreachable",
        Outcome(OutcomeKind.UNREACHABLE),
        RestartBudget(),
    ),
)


@dataclass(frozen=True, slots=True)
class ReactionRow:
    """Row of the decision table: kind of the end, condition, action."""

    ended: str
    how: str
    follows: str


def reaction_table() -> tuple[ReactionRow, ...]:
    """Return the decision table, with every row computed by :func:`decide`."""
    cases = [
        (end_kind, detail, _describe_action(outcome, decide(outcome, budget)))
        for end_kind, detail, outcome, budget in _CASES
    ]
    # The trainer does this by itself, before any worker fails.
    in_process_row = ReactionRow(
        "loss", "not finite, or a spike: rollback_on", "roll back and skip the data"
    )
    return (
        *(ReactionRow(end_kind, detail, follows) for end_kind, detail, follows in cases),
        in_process_row,
    )


def _describe_action(outcome: Outcome, action: Action) -> str:
    if isinstance(action, Finish):
        save_text = "" if outcome.status in (-_TERM, _KILL) else "save and "
        return f"{save_text}exit with {action.code}" if action.code else "finish with 0"
    if isinstance(action, LeaveHost):
        return f"restart on another host: exit here with {action.code}"
    if not isinstance(action, Restart):
        return f"give up with {action.code}"
    if not action.is_paid:
        return f"{_describe_free_restart(outcome)}, free"
    wait = ", after a wait" if action.delay_seconds else ""
    return f"restart in place{wait}, one restart less"


def _describe_free_restart(outcome: Outcome) -> str:
    if outcome.is_peer_loss:
        return "restart with the remaining nodes"
    return "grow: restart with more nodes" if outcome.is_joined else "shrink and continue: restart"


_JITTER_MIN = 0.5
# A host without retries for its own failures still retries after failures of other hosts.
_LOSSES_MIN = 3


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """Limits on the failures of a run.

    Attributes:
        restarts_max: Restarts after failures, in a time window.
        window_seconds: Length of the window; 0 for the whole job.
        preemptions_max: Number of interruptions of the run; None for no limit.
        no_progress_lives_max: Consecutive failed attempts without a new checkpoint; 0 for no
            limit.
        host_failures_max: Failures of this host in a window before it leaves; 0 for no limit.
    """

    restarts_max: int = 3
    window_seconds: float = 3600.0
    preemptions_max: int | None = None
    no_progress_lives_max: int = 3
    host_failures_max: int = 3


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """Failures and interruptions of a run so far.

    Attributes:
        failures: Times of failed attempts, monotonic seconds.
        host_failures: Times of failed attempts whose first failure was on this host.
        preemptions: Number of interruptions, earlier agent runs included.
        no_progress_lives: Consecutive attempts, the last included, that failed or lost ranks
            of other hosts, and committed nothing. An attempt killed from outside while
            training leaves the number unchanged.
        losses: Times of attempts that ended with the loss of ranks of other hosts, since the
            last attempt with known progress.
    """

    failures: tuple[float, ...] = ()
    host_failures: tuple[float, ...] = ()
    preemptions: int = 0
    no_progress_lives: int = 0
    losses: tuple[float, ...] = ()

    def after(
        self, outcome: Outcome, at_seconds: float, *, progressed: bool | None
    ) -> FailureHistory:
        """Return the history with one more attempt; ``progressed`` is None if unknown."""
        if outcome.is_peer_loss:
            return self._after_loss(at_seconds, progressed=progressed)
        if outcome.kind is not OutcomeKind.FAILED:
            is_interrupted = outcome.is_interruption
            return replace(self, preemptions=self.preemptions + 1) if is_interrupted else self
        own_failure = () if outcome.is_echo or outcome.cause is Cause.PEER else (at_seconds,)
        attempts = self.no_progress_lives
        is_silent = progressed is None or (outcome.is_killed_in_training and not progressed)
        return replace(
            self,
            failures=(*self.failures, at_seconds),
            host_failures=(*self.host_failures, *own_failure),
            no_progress_lives=attempts if is_silent else 0 if progressed else attempts + 1,
        )

    def _after_loss(self, at_seconds: float, *, progressed: bool | None) -> FailureHistory:
        if progressed:
            return replace(self, losses=(), no_progress_lives=0)
        attempts = self.no_progress_lives + (progressed is False)
        return replace(self, losses=(*self.losses, at_seconds), no_progress_lives=attempts)

    def budget(
        self, limits: FailureLimits, at_seconds: float, *, seed: str = "", may_leave: bool = False
    ) -> RestartBudget:
        """Return the budget left at ``at_seconds``, before the cost of the last attempt.

        Args:
            limits: Limits of the run.
            at_seconds: Current time, monotonic.
            seed: Seed of the wait's jitter; the same seed and history give the same wait.
            may_leave: Whether the other hosts can continue without this one.
        """
        recent = _within(self.failures, limits, at_seconds)
        losses = _within(self.losses, limits, at_seconds)
        preemptions_max = limits.preemptions_max
        jitter = random.Random(f"{seed}/{len(self.failures)}").random()  # noqa: S311 - no secret
        return RestartBudget(
            restarts_left=limits.restarts_max - max(0, len(recent) - 1),
            no_progress_lives=self.no_progress_lives,
            no_progress_lives_max=limits.no_progress_lives_max,
            preemptions_left=None
            if preemptions_max is None
            else preemptions_max - self.preemptions,
            host_failures=len(_within(self.host_failures, limits, at_seconds)),
            host_failures_max=limits.host_failures_max,
            may_leave=may_leave,
            jitter=_JITTER_MIN + (1 - _JITTER_MIN) * jitter,
            losses_left=max(limits.restarts_max, _LOSSES_MIN) + 1 - max(0, len(losses) - 1),
        )


def _within(times: tuple[float, ...], limits: FailureLimits, at_seconds: float) -> list[float]:
    window_seconds = limits.window_seconds
    return [time for time in times if not window_seconds or at_seconds - time < window_seconds]
