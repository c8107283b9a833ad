"""A hang: told with everybody's stacks, then ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from resilient.agent.health.lock_waits import awaited_locks
from resilient.agent.health.stacks import RankStacks, alike, main_stack
from resilient.agent.verdict.causes import Cause
from resilient.agent.verdict.failures import Failure, WorkerError
from resilient.agent.verdict.outcome import Kind, Outcome
from resilient.errors import DeadlineExceeded
from resilient.events import Event, Level

if TYPE_CHECKING:
    from resilient.agent.health.heartbeat import Hang, Overdue
    from resilient.agent.health.ranks import Health
    from resilient.agent.workers.group import WorkerGroup
    from resilient.events import Emitter

_KILL_SECONDS = 5.0
_LINES_MAX = 16
_HINT = "if the ranks only needed longer: --hang-floor, --hang-patience or --hang-deadline off"
_HINT_OF_EDGES = (
    "if it had work to do there: a longer --hang-patience, or resilient.heartbeat() now and then"
)
_STATES = {"T": "stopped (SIGSTOP)", "D": "stuck in the kernel (D)", "R": "running", "S": "asleep"}


@dataclass(frozen=True, slots=True)
class HangFound(Event):
    """No rank gets on, and one is blamed; nothing was killed yet.

    Attributes:
        rank: that is behind, or stopped.
        step: the last that it finished, -1 before the first.
        phase: what it was doing: of :class:`resilient.world.pulse.Phase`, `starting` or `ending`.
        state: of its process, for a person.
        waited_seconds: how long it has shown no progress.
        deadline_seconds: how long it may.
        median_seconds: of a step in this run, 0 when it was not learned yet.
        overdue: all ranks of this host that waited too long.
        stacks: of all ranks of this host.
        locks: lines about the lock files that ranks may wait for.
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

    def facts(self) -> dict[str, Any]:
        """Return the facts, the stacks as text by rank."""
        names = set(self.__dataclass_fields__) - {"stacks"}
        facts: dict[str, Any] = {name: getattr(self, name) for name in sorted(names)}
        facts["stacks"] = {
            str(one.rank): {"kernel": one.kernel, "stacks": one.stacks} for one in self.stacks
        }
        return facts

    def line(self) -> str:
        """Say who is behind, where, and what everybody is doing."""
        learned = f", the median step takes {self.median_seconds:.3g} s" * bool(self.median_seconds)
        waited = f"{self.waited_seconds:.1f} s, and {self.deadline_seconds:.1f} s are allowed here"
        rows = [
            f"hang: no progress for {waited}{learned}",
            f"  rank {self.rank} is {self.state}, {_place(self.step)}, in phase `{self.phase}`",
        ]
        for ranks, one in alike(self.stacks).items():
            rows += _shown(ranks, one)
        rows += [f"  {line}" for line in self.locks]
        return "\n".join(rows)


def _shown(ranks: tuple[int, ...], one: RankStacks) -> list[str]:
    """Return what ranks that are at the same place were doing."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if one.is_answered:
        lines, what = main_stack(one.stacks)[1:], "main thread, innermost call first"
    else:
        lines, what = one.kernel.splitlines(), "no answer; what the kernel says"
    more = [f"      ... {len(lines) - _LINES_MAX} more"] if len(lines) > _LINES_MAX else []
    return [f"  {who}: {what}", *(f"    {line}" for line in lines[:_LINES_MAX]), *more]


def end_hung(
    group: WorkerGroup, health: Health, hang: Hang, emit: Emitter
) -> tuple[Outcome, list[Failure]]:
    """Take all stacks, tell them, kill the group; return its end and the rank that is blamed.

    Nobody is asked to save first: who is stuck cannot, and what was staged before is the
    keeper's, who makes it durable.
    """
    health.count_hang()
    stacks = health.stacks(group.pids)
    emit(_found(hang, stacks))
    group.kill()
    is_unkillable = not group.wait_for_all(_KILL_SECONDS)
    blamed = hang.first.rank
    message = f"hang: {describe_overdue(hang.first)}"
    inner = next((one.innermost for one in stacks if one.rank == blamed), "")
    error = WorkerError(
        message=f"{message}{f', in {inner}' * bool(inner)}",
        hint=_HINT_OF_EDGES if hang.first.edge else _HINT,
    )
    failures = [
        Failure(one, error, Cause.HANG) for one in group.exits if one.command.rank == blamed
    ]
    status = DeadlineExceeded.exit_code
    outcome = Outcome(
        Kind.FAILED, status, reason=message, cause=Cause.HANG, is_host_broken=is_unkillable
    )
    return outcome, failures


def describe_overdue(one: Overdue) -> str:
    """Return what a rank waited for, in a line."""
    state = _STATES.get(one.state, one.state)
    return (
        f"{state} for {one.waited_seconds:.1f} s {_place(one.step)} "
        f"(phase `{one.doing}`, {one.deadline_seconds:.1f} s allowed)"
    )


def _place(step: int) -> str:
    return f"after step {step}" if step >= 0 else "before any step"


def _found(hang: Hang, stacks: list[RankStacks]) -> HangFound:
    first = hang.first
    return HangFound(
        rank=first.rank,
        step=first.step,
        phase=first.doing,
        state=_STATES.get(first.state, first.state or "silent"),
        waited_seconds=first.waited_seconds,
        deadline_seconds=first.deadline_seconds,
        median_seconds=hang.median_seconds or 0.0,
        overdue=sorted(one.rank for one in hang.culprits),
        stacks=stacks,
        locks=awaited_locks(stacks, os.environ),
    )
