"""Time budget of a save within a preemption notice.

``p95 of a save + p95 of its promotion + 5 s <= --grace < termination grace <= notice``

Each limit includes the limit before it. The trainers save within ``--grace``. The agent ends before
its container or job is killed. The container or job is killed before the machine is gone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.goodput.event_log import event_files, event_lines, parse_fields

if TYPE_CHECKING:
    from pathlib import Path

OK, WARNING = "ok", "warning"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: Name of the check.
        is_ok: Whether the result meets the needs of a training.
        found: Measured values.
        hint: Command or instruction if something is wrong; empty if not needed.
    """

    name: str
    is_ok: bool
    found: str
    hint: str = ""

    @property
    def verdict(self) -> str:
        """``ok`` or ``warning``."""
        return OK if self.is_ok else WARNING

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)


MARGIN_SECONDS = 5.0
NOTICE_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0, "gke": 15.0, "slurm": 30.0}
"""Shortest notice in seconds; for SLURM its KillWait, for GKE the time left to a spot pod."""


@dataclass(frozen=True, slots=True)
class PreemptionBudget:
    """Terms of the inequality, in seconds; None for an unknown term.

    Attributes:
        save_seconds: p95 of a save until it is committed.
        tail_seconds: p95 of a promotion from a near repository; 0 without a near repository.
        grace_seconds: ``--grace`` of ``resilient train``.
        termination_seconds: Time from SIGTERM to SIGKILL for a container or a job.
        notice_seconds: Notice that the cloud or the scheduler gives.
        source: Origin of the first two terms.
    """

    save_seconds: float | None
    tail_seconds: float
    grace_seconds: float
    termination_seconds: float | None
    notice_seconds: float | None
    source: str = "nothing"


@dataclass(slots=True)
class SaveTimes:
    """Durations of saves and promotions, in seconds."""

    saves: list[float] = field(default_factory=list)
    promotions: list[float] = field(default_factory=list)


def budget_of(
    took: SaveTimes,
    grace_seconds: float,
    termination_seconds: float | None,
    notice_seconds: float | None,
) -> PreemptionBudget:
    """Return the budget with the p95 of the measured saves and promotions."""
    save, tail = p95(took.saves), p95(took.promotions) or 0.0
    source = f"p95 of {len(took.saves)} saves"
    return PreemptionBudget(save, tail, grace_seconds, termination_seconds, notice_seconds, source)


def needed_grace(took: SaveTimes) -> float:
    """Return the smallest ``--grace`` for a save and its promotion, in whole seconds.

    0 if no save is known.
    """
    save, tail = p95(took.saves), p95(took.promotions) or 0.0
    return 0.0 if save is None else math.ceil(save + tail + MARGIN_SECONDS)


def require(budget: PreemptionBudget) -> None:
    """Refuse a budget that does not hold.

    Raises:
        ConfigError: A comparison fails; the message has the numbers of the first failed comparison.
    """
    for check in judge(budget):
        if not check.is_ok:
            raise ConfigError(f"{check.name}: {check.found}", hint=check.hint)


def judge(budget: PreemptionBudget) -> list[Check]:
    """Return one check for each of the three comparisons whose terms are known."""
    grace, termination, notice = (
        budget.grace_seconds,
        budget.termination_seconds,
        budget.notice_seconds,
    )
    checks = [_judge_save(budget)]
    if termination is not None:
        checks.append(
            Check(
                "termination",
                grace < termination,
                f"--grace {grace:g} s, SIGKILL {termination:g} s after SIGTERM",
                "" if grace < termination else _hint_for(budget, termination),
            )
        )
    if notice is not None:
        stop_seconds, name = (
            (termination, "the termination grace") if termination else (grace, "--grace")
        )
        fits = stop_seconds <= notice
        checks.append(
            Check(
                "notice",
                fits,
                f"{name} {stop_seconds:g} s, notice {notice:g} s"
                + ("" if fits else ": too late, the host is gone"),
                "" if fits else f"resilient train --grace {notice / 2:g}",
            )
        )
    return checks


def _hint_for(budget: PreemptionBudget, termination_seconds: float) -> str:
    """Return the command to run if the grace is not below the termination grace."""
    needed_seconds = max(1, math.ceil(_needed_seconds(budget)))
    if needed_seconds < termination_seconds:
        return f"resilient train --grace {max(needed_seconds, termination_seconds / 2):g}"
    # No grace fits: the termination grace must be longer.
    kill_seconds = 2 * needed_seconds
    return f"resilient doctor --grace {needed_seconds:d} --termination-grace {kill_seconds:d}"


def _needed_seconds(budget: PreemptionBudget) -> float:
    """Return the smallest grace for a save and its promotion; 0 if no save is known."""
    if budget.save_seconds is None:
        return 0.0
    return budget.save_seconds + budget.tail_seconds + MARGIN_SECONDS


def _judge_save(budget: PreemptionBudget) -> Check:
    if budget.save_seconds is None:
        figures = f"--grace {budget.grace_seconds:g} s, and the time of a save is unknown"
        hint = "resilient doctor --events FOLDER --repo URL"
        return Check("budget", is_ok=True, found=figures, hint=hint)
    needed_seconds = _needed_seconds(budget)
    figures = (
        f"save {budget.save_seconds:.1f} s, promotion {budget.tail_seconds:.1f} s, margin "
        f"{MARGIN_SECONDS:g} s ({budget.source}): {needed_seconds:.1f} s of --grace "
        f"{budget.grace_seconds:g} s"
    )
    fits = needed_seconds <= budget.grace_seconds
    hint = f"resilient train --grace {math.ceil(needed_seconds)}" if not fits else ""
    return Check("budget", fits, figures, hint)


def read_events(folder: Path) -> SaveTimes:
    """Read the durations of a run's saves and promotions from its event files.

    Raises:
        RepositoryNotFound: The folder holds no event file.
        OSError: A file cannot be read.
        StoreDenied: A file leads out of the folder, or is no regular file.
    """
    save_times = SaveTimes()
    for path in event_files(folder):
        for line in event_lines(folder, path):
            record = parse_fields(line)
            if record.get("event") == "CheckpointCommitted":
                save_times.saves.append(_seconds(record.get("commit_seconds")))
            elif record.get("event") == "CheckpointPromoted":
                save_times.promotions.append(_seconds(record.get("took_seconds")))
    return save_times


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def p95(values: list[float]) -> float | None:
    """Return the 95th percentile (nearest rank); None for no values."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None
