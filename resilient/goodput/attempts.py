"""Attempts of a run (starts of all its ranks), and the timeline of each attempt.

An agent is the process that starts the ranks of a host. It reports the start and the end of an
attempt, and the ranks report their work. Another launcher, such as torchrun or plain python,
reports no attempts. Events of its ranks form one attempt per generation, the number that each start
of the run claims. Times that no event reports are inferred from neighbouring events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.format.keys import parse_checkpoint
from resilient.goodput.event_log import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.goodput.event_log import EventRecord

_OF_AGENTS = frozenset(
    {
        *("WorkerFailed", "HangFound", "StopRequested", "ProgressReported", "NoticeReceived"),
        *("AttemptEnded", "NodesLost"),
    }
)


@dataclass(slots=True)
class AgentRun:
    """One run of an agent, from its first event to its last.

    Attributes:
        agent: Name of the agent, ``host:pid``.
        began_ms: Time of the first event.
        ended_ms: Time of the last event.
        exit_code: Exit code that the agent reported; None if it reported no end.
    """

    agent: str
    began_ms: int
    ended_ms: int
    exit_code: int | None = None


@dataclass(slots=True)
class AttemptRecord:
    """One attempt of the workers, on all hosts.

    Attributes:
        number: Position in the run, 1 for the first attempt.
        attempt: Name of the attempt; empty if no agent started it.
        agents: Agents that reported the attempt.
        began_ms: Start of the rendezvous of its hosts.
        started_ms: Start of its processes.
        ended_ms: End of its last process, as far as reported.
        cause: Reason of the start.
        world_size: Number of ranks on all hosts.
        records: Events of the attempt, by time.
        is_ended: Whether an agent reported the end.
    """

    number: int
    attempt: str
    agents: set[str]
    began_ms: int
    started_ms: int
    ended_ms: int
    cause: str = ""
    world_size: int = 0
    records: list[EventRecord] = field(default_factory=list)
    is_ended: bool = False

    def records_of(self, *events: str) -> list[EventRecord]:
        """Return the records of these events, by time."""
        return [record for record in self.records if record.event in events]

    def first(self, *events: str) -> EventRecord | None:
        """Return the first record of these events."""
        return next(iter(self.records_of(*events)), None)


def find_agent_runs(records: Iterable[EventRecord]) -> list[AgentRun]:
    """Return the runs of agents in the order of their first events."""
    runs: dict[str, AgentRun] = {}
    for record in records:
        if not record.agent:
            continue
        launch = runs.setdefault(record.agent, AgentRun(record.agent, record.at_ms, record.at_ms))
        launch.ended_ms = max(launch.ended_ms, record.at_ms)
        if record.event in ("RunEnded", "RunAborted"):
            launch.exit_code = round(record.number("exit_code"))
    return list(runs.values())


def find_attempts(records: Sequence[EventRecord]) -> list[AttemptRecord]:
    """Return the attempts in the order of their start, each with its events."""
    by_attempt: dict[str, AttemptRecord] = {}
    attempt_by_agent: dict[str, AttemptRecord] = {}  # the current attempt of each agent
    for record in records:
        if record.event == "WorkerGroupStarted" and record.agent:
            attempt_by_agent[record.agent] = _begin(by_attempt, record)
        elif record.event in _OF_AGENTS and record.agent in attempt_by_agent:
            _add_record(attempt_by_agent[record.agent], record)
    attempts = sorted(by_attempt.values(), key=lambda attempt: attempt.began_ms)
    _assign_rank_records(attempts, [record for record in records if not record.agent])
    attempts.sort(key=lambda attempt: attempt.began_ms)
    previous_end_ms = 0
    for number, attempt in enumerate(attempts, 1):
        attempt.number = number
        attempt.records.sort(key=lambda record: record.at_ms)
        # A host may return to the rendezvous while another host still ends its workers.
        attempt.began_ms = min(max(attempt.began_ms, previous_end_ms), attempt.started_ms)
        previous_end_ms = attempt.ended_ms if attempt.is_ended else previous_end_ms
    return attempts


def _begin(by_attempt: dict[str, AttemptRecord], record: EventRecord) -> AttemptRecord:
    started_ms = record.at_ms - record.milliseconds("start_seconds")
    began_ms = started_ms - record.milliseconds("met_seconds")
    attempt = record.text("attempt") or f"{record.agent} {record.at_ms}"
    record_of_attempt = by_attempt.setdefault(
        attempt, AttemptRecord(0, attempt, set(), began_ms, started_ms, record.at_ms)
    )
    # The first host to arrive has waited longest for its peers.
    record_of_attempt.began_ms = min(record_of_attempt.began_ms, began_ms)
    record_of_attempt.started_ms = max(
        record_of_attempt.started_ms, started_ms, record_of_attempt.began_ms
    )
    record_of_attempt.ended_ms = max(record_of_attempt.ended_ms, record.at_ms)
    record_of_attempt.cause, record_of_attempt.world_size = (
        record.text("cause"),
        round(record.number("world_size")),
    )
    record_of_attempt.agents.add(record.agent)
    return record_of_attempt


def _add_record(attempt: AttemptRecord, record: EventRecord) -> None:
    attempt.records.append(record)
    if record.event == "AttemptEnded" or not attempt.is_ended:
        attempt.ended_ms = max(attempt.ended_ms, record.at_ms)
    attempt.is_ended |= record.event == "AttemptEnded"


def _assign_rank_records(attempts: list[AttemptRecord], records: Sequence[EventRecord]) -> None:
    """Assign events of ranks to attempts, by generation if the event has one, else by time."""
    by_agents = list(attempts)
    begun_ms = [attempt.began_ms for attempt in by_agents]
    generations: dict[int, AttemptRecord] = {}
    for record in records:
        generation = round(record.number("generation", -1))
        attempt = generations.get(generation)
        if attempt is None:
            nth = bisect_right(begun_ms, record.at_ms) - 1
            attempt = by_agents[nth] if nth >= 0 else None
            if attempt is None or (attempt.is_ended and record.at_ms > attempt.ended_ms):
                attempt = AttemptRecord(0, "", set(), record.at_ms, record.at_ms, record.at_ms)
                attempts.append(attempt)
            if generation >= 0:
                generations[generation] = attempt
        attempt.records.append(record)
        if not attempt.attempt:
            began_ms = record.at_ms - (
                record.milliseconds("took_seconds") if record.event == "CheckpointRestored" else 0
            )
            attempt.began_ms = attempt.started_ms = min(attempt.began_ms, began_ms)
        # The saver daemon may commit checkpoints of an attempt after its end.
        if not attempt.is_ended and record.event != "CheckpointCommitted":
            attempt.ended_ms = max(attempt.ended_ms, record.at_ms)


STEP_EVENTS = ("FirstStepEnded", "MetricsLogged", "PhaseEnded", "ProgressReported")
ROLLBACK_EVENT = "TrainingRolledBack"


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step and the time of its end, in milliseconds since 1970."""

    step: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """A return to a checkpoint within an attempt, from which training continued.

    Attributes:
        began_ms: Start of the discarded work.
        at_ms: Time at which training continued.
        step: Step from which training continued.
        lost_steps: Discarded steps, all after ``step``.
        reason: Reason of the return.
        host: Host that reported the return.
        times: Number of returns in the run up to this one, over all attempts.
    """

    began_ms: int
    at_ms: int
    step: int
    lost_steps: int
    reason: str
    host: str
    times: int


def trace_steps(
    records: Iterable[EventRecord], began: StepTime, ended_ms: int
) -> tuple[tuple[StepTime, ...], tuple[Rewind, ...]]:
    """Return the times of steps and the rewinds of an attempt.

    The step times ascend in step and in time.

    Args:
        records: Events of the ranks, by time. Several ranks may report the same step.
        began: First step of the attempt and its time.
        ended_ms: End of its training; later events are ignored.
    """
    points: list[StepTime] = [began]
    rewinds: list[Rewind] = []
    for record in sorted(records, key=done_ms):
        at_ms = done_ms(record)
        if not began.at_ms <= at_ms <= ended_ms:
            continue
        if record.event == ROLLBACK_EVENT:
            if (rewind := _parse_rewind(record, points, rewinds)) is not None:
                rewinds.append(rewind)
                points = [point for point in points if point.step < rewind.step]
                points.append(StepTime(rewind.step, at_ms))
        elif (step := step_of(record, -1)) > points[-1].step:
            points.append(StepTime(step, at_ms))
    return tuple(points), tuple(rewinds)


def when_done(points: Sequence[StepTime], step: int) -> int:
    """Return the time at which ``step`` ended, interpolated between known steps."""
    nth = bisect_left(points, step, key=lambda point: point.step)
    if nth in (0, len(points)):
        return points[0 if nth == 0 else -1].at_ms
    next_point, previous_point = points[nth], points[nth - 1]
    share = (step - previous_point.step) / (next_point.step - previous_point.step)
    return round(previous_point.at_ms + (next_point.at_ms - previous_point.at_ms) * share)


def done_ms(record: EventRecord) -> int:
    """Return the time at which the step of a record ended, that is, when the next phase began."""
    return record.at_ms - (
        record.milliseconds("took_seconds") if record.event == "PhaseEnded" else 0
    )


def step_of(record: EventRecord | None, default: int) -> int:
    """Return the step of a record."""
    if record is None:
        return default
    for name in ("global_step", "step"):
        step = record.number(name, -1)
        if step >= 0:
            return round(step)
    return default


def _parse_rewind(
    record: EventRecord, points: Sequence[StepTime], returns: Sequence[Rewind]
) -> Rewind | None:
    """Return the rewind of a record; None if it is already reported or has no checkpoint."""
    checkpoint = parse_checkpoint(record.text("checkpoint"))
    times = round(record.number("times"))
    if checkpoint is None or times in (past.times for past in returns):
        return None
    step = max(checkpoint.step, points[0].step)
    last_step = max(step, step_of(record, step + 1) - 1)
    # By this time, all steps before the broken step had ended.
    points_kept = [past for past in points if past.step < last_step] + [
        StepTime(last_step, record.at_ms)
    ]
    began_ms = when_done(points_kept, step)
    return Rewind(
        began_ms, record.at_ms, step, last_step - step, record.text("reason"), record.host, times
    )


_SAVING, _EVALUATING = "saving", "evaluating"


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time, in milliseconds since 1970."""

    began_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class AttemptTimeline:
    """Timeline of one attempt.

    Attributes:
        life: The attempt.
        restore: Time of loading a checkpoint; None without a load.
        training: Time from the start of the loop to its end, for any reason; None without training.
        is_over: Whether the loop itself ended, after its last step or a stop request.
        failed_ms: Time of the failure, as far as known; None without a failure.
        hung_ms: Start of the hang; None without a hang.
        first_step_ms: End of the first step; None if no step ended.
        first_step: Step from which the attempt began.
        last_step: Last step that is known to have ended.
        evaluations: Evaluations during training.
        stalls: Times in which training waited for a save.
        points: Known steps and their times, ascending.
        returns: Rewinds to a checkpoint without an end of the attempt.
    """

    life: AttemptRecord
    restore: Span | None
    training: Span | None
    is_over: bool
    failed_ms: int | None
    hung_ms: int | None
    first_step_ms: int | None
    first_step: int
    last_step: int
    evaluations: tuple[Span, ...] = ()
    stalls: tuple[Span, ...] = ()
    points: tuple[StepTime, ...] = field(default=(), repr=False)
    returns: tuple[Rewind, ...] = ()

    def when_done(self, step: int) -> int:
        """Return the time at which ``step`` ended, interpolated between known steps."""
        assert self.training is not None, "only called for an attempt that trained"  # noqa: S101
        last_point = StepTime(self.last_step, self.training.ended_ms)
        return when_done(
            [*(point for point in self.points if point.step < last_point.step), last_point], step
        )


def build_attempt_timeline(attempt: AttemptRecord) -> AttemptTimeline:
    """Return the timeline of an attempt, as far as its events show it."""
    failed_ms, hung_ms = _failed_ms(attempt), _hung_ms(attempt)
    until_ms = attempt.ended_ms if failed_ms is None else failed_ms
    start_record, end_records = attempt.first("TrainingStarted"), attempt.records_of(*ENDS)
    progress_records = [
        record
        for record in attempt.records_of("ProgressReported")
        if record.number("step", -1) >= 0
    ]
    restored = attempt.first("CheckpointRestored")
    first_step = step_of(start_record or restored, 0)
    begins_ms = (
        start_record.at_ms
        if start_record
        else (progress_records[0].at_ms if progress_records else None)
    )
    training = None
    if begins_ms is not None:
        stops_ms = end_records[-1].at_ms if end_records else until_ms
        training = Span(begins_ms, max(begins_ms, stops_ms if hung_ms is None else hung_ms))
    points, rewinds = _trace_steps(attempt, first_step, training)
    first_done = attempt.first("FirstStepEnded")
    done_ms = first_done.at_ms if first_done else (points[1].at_ms if points[1:] else None)
    return AttemptTimeline(
        life=attempt,
        restore=_span_before(restored) if restored else None,
        training=training,
        is_over=bool(end_records),
        failed_ms=failed_ms,
        hung_ms=hung_ms,
        first_step_ms=done_ms,
        first_step=first_step,
        last_step=max(first_step, _last_step(attempt, rewinds)) if training else first_step,
        evaluations=tuple(map(_span_before, _phases(attempt, _EVALUATING))),
        stalls=_stalls(attempt),
        points=points,
        returns=rewinds,
    )


def _failed_ms(attempt: AttemptRecord) -> int | None:
    """Return the time of the first sign of failure; None if the attempt did not fail."""
    ends = attempt.records_of("AttemptEnded")
    if not ends:
        failure = attempt.first("WorkerFailed")
        return failure.at_ms if failure else None
    failure_ends = [end for end in ends if end.text("ended") in ("failed", "unreachable")]
    if not failure_ends:
        return None
    return min(
        attempt.ended_ms,
        *(record.at_ms - record.milliseconds("stop_seconds") for record in failure_ends),
    )


def _hung_ms(attempt: AttemptRecord) -> int | None:
    hang = attempt.first("HangFound")
    return hang.at_ms - hang.milliseconds("waited_seconds") if hang else None


def _trace_steps(
    attempt: AttemptRecord, first_step: int, training: Span | None
) -> tuple[tuple[StepTime, ...], tuple[Rewind, ...]]:
    if training is None:
        return (), ()
    start_point = StepTime(first_step, training.began_ms)
    return trace_steps(
        attempt.records_of(*STEP_EVENTS, ROLLBACK_EVENT), start_point, training.ended_ms
    )


def _last_step(attempt: AttemptRecord, returns: tuple[Rewind, ...]) -> int:
    """Return the last step that ended and was not discarded since."""
    rewind = returns[-1] if returns else None
    records = attempt.records_of(*STEP_EVENTS, "AttemptEnded", *ENDS)
    steps_since = [
        step_of(record, 0) for record in records if rewind is None or record.at_ms > rewind.at_ms
    ]
    return max([*steps_since, rewind.step if rewind else 0], default=0)


def _phases(attempt: AttemptRecord, phase: str) -> list[EventRecord]:
    return [record for record in attempt.records_of("PhaseEnded") if record.text("phase") == phase]


def _stalls(attempt: AttemptRecord) -> tuple[Span, ...]:
    """Return the times in which training waited for a save, from its events or from the commits."""
    phases = _phases(attempt, _SAVING)
    if phases:
        return tuple(map(_span_before, phases))
    stalls = []
    for record in attempt.records_of("CheckpointCommitted"):
        began_ms = record.at_ms - record.milliseconds("commit_seconds")
        stalls.append(Span(began_ms, began_ms + record.milliseconds("stall_seconds")))
    return tuple(stalls)


def _span_before(record: EventRecord) -> Span:
    return Span(record.at_ms - record.milliseconds("took_seconds"), record.at_ms)
