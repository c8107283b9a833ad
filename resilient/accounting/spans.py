"""What each life did, and when: moments that its records tell, the missing ones inferred."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.accounting.lives import Life
    from resilient.accounting.records import Record

_SAVING, _EVALUATING = "saving", "evaluating"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of time, from a moment to another, in milliseconds since 1970."""

    began_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class Doing:
    """What one life did.

    Attributes:
        life: which.
        restore: while it loaded a checkpoint; None if it did not.
        training: from the loop's beginning to its end, whatever ended it; None if there was none.
        is_over: whether the loop itself ended, by its last step or by an order to stop.
        failed_ms: when it failed, as far as can be told; None if it did not.
        hung_ms: since when it had hung; None if it did not hang.
        first_step_ms: when its first step was done; None if it was not.
        first_step: what it began from.
        last_step: the last one that is known to be done.
        evaluations: inside its training.
        stalls: times in which its training waited for a save.
        points: step -> when it was done, where that is known, ascending.
    """

    life: Life
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
    points: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def when_done(self, step: int) -> int:
        """Return when ``step`` was done: as told, or by interpolation between what was told."""
        assert self.training is not None, "asked only of a life that trained"  # noqa: S101
        points = [
            (self.first_step, self.training.began_ms),
            *self.points,
            (self.last_step, self.training.ended_ms),
        ]
        nth = bisect_left(points, (step, 0))
        if nth in (0, len(points)):
            return points[0 if nth == 0 else -1][1]
        later, later_ms = points[nth]
        earlier, earlier_ms = points[nth - 1]
        if later == step:
            return later_ms
        share = (step - earlier) / (later - earlier)
        return round(earlier_ms + (later_ms - earlier_ms) * share)


def doing_of(life: Life) -> Doing:
    """Return what a life did, as far as it was told."""
    failed_ms, hung_ms = _failed_ms(life), _hung_ms(life)
    until_ms = life.ended_ms if failed_ms is None else failed_ms
    began, over = life.first("TrainingStarted"), life.told("TrainingEnded", "TrainingStopped")
    signs = [one for one in life.told("ProgressSeen") if one.number("step", -1) >= 0]
    restored = life.first("CheckpointRestored")
    first_step = _step_of(began or restored, 0)
    begins_ms = began.at_ms if began else (signs[0].at_ms if signs else None)
    training = None
    if begins_ms is not None:
        stops_ms = over[-1].at_ms if over else until_ms
        training = Span(begins_ms, max(begins_ms, stops_ms if hung_ms is None else hung_ms))
    points = _points(life, first_step, training)
    first_done = life.first("FirstStepEnded")
    done_ms = first_done.at_ms if first_done else (points[0][1] if points else None)
    return Doing(
        life=life,
        restore=_before(restored) if restored else None,
        training=training,
        is_over=bool(over),
        failed_ms=failed_ms,
        hung_ms=hung_ms,
        first_step_ms=done_ms,
        first_step=first_step,
        last_step=max(first_step, _last_step(life)) if training else first_step,
        evaluations=tuple(map(_before, _phases(life, _EVALUATING))),
        stalls=_stalls(life),
        points=points,
    )


def _failed_ms(life: Life) -> int | None:
    """When the first sign of the failure was seen; None for a life that did not fail."""
    ends = life.told("LifeEnded")
    if not ends:
        told = life.first("WorkerFailed")
        return told.at_ms if told else None
    failed = [one for one in ends if one.text("ended") in ("failed", "unreachable")]
    if not failed:
        return None
    return min(life.ended_ms, *(one.at_ms - one.milliseconds("stop_seconds") for one in failed))


def _hung_ms(life: Life) -> int | None:
    hang = life.first("HangFound")
    return hang.at_ms - hang.milliseconds("waited_seconds") if hang else None


def _points(life: Life, first_step: int, training: Span | None) -> tuple[tuple[int, int], ...]:
    """Return when steps were done, ascending in both, each step at its earliest."""
    if training is None:
        return ()
    told = [(_step_of(one, -1), _done_ms(one)) for one in life.told(*_TELL_STEPS)]
    found: list[tuple[int, int]] = []
    for step, at_ms in sorted(told, key=lambda one: (one[1], one[0])):
        reached = found[-1][0] if found else first_step
        if step > reached and training.began_ms <= at_ms <= training.ended_ms:
            found.append((step, at_ms))
    return tuple(found)


_TELL_STEPS = ("FirstStepEnded", "MetricsLogged", "PhaseEnded", "ProgressSeen")


def _done_ms(one: Record) -> int:
    """What follows a step begins when that is done."""
    return one.at_ms - (one.milliseconds("took_seconds") if one.event == "PhaseEnded" else 0)


def _last_step(life: Life) -> int:
    told = (*_TELL_STEPS, "LifeEnded", "TrainingStopped", "TrainingEnded")
    return max((_step_of(one, 0) for one in life.told(*told)), default=0)


def _step_of(one: Record | None, default: int) -> int:
    if one is None:
        return default
    for name in ("global_step", "step"):
        step = one.number(name, -1)
        if step >= 0:
            return round(step)
    return default


def _phases(life: Life, phase: str) -> list[Record]:
    return [one for one in life.told("PhaseEnded") if one.text("phase") == phase]


def _stalls(life: Life) -> tuple[Span, ...]:
    """Return when training waited for a save: as it told, or as each commit did."""
    told = _phases(life, _SAVING)
    if told:
        return tuple(map(_before, told))
    found = []
    for one in life.told("CheckpointCommitted"):
        began_ms = one.at_ms - one.milliseconds("commit_seconds")
        found.append(Span(began_ms, began_ms + one.milliseconds("stall_seconds")))
    return tuple(found)


def _before(one: Record) -> Span:
    return Span(one.at_ms - one.milliseconds("took_seconds"), one.at_ms)
