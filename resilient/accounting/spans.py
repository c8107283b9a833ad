"""What each life did, and when: moments that its records tell, the missing ones inferred."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.accounting.points import (
    TELL_STEPS,
    WENT_BACK,
    Point,
    Return,
    step_of,
    walk,
    when_done,
)
from resilient.accounting.records import ENDS

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
        points: steps and when they were done, where that is known, ascending.
        returns: when it went back to a checkpoint without ending.
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
    points: tuple[Point, ...] = field(default=(), repr=False)
    returns: tuple[Return, ...] = ()

    def when_done(self, step: int) -> int:
        """Return when ``step`` was done: as told, or by interpolation between what was told."""
        assert self.training is not None, "asked only of a life that trained"  # noqa: S101
        last = Point(self.last_step, self.training.ended_ms)
        return when_done([*(one for one in self.points if one.step < last.step), last], step)


def doing_of(life: Life) -> Doing:
    """Return what a life did, as far as it was told."""
    failed_ms, hung_ms = _failed_ms(life), _hung_ms(life)
    until_ms = life.ended_ms if failed_ms is None else failed_ms
    began, over = life.first("TrainingStarted"), life.told(*ENDS)
    signs = [one for one in life.told("ProgressSeen") if one.number("step", -1) >= 0]
    restored = life.first("CheckpointRestored")
    first_step = step_of(began or restored, 0)
    begins_ms = began.at_ms if began else (signs[0].at_ms if signs else None)
    training = None
    if begins_ms is not None:
        stops_ms = over[-1].at_ms if over else until_ms
        training = Span(begins_ms, max(begins_ms, stops_ms if hung_ms is None else hung_ms))
    points, returns = _walk(life, first_step, training)
    first_done = life.first("FirstStepEnded")
    done_ms = first_done.at_ms if first_done else (points[1].at_ms if points[1:] else None)
    return Doing(
        life=life,
        restore=_before(restored) if restored else None,
        training=training,
        is_over=bool(over),
        failed_ms=failed_ms,
        hung_ms=hung_ms,
        first_step_ms=done_ms,
        first_step=first_step,
        last_step=max(first_step, _last_step(life, returns)) if training else first_step,
        evaluations=tuple(map(_before, _phases(life, _EVALUATING))),
        stalls=_stalls(life),
        points=points,
        returns=returns,
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


def _walk(
    life: Life, first_step: int, training: Span | None
) -> tuple[tuple[Point, ...], tuple[Return, ...]]:
    if training is None:
        return (), ()
    began = Point(first_step, training.began_ms)
    return walk(life.told(*TELL_STEPS, WENT_BACK), began, training.ended_ms)


def _last_step(life: Life, returns: tuple[Return, ...]) -> int:
    """Return the last step that is done and was not given up since."""
    back = returns[-1] if returns else None
    told = life.told(*TELL_STEPS, "LifeEnded", *ENDS)
    since = [step_of(one, 0) for one in told if back is None or one.at_ms > back.at_ms]
    return max([*since, back.step if back else 0], default=0)


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
