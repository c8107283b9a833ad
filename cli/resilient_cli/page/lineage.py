"""The tree of checkpoints: a line for each life, where it branched off, and what resume takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from resilient_cli.page.drawing import WIDTH, Scale, opened
from resilient_cli.page.tables import at, table, text
from resilient_cli.render import human_size
from resilient_cli.views.words import NONE, count, duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.format.names import CheckpointId
    from resilient.vault.registry.generations import Generation
    from resilient_cli.survey import Survey
    from resilient_cli.views.listing import Listing

_LEFT, _RIGHT, _TOP, _LANE = 96, 40, 30, 58
_LIVES_MAX, _APART = 24, 44
Places = dict["CheckpointId", tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """What lies along the picture: steps, or the time since the first life began.

    Attributes:
        name: of the picture.
        scale: from values to places.
        checkpoints: the value of each.
        lives: the value at which each began, where it has one.
        is_time: whether values are milliseconds.
    """

    name: str
    scale: Scale
    checkpoints: Mapping[CheckpointId, float]
    lives: Mapping[int, float]
    is_time: bool = False


def tree(found: Listing) -> str:
    """Return the picture of checkpoints by step, each life in a row of its own."""
    steps = {one.checkpoint: float(one.checkpoint.step) for one in found.surveys}
    begun = {one.number: float(one.parent.step) for one in found.generations if one.parent}
    known = [*steps.values(), *begun.values()]
    if not known:
        return ""
    low = 0.0 if min(known) < max(known) / 2 else min(known)
    scale = Scale(low, max(known), _LEFT, WIDTH - _RIGHT)
    return _drawn(found, _Axis("tree of checkpoints by step", scale, steps, begun))


def generations(found: Listing) -> str:
    """Return the picture of the same by time: when each life began, and what it saved when."""
    lives = {one.number: _moment_ms(one.claimed_at) for one in found.generations}
    saved = {
        one.checkpoint: _moment_ms(one.manifest.created_at) for one in found.surveys if one.manifest
    }
    began = {name: at for name, at in lives.items() if at is not None}
    times = {name: at for name, at in saved.items() if at is not None}
    known = [*began.values(), *times.values()]
    if not known or not began:
        return ""
    first = min(known)
    scale = Scale(0, max(1.0, max(known) - first), _LEFT, WIDTH - _RIGHT)
    axis = _Axis(
        "timeline of generations",
        scale,
        {name: at - first for name, at in times.items()},
        {name: at - first for name, at in began.items()},
        is_time=True,
    )
    return _drawn(found, axis)


def lives_of(found: Listing) -> str:
    """Return the table of lives."""
    steps: dict[int, list[CheckpointId]] = defaultdict(list)
    for survey in found.surveys:
        steps[survey.checkpoint.generation].append(survey.checkpoint)
    rows = [
        (
            str(one.number),
            f'<span class="one-line">{one.parent}</span>' if one.parent else "scratch",
            text(one.cause),
            text(one.host),
            at(one.claimed_at),
            count(len(steps[one.number]), "checkpoint") if steps[one.number] else "nothing",
        )
        for one in reversed(found.generations)
    ]
    head = ("life", "began from", "cause", "host", "claimed at", "holds now")
    return table(head, rows, numbers=(0,))


def _moment_ms(told: str) -> float | None:
    try:
        return datetime.fromisoformat(told).timestamp() * 1000
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _drawn(found: Listing, axis: _Axis) -> str:
    numbers = sorted(
        {one.number for one in found.generations} | {one.generation for one in axis.checkpoints}
    )[-_LIVES_MAX:]
    lanes = {number: _TOP + nth * _LANE for nth, number in enumerate(numbers)}
    below = _TOP + len(numbers) * _LANE - 14
    places: Places = {
        one: (axis.scale(at), lanes[one.generation])
        for one, at in axis.checkpoints.items()
        if one.generation in lanes
    }
    lives = {one.number: one for one in found.generations}
    parts = [opened("tree", WIDTH, below + 22, axis.name)]
    for value in axis.scale.ticks():
        x, name = axis.scale(value), duration(value) if axis.is_time else f"{value:g}"
        parts.append(f'<path class="grid" d="M{x} 10V{below}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{below + 15}">{name}</text>')
    for number, y in lanes.items():
        parts += _lane(number, y, lives.get(number), axis, places)
    parts += _nodes(found, places)
    return "".join([*parts, "</svg>"])


def _lane(
    number: int, y: float, life: Generation | None, axis: _Axis, places: Places
) -> Iterator[str]:
    """Yield a life's name, the line through what it saved, and the branch that it is."""
    cause = life.cause if life else ""
    yield f'<text class="name lane" x="{_LEFT - 22}" y="{y + 1}">life {number}</text>'
    yield f'<text class="name" x="{_LEFT - 22}" y="{y + 14}">{text(cause[:14])}</text>'
    own = sorted(x for one, (x, _) in places.items() if one.generation == number)
    parent = places.get(life.parent) if life and life.parent else None
    begun = axis.lives.get(number)
    start = axis.scale(begun) if begun is not None else None
    if start is None:
        start = parent[0] if parent else own[0] if own else _LEFT
    if own and own[-1] > min(own[0], start):
        yield f'<path class="line" d="M{min(own[0], start)} {y}H{own[-1]}"/>'
    if parent and parent[1] != y:
        x, above = parent
        bend = (above + y) / 2
        yield f'<path class="line branch" d="M{x} {above}C{x} {bend} {start} {bend} {start} {y}"/>'
    if not own or axis.is_time or parent:
        yield f'<path class="begun" d="M{start} {y - 6}v12"/>'


def _nodes(found: Listing, places: Places) -> Iterator[str]:
    named: dict[float, float] = {}
    for one in sorted(found.surveys, key=lambda one: one.checkpoint):
        if one.checkpoint not in places:
            continue
        x, y = places[one.checkpoint]
        yield f'<g class="n-{found.state(one).lower()}"><title>{_title(found, one)}</title>'
        if one.checkpoint == found.resume:
            yield f'<circle class="next" cx="{x}" cy="{y}" r="11"/>'
        if one.damaged:
            yield f'<path class="broken" d="M{x - 6} {y - 6}l12 12M{x + 6} {y - 6}l-12 12"/>'
        else:
            yield f'<circle class="node" cx="{x}" cy="{y}" r="6"/>'
        if x - named.get(y, -_APART) >= _APART:
            named[y] = x
            yield f'<text class="tick" x="{x}" y="{y + 23}">{one.checkpoint.step}</text>'
        tags = ", ".join(found.tags_on(one.checkpoint))
        if tags:
            shown = text(tags if len(tags) <= 18 else tags[:15] + "...")  # noqa: PLR2004 - room
            yield f'<text class="tick tag" x="{x}" y="{y - 14}">{shown}</text>'
        yield "</g>"


def _title(found: Listing, one: Survey) -> str:
    size = human_size(one.manifest.size_bytes) if one.manifest else NONE
    next_one = ", a resume takes it" * (one.checkpoint == found.resume)
    return f"{one.checkpoint}: {found.state(one)}, {size}{next_one}"
