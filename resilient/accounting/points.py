"""When steps were done, and what of them was given up without an end of the life."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.format.names import parse_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.accounting.records import Record

TELL_STEPS = ("FirstStepEnded", "MetricsLogged", "PhaseEnded", "ProgressSeen")
WENT_BACK = "RolledBack"


@dataclass(frozen=True, slots=True)
class Point:
    """A step, and when it was done, in milliseconds since 1970."""

    step: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Return:
    """A life that went back to a checkpoint, and on from there.

    Attributes:
        began_ms: when what was given up began.
        at_ms: when training went on.
        step: that it went on from.
        lost_steps: that were done beyond that.
        reason: why.
        host: where it was told.
        times: how often the run had gone back by then, in all lives.
    """

    began_ms: int
    at_ms: int
    step: int
    lost_steps: int
    reason: str
    host: str
    times: int


def walk(
    told: Iterable[Record], began: Point, ended_ms: int
) -> tuple[tuple[Point, ...], tuple[Return, ...]]:
    """Return when steps were done, ascending in both, and when the life went back.

    Args:
        told: what its ranks said, by time; each of them may tell the same.
        began: what it began from, and when.
        ended_ms: of its training; what was told later is passed over.
    """
    points: list[Point] = [began]
    returns: list[Return] = []
    for one in sorted(told, key=done_ms):
        at_ms = done_ms(one)
        if not began.at_ms <= at_ms <= ended_ms:
            continue
        if one.event == WENT_BACK:
            if (back := _return(one, points, returns)) is not None:
                returns.append(back)
                points = [past for past in points if past.step < back.step]
                points.append(Point(back.step, at_ms))
        elif (step := step_of(one, -1)) > points[-1].step:
            points.append(Point(step, at_ms))
    return tuple(points), tuple(returns)


def when_done(points: Sequence[Point], step: int) -> int:
    """Return when ``step`` was done: as told, or by interpolation between what was told."""
    nth = bisect_left(points, step, key=lambda one: one.step)
    if nth in (0, len(points)):
        return points[0 if nth == 0 else -1].at_ms
    later, earlier = points[nth], points[nth - 1]
    share = (step - earlier.step) / (later.step - earlier.step)
    return round(earlier.at_ms + (later.at_ms - earlier.at_ms) * share)


def done_ms(one: Record) -> int:
    """What follows a step begins when that is done."""
    return one.at_ms - (one.milliseconds("took_seconds") if one.event == "PhaseEnded" else 0)


def step_of(one: Record | None, default: int) -> int:
    """Return the step that a record is of."""
    if one is None:
        return default
    for name in ("global_step", "step"):
        step = one.number(name, -1)
        if step >= 0:
            return round(step)
    return default


def _return(one: Record, points: Sequence[Point], returns: Sequence[Return]) -> Return | None:
    """Return what a record says of a return; None if another rank said it, or it says nothing."""
    checkpoint = parse_checkpoint(one.text("checkpoint"))
    times = round(one.number("times"))
    if checkpoint is None or times in (past.times for past in returns):
        return None
    step = max(checkpoint.step, points[0].step)
    done = max(step, step_of(one, step + 1) - 1)
    # The steps up to the broken one were done by now.
    known = [past for past in points if past.step < done] + [Point(done, one.at_ms)]
    began_ms = when_done(known, step)
    return Return(began_ms, one.at_ms, step, done - step, one.text("reason"), one.host, times)
