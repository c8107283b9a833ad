"""SVG pictures of a run: the timeline of its attempts, and its loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from resilient_cli.page.tables import text
from resilient_cli.views.text import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from resilient.goodput.report import GoodputReport, LoggedLoss
    from resilient.goodput.timeline import TimelineInterval

WIDTH = 1000
_LEFT, _ROW, _BINS = 72, 18, 900
_LIVES_MAX, _POINTS_MAX = 40, 1500
_HEIGHT = 260


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from values to positions in a picture."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        part = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.first + part * (self.last - self.first), 1)

    def ticks(self, tick_count: int = 6) -> list[float]:
        """Return round values within the range."""
        if self.high <= self.low:
            return [self.low]
        step_min = (self.high - self.low) / tick_count
        power = 10.0 ** math.floor(math.log10(step_min))
        step = power * next((factor for factor in (1, 2, 5) if factor * power >= step_min), 10)
        nth = math.ceil(self.low / step)
        return [multiple * step for multiple in range(nth, math.floor(self.high / step) + 1)]


def opening_tag(kind: str, width: int, height: float, about: str) -> str:
    """Return the opening tag of a picture; ``about`` is the label for screen readers."""
    view = f'viewBox="0 0 {width} {height}"'
    return f'<svg class="{kind}" {view} role="img" aria-label="{about}">'


def timeline(goodput: GoodputReport) -> str:
    """Draw the timeline: a row for the run, and a row for each of the last 40 attempts."""
    attempts = [attempt.life.number for attempt in goodput.doings][-_LIVES_MAX:]
    scale = Scale(0, max(1, goodput.wall_ms), _LEFT, WIDTH - 8)
    axis_y = (len(attempts) + 1) * (_ROW + 4) + 14
    parts = [opening_tag("lives", WIDTH, axis_y + 20, "timeline of attempts")]
    parts += _axis(scale, axis_y)
    rows: list[tuple[str, Sequence[TimelineInterval]]] = [("run", goodput.intervals)]
    rows += [
        (
            f"attempt {attempt}",
            [interval for interval in goodput.intervals if interval.life == attempt],
        )
        for attempt in attempts
    ]
    for nth, (name, intervals) in enumerate(rows):
        y = nth * (_ROW + 4) + 14
        parts.append(f'<text class="name" x="{_LEFT - 6}" y="{y + 13}">{name}</text>')
        parts += _bars(intervals, goodput, scale, y)
    for save in goodput.saved:
        x, title = scale(save.at_ms - goodput.began_ms), text(save.checkpoint)
        parts.append(f'<path class="saved" d="M{x} 14v5"><title>{title}</title></path>')
    for fault in goodput.faults:
        x, title = scale(fault.at_ms - goodput.began_ms), text(f"{fault.cause}: {fault.detail}")
        parts.append(
            f'<path class="fault" d="M{x} 13l-5 -9h10z"><title>{title}</title></path>'
            f'<path class="strike" d="M{x} 13V{axis_y}"/>'
        )
    return "".join([*parts, "</svg>"])


def curve(goodput: GoodputReport) -> str:
    """Draw the loss by step: one line for each attempt, grey where steps were lost."""
    losses = [loss for loss in goodput.losses if math.isfinite(loss.value)]
    if not losses:
        return "<p>No loss was logged.</p>"
    steps, values = [loss.step for loss in losses], [loss.value for loss in losses]
    x_scale = Scale(min(steps), max(steps), _LEFT, WIDTH - 8)
    y_scale = Scale(min(values), max(values), _HEIGHT - 24, 10)
    parts = [opening_tag("loss", WIDTH, _HEIGHT, "loss by step")]
    for value in y_scale.ticks(5):
        y = y_scale(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{WIDTH - 8}"/>')
        parts.append(f'<text class="name" x="{_LEFT - 6}" y="{y + 4}">{value:.4g}</text>')
    for step in x_scale.ticks():
        if step != int(step):
            continue
        x = x_scale(step)
        parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 6}">{step:g}</text>')
    # Draw lost steps first, below the steps that are part of the result.
    for is_lost in (True, False):
        for attempt, attempt_losses in groupby(losses, key=lambda loss: loss.life):
            parts.append(_line(list(attempt_losses), attempt, x_scale, y_scale, is_lost=is_lost))
    return "".join([*parts, "</svg>"])


def _axis(scale: Scale, below: float) -> Iterator[str]:
    for at_ms in scale.ticks():
        x = scale(at_ms)
        yield f'<path class="grid" d="M{x} 14V{below}"/>'
        yield f'<text class="tick" x="{x}" y="{below + 14}">{duration(at_ms)}</text>'


def _bars(
    intervals: Iterable[TimelineInterval], goodput: GoodputReport, scale: Scale, y: float
) -> Iterator[str]:
    """Yield at most 900 bars: each bin of time shows its longest class."""
    bin_ms = max(1.0, goodput.wall_ms / _BINS)
    bins: dict[int, dict[str, float]] = {}
    for interval in intervals:
        begin_ms, end_ms = (
            interval.began_ms - goodput.began_ms,
            interval.ended_ms - goodput.began_ms,
        )
        for nth in range(int(begin_ms // bin_ms), min(_BINS, math.ceil(end_ms / bin_ms))):
            overlap_ms = min(end_ms, (nth + 1) * bin_ms) - max(begin_ms, nth * bin_ms)
            share_by_class = bins.setdefault(nth, {})
            share_by_class[interval.spent.value] = (
                share_by_class.get(interval.spent.value, 0.0) + overlap_ms
            )
    kinds = (
        (nth, max(share_by_class, key=lambda name: share_by_class[name]))
        for nth, share_by_class in sorted(bins.items())
    )
    for (kind, _), group in groupby(
        enumerate(kinds), key=lambda item: (item[1][1], item[1][0] - item[0])
    ):
        places = [nth for _, (nth, _) in group]
        left_x, right_x = scale(places[0] * bin_ms), scale((places[-1] + 1) * bin_ms)
        width = round(max(0.8, right_x - left_x), 1)
        yield (
            f'<rect class="c-{kind}" x="{left_x}" y="{y}" width="{width}" height="{_ROW}">'
            f"<title>{kind} {duration(len(places) * bin_ms)}</title></rect>"
        )


def _line(
    losses: Sequence[LoggedLoss], attempt: int, x_scale: Scale, y_scale: Scale, *, is_lost: bool
) -> str:
    """Return the lost or the kept part of an attempt's line; both share one point."""
    edge = next((nth for nth, loss in enumerate(losses) if loss.is_lost), len(losses))
    part = losses[max(0, edge - 1) :] if is_lost else losses[:edge]
    if not part or (is_lost and edge == len(losses)):
        return ""
    stride = max(1, len(part) // _POINTS_MAX)
    points_shown = [*part[::stride], part[-1]]
    points = " ".join(f"{x_scale(loss.step)},{y_scale(loss.value)}" for loss in points_shown)
    name = "gone" if is_lost else f"kept k{attempt % 2}"
    # A single point gets a thicker line, because the point would be hardly visible.
    name += " one" * (len(part) == 1)
    last_point = part[-1]
    title = (
        f"attempt {attempt}: step {last_point.step}, loss {last_point.value:.4g}"
        + " (rolled back)" * is_lost
    )
    return f'<polyline class="{name}" points="{points}"><title>{title}</title></polyline>'
