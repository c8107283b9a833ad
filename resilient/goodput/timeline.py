"""Wall-clock time of a run divided into classes, with faults and lost work.

The intervals of a timeline are adjacent, and each interval has one class. The lengths of the
intervals sum to the length of the timeline. An attempt is one start of all ranks of the run. A
fault is an early end of an attempt, or a return to a checkpoint within an attempt (rewind). The
cost of a fault includes the lost work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from resilient.goodput.attempts import AgentRun, AttemptRecord, AttemptTimeline


class TimeClass(StrEnum):
    """Classes of wall-clock time."""

    TRAINING = "training"
    """Steps whose work is part of the result."""
    LOST = "lost"
    """Steps that must be repeated: rolled back, or not saved before their attempt ended."""
    EVALUATION = "evaluation"
    SAVE_STALL = "save_stall"
    """Training waited for a save."""
    RESTORE = "restore"
    """Reading and verifying a checkpoint."""
    START = "start"
    """Start of an agent or of its workers, until training began."""
    RENDEZVOUS = "rendezvous"
    """Waiting for the other hosts."""
    DETECT = "detect"
    """From the last heartbeat before a hang to its detection."""
    TEARDOWN = "teardown"
    """From the first sign of a failure to the end of the last worker."""
    WAIT = "wait"
    """Between two attempts: the decision, and the pause before the next attempt."""
    FINISH = "finish"
    """After the last step: saves in flight are committed, processes end."""
    DOWN = "down"
    """No agent was running."""


@dataclass(frozen=True, slots=True)
class TimelineInterval:
    """An interval of the wall clock.

    Attributes:
        began_ms: Start, in milliseconds since 1970.
        ended_ms: End, which is the start of the next interval.
        spent: Class of the time.
        life: Number of the attempt, 0 for none.
    """

    began_ms: int
    ended_ms: int
    spent: TimeClass
    life: int

    @property
    def length_ms(self) -> int:
        """Length in milliseconds."""
        return self.ended_ms - self.began_ms


class Timeline:
    """Span of time in which each moment has one class; a later ``paint`` replaces an earlier one.

    Args:
        began_ms: Start of the whole span.
        ended_ms: End of the whole span; times beyond are ignored.
    """

    def __init__(self, began_ms: int, ended_ms: int) -> None:
        self._ended_ms = max(began_ms, ended_ms)
        self._boundaries = [began_ms]
        self._classes = [(TimeClass.DOWN, 0)]

    def paint(
        self,
        began_ms: int,
        ended_ms: int,
        spent: TimeClass,
        attempt: int = 0,
        only: Collection[TimeClass] = (),
    ) -> None:
        """Set the class between two moments; with ``only``, replace only those classes."""
        began_ms = max(began_ms, self._boundaries[0])
        ended_ms = min(ended_ms, self._ended_ms)
        if began_ms >= ended_ms:
            return
        first_cut, last_cut = self._cut(began_ms), self._cut(ended_ms)
        for nth in range(first_cut, last_cut):
            if not only or self._classes[nth][0] in only:
                self._classes[nth] = (spent, attempt)

    def intervals(self) -> tuple[TimelineInterval, ...]:
        """Return the intervals by time; neighbours differ in class or attempt."""
        intervals: list[TimelineInterval] = []
        for (began_ms, ended_ms), time_class in zip(
            pairwise([*self._boundaries, self._ended_ms]), self._classes, strict=True
        ):
            if intervals and (intervals[-1].spent, intervals[-1].life) == time_class:
                intervals[-1] = TimelineInterval(intervals[-1].began_ms, ended_ms, *time_class)
            elif began_ms < ended_ms:
                intervals.append(TimelineInterval(began_ms, ended_ms, *time_class))
        return tuple(intervals)

    def _cut(self, at_ms: int) -> int:
        """Cut the timeline at a moment and return the index of the interval that begins there."""
        nth = bisect_left(self._boundaries, at_ms)
        if at_ms < self._ended_ms and (
            nth == len(self._boundaries) or self._boundaries[nth] != at_ms
        ):
            self._boundaries.insert(nth, at_ms)
            self._classes.insert(nth, self._classes[nth - 1])
        return nth


def paint_agent_runs(
    run_timeline: Timeline, launches: Sequence[AgentRun], timelines: Sequence[AttemptTimeline]
) -> None:
    """Paint the time of agents outside their attempts."""
    for launch in launches:
        attempts = [timeline.life for timeline in timelines if launch.agent in timeline.life.agents]
        run_timeline.paint(launch.began_ms, launch.ended_ms, TimeClass.WAIT)
        begins_ms = min((attempt.began_ms for attempt in attempts), default=launch.ended_ms)
        run_timeline.paint(launch.began_ms, begins_ms, TimeClass.START)
        ends_ms = max((attempt.ended_ms for attempt in attempts), default=launch.ended_ms)
        run_timeline.paint(ends_ms, launch.ended_ms, TimeClass.FINISH)


def paint_attempt(run_timeline: Timeline, timeline: AttemptTimeline) -> None:
    """Paint the time of an attempt over the time of its agents."""
    attempt, training = timeline.life, timeline.training
    paint = run_timeline.paint
    number, ended_ms = attempt.number, attempt.ended_ms
    paint(attempt.began_ms, attempt.started_ms, TimeClass.RENDEZVOUS, number)
    paint(attempt.started_ms, ended_ms, TimeClass.START, number)
    if timeline.restore:
        paint(
            timeline.restore.began_ms,
            timeline.restore.ended_ms,
            TimeClass.RESTORE,
            number,
            {TimeClass.START},
        )
    if training:
        paint(training.began_ms, training.ended_ms, TimeClass.TRAINING, number)
        for span in timeline.evaluations:
            paint(span.began_ms, span.ended_ms, TimeClass.EVALUATION, number, {TimeClass.TRAINING})
        covered_classes = {TimeClass.TRAINING, TimeClass.EVALUATION}
        for span in timeline.stalls:
            paint(span.began_ms, span.ended_ms, TimeClass.SAVE_STALL, number, covered_classes)
        paint(training.ended_ms, ended_ms, TimeClass.FINISH, number)
    if timeline.failed_ms is None:
        return
    if timeline.hung_ms is not None:
        paint(
            max(timeline.hung_ms, attempt.started_ms), timeline.failed_ms, TimeClass.DETECT, number
        )
    paint(timeline.failed_ms, ended_ms, TimeClass.TEARDOWN, number)


_PEER_CAUSE = "peer"
_CAUSE_BY_END = {
    "stopped": "preemption",
    "preempted": "preemption",
    "killed": "preemption",
    "regrouped": "resize",
    "unreachable": "rendezvous_lost",
}
_UNREPORTED_ENDS = ("regrouped", "unreachable")
"""Ends of an attempt in which other hosts were lost without a report."""
_LOSSES = (
    ("host_lost", "hosts", "no answer from {}"),
    ("agent_lost", "agents", "the agent of {} ended, and its host answers"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """The end of an attempt before training was done, or a rewind to a checkpoint.

    Attributes:
        life: Number of the attempt that ended or was rewound.
        at_ms: End of its useful time.
        cause: One word: a cause that the agent reported (``numbers`` also for a rewind),
            ``preemption``, ``resize``, ``rendezvous_lost``, ``host_lost`` or ``agent_lost``.
            ``agent_lost`` also covers an attempt without any report of its end.
        detail: Description for the user.
        host: Host of the first failure, if known.
        rank: Rank that failed first, -1 if none did.
        down_ms: Time until the first step of the next attempt ended; None if no later step ended.
        lost_steps: Completed steps after the step from which the next attempt began.
        lost: Time spans of the lost steps, (from, to, attempt).
    """

    life: int
    at_ms: int
    cause: str
    detail: str
    host: str
    rank: int
    down_ms: int | None
    lost_steps: int
    lost: tuple[tuple[int, int, int], ...]

    @property
    def lost_ms(self) -> int:
        """Time of the lost work, including evaluations and saves."""
        return sum(ended_ms - began_ms for began_ms, ended_ms, _ in self.lost)


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """All faults of one cause.

    Attributes:
        count: Number of faults.
        mttr_ms: Mean time from the fault to the first step of the next attempt; None if no attempt
            recovered.
        lost_steps: Lost steps.
        lost_ms: Time of the lost work.
    """

    count: int
    mttr_ms: float | None
    lost_steps: int
    lost_ms: int


def find_faults(timelines: Sequence[AttemptTimeline], launches: Sequence[AgentRun]) -> list[Fault]:
    """Return the faults of a run by time.

    If an attempt starts from an earlier step, the previous work after that step is lost. The loss
    is charged to the fault that ended the last attempt that trained, even if the work of earlier
    attempts is lost too.
    """
    exit_codes = {launch.agent: launch.exit_code for launch in launches}
    useful: list[_Piece] = []
    faults: list[Fault] = []
    first_open_fault = 0  # index of the first fault after the last training
    for nth, timeline in enumerate(timelines):
        if timeline.training is not None:
            steps, spans = _drop(useful, timeline.first_step)
            if first_open_fault < len(faults):
                faults[first_open_fault] = replace(
                    faults[first_open_fault], lost_steps=steps, lost=spans
                )
            faults.extend(_rewind_faults(timeline))
            first_open_fault = len(faults)
            useful.append(_Piece(timeline, timeline.last_step, is_open=not timeline.is_over))
        end_cause = _find_end(timeline, exit_codes, is_last=nth == len(timelines) - 1)
        if end_cause is not None:
            later_starts_ms = (
                next_timeline.first_step_ms for next_timeline in timelines[nth + 1 :]
            )
            done_ms = next((at_ms for at_ms in later_starts_ms if at_ms is not None), None)
            at_ms = _useful_until(timeline)
            down_ms = None if done_ms is None else max(0, done_ms - at_ms)
            faults.append(Fault(timeline.life.number, at_ms, *end_cause, down_ms, 0, ()))
    return faults


def _rewind_faults(timeline: AttemptTimeline) -> list[Fault]:
    """Return the rewinds of an attempt as faults."""
    rewinds_as_faults = []
    for rewind in timeline.returns:
        later_times_ms = (point.at_ms for point in timeline.points if point.step > rewind.step)
        done_ms = next((at_ms for at_ms in later_times_ms if at_ms > rewind.at_ms), None)
        down_ms = None if done_ms is None else done_ms - rewind.at_ms
        lost_spans = ((rewind.began_ms, rewind.at_ms, timeline.life.number),)
        rewinds_as_faults.append(
            Fault(
                *(timeline.life.number, rewind.at_ms, "numbers", rewind.reason, rewind.host, -1),
                *(down_ms, rewind.lost_steps, lost_spans),
            )
        )
    return rewinds_as_faults


def recoveries_by_cause(faults: Iterable[Fault]) -> Mapping[str, RecoverySummary]:
    """Return the costs of faults by cause, the most frequent cause first."""
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        groups[fault.cause].append(fault)
    return {
        cause: _sum_up(recoveries)
        for cause, recoveries in sorted(groups.items(), key=lambda g: -len(g[1]))
    }


def paint_lost(run_timeline: Timeline, faults: Iterable[Fault]) -> None:
    """Paint lost training over the classes of that time."""
    for fault in faults:
        for began_ms, ended_ms, attempt in fault.lost:
            run_timeline.paint(began_ms, ended_ms, TimeClass.LOST, attempt, {TimeClass.TRAINING})


def _sum_up(faults: Sequence[Fault]) -> RecoverySummary:
    downs = [fault.down_ms for fault in faults if fault.down_ms is not None]
    return RecoverySummary(
        count=len(faults),
        mttr_ms=sum(downs) / len(downs) if downs else None,
        lost_steps=sum(fault.lost_steps for fault in faults),
        lost_ms=sum(fault.lost_ms for fault in faults),
    )


@dataclass(slots=True)
class _Piece:
    """Steps of an attempt that count in the result so far, from its first step up to ``last``.

    The piece is open while the time after its last step belongs to no completed step.
    """

    attempt_timeline: AttemptTimeline
    last: int
    is_open: bool


def _drop(useful: list[_Piece], step: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Remove the work after ``step`` from the result; return its number of steps and its spans."""
    steps, spans = 0, []
    while useful and (useful[-1].last > step or useful[-1].is_open):
        piece = useful[-1]
        timeline, training = piece.attempt_timeline, piece.attempt_timeline.training
        assert training is not None, "only attempts that trained are stored"  # noqa: S101
        first_step = min(max(step, timeline.first_step), piece.last)
        ended_ms = training.ended_ms if piece.is_open else timeline.when_done(piece.last)
        steps += piece.last - first_step
        spans.append((timeline.when_done(first_step), ended_ms, timeline.life.number))
        piece.last, piece.is_open = first_step, False
        if first_step > timeline.first_step:
            break
        useful.pop()
    return steps, tuple(spans)


def _useful_until(timeline: AttemptTimeline) -> int:
    training_ended_ms = (
        timeline.training.ended_ms if timeline.is_over and timeline.training else None
    )
    ends = (timeline.hung_ms, timeline.failed_ms, training_ended_ms)
    return next((at_ms for at_ms in ends if at_ms is not None), timeline.life.ended_ms)


def _find_end(
    timeline: AttemptTimeline, exit_codes: Mapping[str, int | None], *, is_last: bool
) -> tuple[str, str, str, int] | None:
    """Return cause, detail, host and rank of an attempt's end; None if complete or running."""
    attempt = timeline.life
    ends = attempt.records_of("AttemptEnded")
    kinds = [end.text("ended") for end in ends]
    failures = attempt.records_of("WorkerFailed")
    if failures and ("failed" in kinds or not kinds):
        first_failure = next(
            (failure for failure in failures if failure.text("cause") != _PEER_CAUSE), failures[0]
        )
        lost_peer = _lost_nodes(attempt) if first_failure.text("cause") == _PEER_CAUSE else None
        detail = first_failure.text("error") or _status(round(first_failure.number("status")))
        own_failure = (
            first_failure.text("cause"),
            detail,
            first_failure.text("host"),
            round(first_failure.number("rank", -1)),
        )
        return lost_peer or own_failure
    kind = next((kind for kind in kinds if kind in (*_CAUSE_BY_END, "failed")), "")
    if kind:
        lost_peer = _lost_nodes(attempt) if kind in _UNREPORTED_ENDS else None
        return lost_peer or (_CAUSE_BY_END.get(kind, kind), _reason(attempt), ends[0].host, -1)
    if kinds or attempt.records_of("TrainingEnded", "UntilStepReached"):
        return None
    if attempt.records_of("TrainingStopped"):
        return "preemption", _reason(attempt), "", -1
    has_exited = any(exit_codes.get(agent) is not None for agent in attempt.agents)
    return None if is_last and not has_exited else ("agent_lost", "its end is unknown", "", -1)


def _lost_nodes(attempt: AttemptRecord) -> tuple[str, str, str, int] | None:
    """Return cause, detail, host and rank if the attempt lost nodes without a report."""
    losses = attempt.records_of("NodesLost")
    for cause, field, text in _LOSSES:
        lost_nodes = [word for record in losses for word in record.words(field)]
        if lost_nodes:
            return cause, text.format(", ".join(dict.fromkeys(lost_nodes))), lost_nodes[0], -1
    return None


def _reason(attempt: AttemptRecord) -> str:
    event = attempt.first("StopRequested") or attempt.first("TrainingStopped")
    return event.text("reason") if event else ""


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit {status}"
