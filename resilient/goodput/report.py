"""Goodput report of a run: wall-clock time by class, faults, saves, logged losses and status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.format.keys import parse_checkpoint
from resilient.goodput.attempts import build_attempt_timeline, find_agent_runs, find_attempts
from resilient.goodput.event_log import ENDS, align, correct_clock_steps, offsets_ms
from resilient.goodput.timeline import (
    Fault,
    RecoverySummary,
    TimeClass,
    Timeline,
    find_faults,
    paint_agent_runs,
    paint_attempt,
    paint_lost,
    recoveries_by_cause,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.goodput.attempts import AgentRun, AttemptRecord, AttemptTimeline
    from resilient.goodput.event_log import EventRecord
    from resilient.goodput.timeline import TimelineInterval

SILENT_MS = 60_000
"""An agent writes an event every 10 s. An agent without an event for this time counts as down."""


@dataclass(frozen=True, slots=True)
class LoggedLoss:
    """A loss that training logged.

    Attributes:
        is_lost: Whether its step was rolled back later.
    """

    life: int
    step: int
    at_ms: int
    value: float
    is_lost: bool


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint.

    Attributes:
        commit_ms: Time from capture to manifest.
        stall_ms: Time in which training waited for the copy.
    """

    checkpoint: str
    step: int
    life: int
    at_ms: int
    size_bytes: int
    written_bytes: int
    commit_ms: int
    stall_ms: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Current status of a run.

    Attributes:
        step: Last step that is known to have ended.
        max_steps: Steps of the run, 0 if not reported.
        steps_per_second: Rate of the newest steps of this attempt, 0 if unknown.
        told_ms: Time of the newest event.
        exit_code: Exit code of the agent that ended last; None while it runs or if not reported.
        is_done: Whether training has ended normally.
    """

    step: int
    max_steps: int
    steps_per_second: float
    told_ms: int
    exit_code: int | None
    is_done: bool


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """Wall clock of a run by class, with its attempts, faults and checkpoints.

    Attributes:
        began_ms: Start of the wall clock: the first event of the run.
        ended_ms: End of the wall clock.
        intervals: The wall clock in adjacent intervals.
        doings: Timelines of the attempts.
        launches: Runs of agents.
        faults: Early ends of attempts, and rewinds to a checkpoint.
        repairs: Recovery costs by cause.
        losses: Logged losses, by attempt and step.
        saved: Checkpoints by time.
        skew_ms: Time by which each host's clock was ahead; empty if all agree.
    """

    began_ms: int
    ended_ms: int
    intervals: tuple[TimelineInterval, ...]
    doings: tuple[AttemptTimeline, ...]
    launches: tuple[AgentRun, ...]
    faults: tuple[Fault, ...]
    repairs: Mapping[str, RecoverySummary]
    losses: tuple[LoggedLoss, ...]
    saved: tuple[CommittedCheckpoint, ...]
    skew_ms: Mapping[str, int]
    now: RunStatus

    @property
    def wall_ms(self) -> int:
        """Time from the first event to the end."""
        return self.ended_ms - self.began_ms

    @property
    def spent_ms(self) -> dict[TimeClass, int]:
        """The wall clock by class; the values sum to ``wall_ms``."""
        total = dict.fromkeys(TimeClass, 0)
        for interval in self.intervals:
            total[interval.spent] += interval.length_ms
        return total

    @property
    def goodput(self) -> float:
        """The share of the wall clock spent on training steps that are part of the result."""
        return self.spent_ms[TimeClass.TRAINING] / self.wall_ms if self.wall_ms else 0.0

    @property
    def lost_steps(self) -> int:
        """Steps whose work was lost."""
        return sum(fault.lost_steps for fault in self.faults)

    @property
    def risk_steps(self) -> int:
        """Steps that would be lost if all hosts failed now."""
        return max(
            0, self.now.step - max((save.step for save in self._resumable_checkpoints), default=0)
        )

    @property
    def _resumable_checkpoints(self) -> list[CommittedCheckpoint]:
        """Checkpoints from which the newest attempt could resume, by the events of the run."""
        return [save for save in self.saved if save.step <= self.now.step]


def build_report(
    event_records: Sequence[EventRecord], until_ms: int = 0, *, goes_on: bool = True
) -> GoodputReport:
    """Build the goodput report of a run from its events.

    Args:
        event_records: All records of the run, in any order.
        until_ms: Current time, if the run may continue; 0 ends the report with the last record. See
            :func:`resilient.goodput.event_log.present_ms`.
        goes_on: Whether the run's agent may be alive. Intervals of a dead agent are not extended to
            the current time.
    """
    by_time = correct_clock_steps(event_records)
    records = align(by_time)
    last_ms = records[-1].at_ms if records else 0
    launches, attempts = find_agent_runs(records), find_attempts(records)
    if goes_on and until_ms - last_ms <= SILENT_MS:
        _extend_to_present(launches, attempts, until_ms)
    timelines = [build_attempt_timeline(attempt) for attempt in attempts]
    faults = find_faults(timelines, launches)
    firsts = [
        *(record.at_ms for record in records[:1]),
        *(attempt.began_ms for attempt in attempts),
    ]
    began_ms = min(firsts, default=0)
    run_timeline = Timeline(began_ms, max(last_ms, until_ms))
    paint_agent_runs(run_timeline, launches, timelines)
    for timeline in timelines:
        paint_attempt(run_timeline, timeline)
    paint_lost(run_timeline, faults)
    return GoodputReport(
        began_ms=began_ms,
        ended_ms=max(began_ms, last_ms, until_ms),
        intervals=run_timeline.intervals(),
        doings=tuple(timelines),
        launches=tuple(launches),
        faults=tuple(faults),
        repairs=recoveries_by_cause(faults),
        losses=_losses(timelines, faults),
        saved=_saved(timelines),
        skew_ms={host: value for host, value in offsets_ms(by_time).items() if value},
        now=_now(timelines, launches, last_ms),
    )


def _extend_to_present(
    launches: Sequence[AgentRun], attempts: Sequence[AttemptRecord], until_ms: int
) -> None:
    """Extend the last agent run and attempt to the current time if they have not ended."""
    for launch in launches[-1:]:
        if launch.exit_code is None:
            launch.ended_ms = max(launch.ended_ms, until_ms)
    for attempt in attempts[-1:]:
        is_over = attempt.is_ended or attempt.records_of(*ENDS)
        if not is_over and all(run.exit_code is None for run in launches[-1:]):
            attempt.ended_ms = max(attempt.ended_ms, until_ms)


def _losses(doings: Sequence[AttemptTimeline], faults: Sequence[Fault]) -> tuple[LoggedLoss, ...]:
    fault_spans = [span for fault in faults for span in fault.lost]
    losses = []
    for timeline in doings:
        lost_spans = [
            (began, ended)
            for began, ended, attempt in fault_spans
            if attempt == timeline.life.number
        ]
        for record in timeline.life.records_of("MetricsLogged"):
            value = _loss_of(record)
            if value is None:
                continue
            is_lost = any(began < record.at_ms <= ended for began, ended in lost_spans)
            step, attempt = round(record.number("step")), timeline.life.number
            losses.append(LoggedLoss(attempt, step, record.at_ms, value, is_lost))
    return tuple(losses)


def _loss_of(record: EventRecord) -> float | None:
    """Return the logged loss, finite or not; None if it is not a number."""
    metrics = record.fields.get("metrics")
    value = metrics.get("loss") if isinstance(metrics, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON integers are unbounded
        return None


def _saved(doings: Sequence[AttemptTimeline]) -> tuple[CommittedCheckpoint, ...]:
    saves = []
    for timeline in doings:
        for record in timeline.life.records_of("CheckpointCommitted"):
            name, size = record.text("checkpoint"), round(record.number("size_bytes"))
            written = round(record.number("written_bytes", -1))
            checkpoint = parse_checkpoint(name)
            saves.append(
                CommittedCheckpoint(
                    checkpoint=name,
                    step=checkpoint.step if checkpoint else 0,
                    life=timeline.life.number,
                    at_ms=record.at_ms,
                    size_bytes=size,
                    written_bytes=written if written >= 0 else size,
                    commit_ms=record.milliseconds("commit_seconds"),
                    stall_ms=record.milliseconds("stall_seconds"),
                )
            )
    return tuple(sorted(saves, key=lambda saved: saved.at_ms))


def _now(
    doings: Sequence[AttemptTimeline], launches: Sequence[AgentRun], told_ms: int
) -> RunStatus:
    training_timelines = [timeline for timeline in doings if timeline.training is not None]
    newest = training_timelines[-1] if training_timelines else None
    start_record = newest.life.first("TrainingStarted") if newest else None
    last_launch = max(launches, key=lambda launch: launch.ended_ms, default=None)
    return RunStatus(
        step=newest.last_step if newest else 0,
        max_steps=round(start_record.number("max_steps")) if start_record else 0,
        steps_per_second=_rate(newest) if newest else 0.0,
        told_ms=told_ms,
        exit_code=last_launch.exit_code if last_launch else None,
        is_done=bool(newest and newest.life.records_of("TrainingEnded")),
    )


_RECENT = 20


def _rate(timeline: AttemptTimeline) -> float:
    """Return steps per second over the newest known steps."""
    points = timeline.points[1:][-_RECENT:]
    if not points:
        return 0.0
    first, last = points[0], points[-1]
    took_ms = last.at_ms - first.at_ms
    return 1000 * (last.step - first.step) / took_ms if took_ms > 0 else 0.0
