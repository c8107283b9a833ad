"""The table of reactions for people, each row made by ``decide``."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.agent.verdict.causes import Cause
from resilient.agent.verdict.decide import Budget, Finish, LeaveHost, Restart, decide
from resilient.agent.verdict.outcome import CODE_PREEMPTED, Kind, Outcome

if TYPE_CHECKING:
    from resilient.agent.verdict.decide import Action

_SPENT = Budget(restarts_left=0)
_LOOP = Budget(no_progress_lives=3)
_OFTEN = Budget(preemptions_left=-1)
_WORN = Budget(host_failures=3, host_failures_max=3, may_leave=True)
_AGAIN = Budget(no_progress_lives=2)
_LOSS = Outcome(Kind.REGROUPED, 1, is_echo=True, cause=Cause.PEER)
_TERM = int(signal.SIGTERM)
_KILL = -int(signal.SIGKILL)

_CASES: tuple[tuple[str, str, Outcome, Budget], ...] = (
    ("succeeded", "all workers ended with 0", Outcome(Kind.SUCCEEDED), Budget()),
    ("preempted", "all ranks agreed, saved, left", Outcome(Kind.PREEMPTED, 75), Budget()),
    (
        "preempted",
        "only other hosts were asked to, MIN are left",
        Outcome(Kind.PREEMPTED, 75, hosts_left=1),
        Budget(),
    ),
    ("preempted", "more than --max-preemptions", Outcome(Kind.PREEMPTED, 75), _OFTEN),
    ("failed", "exit code 78, or another that stays", Outcome(Kind.FAILED, 78), Budget()),
    ("failed", "killed, exception, any other code", Outcome(Kind.FAILED, _KILL), Budget()),
    ("failed", "again, without a new checkpoint", Outcome(Kind.FAILED, 1), _AGAIN),
    ("failed", "without one too often: --max-no-progress", Outcome(Kind.FAILED, 1), _LOOP),
    (
        "failed",
        "a rank that trained was killed from outside",
        Outcome(Kind.FAILED, _KILL, cause=Cause.SIGNAL, has_stepped=True),
        _LOOP,
    ),
    ("failed", "no restart left: --max-restarts", Outcome(Kind.FAILED, _KILL), _SPENT),
    ("failed", "while a stop was asked for", Outcome(Kind.FAILED, 1, _TERM), Budget()),
    ("failed", "a peer's failure was reported", Outcome(Kind.FAILED, 69, is_echo=True), Budget()),
    (
        "failed",
        "a device of this host is broken",
        Outcome(Kind.FAILED, 1, cause=Cause.GPU, is_host_broken=True),
        Budget(),
    ),
    ("failed", "this host: --max-host-failures", Outcome(Kind.FAILED, 1), _WORN),
    (
        "failed",
        "loss broken, going back did not help",
        Outcome(Kind.FAILED, 70, cause=Cause.NUMBERS),
        Budget(),
    ),
    (
        "hung",
        "no progress within the deadline",
        Outcome(Kind.FAILED, 69, cause=Cause.HANG),
        Budget(),
    ),
    ("hung", "no restart left", Outcome(Kind.FAILED, 69, cause=Cause.HANG), _SPENT),
    (
        "hung",
        "and a worker cannot be killed",
        Outcome(Kind.FAILED, 69, cause=Cause.HANG, is_host_broken=True),
        Budget(),
    ),
    ("regrouped", "nodes want to join", Outcome(Kind.REGROUPED, is_joined=True), Budget()),
    ("regrouped", "nodes have left", Outcome(Kind.REGROUPED), Budget()),
    ("regrouped", "ranks here only lost one of another host", _LOSS, Budget()),
    ("regrouped", "so too often, without a new checkpoint", _LOSS, _LOOP),
    ("stopped", "saved as asked", Outcome(Kind.STOPPED, CODE_PREEMPTED, _TERM), Budget()),
    ("stopped", "done meanwhile", Outcome(Kind.STOPPED, 0, _TERM), Budget()),
    ("stopped", "before or after training", Outcome(Kind.STOPPED, -_TERM, _TERM), Budget()),
    (
        "stopped",
        "by SIGTERM, which this script does not handle",
        Outcome(Kind.STOPPED, -_TERM, _TERM, is_unsaved=True),
        Budget(),
    ),
    (
        "stopped",
        "a rank was killed meanwhile, a checkpoint is there",
        Outcome(Kind.STOPPED, _KILL, _TERM, cause=Cause.SIGNAL, newest="checkpoint-20-g1"),
        Budget(),
    ),
    (
        "stopped",
        "a rank was killed meanwhile, none is known",
        Outcome(Kind.STOPPED, _KILL, _TERM, cause=Cause.SIGNAL, newest=None),
        Budget(),
    ),
    (
        "stopped",
        "other ranks were lost meanwhile, a checkpoint is there",
        Outcome(Kind.STOPPED, 69, _TERM, cause=Cause.PEER, newest="checkpoint-20-g1"),
        Budget(),
    ),
    ("stopped", "left at once: work was lost", Outcome(Kind.STOPPED, 143, _TERM), Budget()),
    ("stopped", "a worker failed while stopping", Outcome(Kind.STOPPED, 1, _TERM), Budget()),
    ("killed", "had to be killed: --grace was over", Outcome(Kind.KILLED, 0, _TERM), Budget()),
    ("unreachable", "peers or rendezvous are gone", Outcome(Kind.UNREACHABLE), Budget()),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what ended, how, and what follows."""

    ended: str
    how: str
    follows: str


def reaction_table() -> tuple[Row, ...]:
    """Return one row for every kind of case, decided by what decides in earnest."""
    cases = [
        (ended, how, _name(outcome, decide(outcome, budget)))
        for ended, how, outcome, budget in _CASES
    ]
    # What the trainer does by itself, before a worker fails at all.
    inside = Row("loss", "no number, or a spike: rollback_on", "roll back and skip the data")
    return (*(Row(ended, how, follows) for ended, how, follows in cases), inside)


def _name(outcome: Outcome, action: Action) -> str:
    if isinstance(action, Finish):
        saved = "" if outcome.status in (-_TERM, _KILL) else "save and "
        return f"{saved}leave with {action.code}" if action.code else "finish with 0"
    if isinstance(action, LeaveHost):
        return f"restart elsewhere: leave this host with {action.code}"
    if not isinstance(action, Restart):
        return f"give up with {action.code}"
    if not action.is_paid:
        return f"{_name_free(outcome)}, free"
    wait = ", after a wait" if action.delay_seconds else ""
    return f"restart in place{wait}, one restart less"


def _name_free(outcome: Outcome) -> str:
    if outcome.is_loss:
        return "restart with who is left"
    return "grow: restart with more nodes" if outcome.is_joined else "shrink and go on: restart"
