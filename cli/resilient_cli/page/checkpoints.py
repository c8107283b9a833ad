"""Tree, sizes and table of the checkpoints in a repository.

The tree has a line for each attempt, shows its branch, and marks the checkpoint that a resume
takes. The sizes show how much each checkpoint shares with others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from resilient_cli.output import human_size
from resilient_cli.page.svg import WIDTH, Scale, opened
from resilient_cli.page.tables import at, legend, scroll, table, text
from resilient_cli.views.listing import closing, note
from resilient_cli.views.text import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.checkpoint.generations import Generation
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient_cli.survey import Survey, VerifyLevel
    from resilient_cli.views.listing import Listing

_LEFT, _RIGHT, _TOP, _LANE = 96, 40, 30, 58
_LIVES_MAX, _APART = 24, 44
Places = dict["CheckpointId", tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Horizontal axis of a picture: steps, or the time since the first attempt began.

    Attributes:
        name: Name of the picture.
        scale: Map from values to positions.
        checkpoints: Value of each checkpoint.
        lives: Value at which each attempt began, if known.
        is_time: True if values are milliseconds.
    """

    name: str
    scale: Scale
    checkpoints: Mapping[CheckpointId, float]
    lives: Mapping[int, float]
    is_time: bool = False


def tree(found: Listing) -> str:
    """Draw the checkpoints by step, each attempt in a separate row."""
    steps = {survey.checkpoint: float(survey.checkpoint.step) for survey in found.surveys}
    begun = {
        generation.number: float(generation.parent.step)
        for generation in found.generations
        if generation.parent
    }
    known = [*steps.values(), *begun.values()]
    if not known:
        return ""
    low = 0.0 if min(known) < max(known) / 2 else min(known)
    scale = Scale(low, max(known), _LEFT, WIDTH - _RIGHT)
    return _drawn(found, _Axis("tree of checkpoints by step", scale, steps, begun))


def generations(found: Listing) -> str:
    """Draw the checkpoints by time: the start of each attempt, and its saves."""
    lives = {
        generation.number: _moment_ms(generation.claimed_at) for generation in found.generations
    }
    saved = {
        survey.checkpoint: _moment_ms(survey.manifest.created_at)
        for survey in found.surveys
        if survey.manifest
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
    """Return the table of attempts."""
    steps: dict[int, list[CheckpointId]] = defaultdict(list)
    for survey in found.surveys:
        steps[survey.checkpoint.generation].append(survey.checkpoint)
    rows = [
        (
            str(generation.number),
            f'<span class="one-line">{generation.parent}</span>'
            if generation.parent
            else "scratch",
            text(generation.cause),
            text(generation.host),
            at(generation.claimed_at),
            count(len(steps[generation.number]), "checkpoint")
            if steps[generation.number]
            else "nothing",
        )
        for generation in reversed(found.generations)
    ]
    head = ("generation", "started from", "cause", "host", "claimed at", "holds now")
    return table(head, rows, numbers=(0,))


def _moment_ms(iso: str) -> float | None:
    try:
        return datetime.fromisoformat(iso).timestamp() * 1000
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _drawn(found: Listing, axis: _Axis) -> str:
    numbers = sorted(
        {generation.number for generation in found.generations}
        | {checkpoint.generation for checkpoint in axis.checkpoints}
    )[-_LIVES_MAX:]
    lanes = {number: _TOP + nth * _LANE for nth, number in enumerate(numbers)}
    below = _TOP + len(numbers) * _LANE - 14
    places: Places = {
        checkpoint_id: (axis.scale(at), lanes[checkpoint_id.generation])
        for checkpoint_id, at in axis.checkpoints.items()
        if checkpoint_id.generation in lanes
    }
    generation_of = {generation.number: generation for generation in found.generations}
    parts = [opened("tree", WIDTH, below + 22, axis.name)]
    for value in axis.scale.ticks():
        x, name = axis.scale(value), duration(value) if axis.is_time else f"{value:g}"
        parts.append(f'<path class="grid" d="M{x} 10V{below}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{below + 15}">{name}</text>')
    for number, y in lanes.items():
        parts += _lane(number, y, generation_of.get(number), axis, places)
    parts += _nodes(found, places)
    return "".join([*parts, "</svg>"])


def _lane(
    number: int, y: float, generation: Generation | None, axis: _Axis, places: Places
) -> Iterator[str]:
    """Yield the name of an attempt, the line through its checkpoints, and its branch."""
    cause = generation.cause if generation else ""
    yield f'<text class="name lane" x="{_LEFT - 22}" y="{y + 1}">generation {number}</text>'
    yield f'<text class="name" x="{_LEFT - 22}" y="{y + 14}">{text(cause[:14])}</text>'
    own = sorted(
        x for checkpoint_id, (x, _) in places.items() if checkpoint_id.generation == number
    )
    parent = places.get(generation.parent) if generation and generation.parent else None
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
    for survey in sorted(found.surveys, key=lambda survey: survey.checkpoint):
        if survey.checkpoint not in places:
            continue
        x, y = places[survey.checkpoint]
        yield f'<g class="n-{found.state(survey).lower()}"><title>{_title(found, survey)}</title>'
        if survey.checkpoint == found.resume:
            yield f'<circle class="next" cx="{x}" cy="{y}" r="11"/>'
        if survey.damaged:
            yield f'<path class="broken" d="M{x - 6} {y - 6}l12 12M{x + 6} {y - 6}l-12 12"/>'
        else:
            yield f'<circle class="node" cx="{x}" cy="{y}" r="6"/>'
        if x - named.get(y, -_APART) >= _APART:
            named[y] = x
            yield f'<text class="tick" x="{x}" y="{y + 23}">{survey.checkpoint.step}</text>'
        tags = ", ".join(found.tags_on(survey.checkpoint))
        if tags:
            shown = text(tags if len(tags) <= 18 else tags[:15] + "...")  # noqa: PLR2004 - room
            yield f'<text class="tick tag" x="{x}" y="{y - 14}">{shown}</text>'
        yield "</g>"


def _title(found: Listing, survey: Survey) -> str:
    size = human_size(survey.manifest.size_bytes) if survey.manifest else NONE
    next_one = ", a resume takes it" * (survey.checkpoint == found.resume)
    return f"{survey.checkpoint}: {found.state(survey)}, {size}{next_one}"


_SHOWN, _ROW = 30, 22
_SIZES_LEFT, _SIZES_RIGHT = 150, 230


def alone_bytes(found: Listing) -> dict[str, int]:
    """Return the bytes of each checkpoint that no other one needs, by folder."""
    users = Counter(
        survey.manifest.key(file.name)
        for survey in found.surveys
        if survey.manifest
        for file in survey.manifest.files
    )
    return {
        survey.checkpoint.folder: sum(
            file.size_bytes
            for file in survey.manifest.files
            if users[survey.manifest.key(file.name)] == 1
        )
        for survey in found.surveys
        if survey.manifest
    }


def sizes(found: Listing) -> str:
    """Return the stored size, the size without dedup, and a bar for each checkpoint."""
    manifests = [survey.manifest for survey in found.surveys if survey.manifest]
    if not manifests:
        return ""
    total_bytes = sum(manifest.size_bytes for manifest in manifests)
    tiles = (
        (human_size(found.size_bytes), "stored"),
        (human_size(total_bytes), "if each were whole"),
        (share(total_bytes - found.size_bytes, total_bytes), "saved by sharing"),
        (human_size(max(manifest.own_bytes for manifest in manifests)), "largest write"),
    )
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{of}</span></div>' for value, of in tiles
    )
    return f'<div class="tiles">{cells}</div>{_legend()}{_bars(manifests)}'


def _legend() -> str:
    return legend(("own", "written by it"), ("shared", "in files of older ones"))


def _bars(manifests: list[Manifest]) -> str:
    shown = manifests[:_SHOWN]
    scale = Scale(
        0, max(1, *(manifest.size_bytes for manifest in shown)), _SIZES_LEFT, WIDTH - _SIZES_RIGHT
    )
    height = len(shown) * _ROW + 6
    parts = [opened("sizes", WIDTH, height, "size of each checkpoint")]
    for nth, manifest in enumerate(shown):
        parts += _bar(manifest, nth * _ROW + 3, scale)
    left = len(manifests) - len(shown)
    more = f"<p>and {left} older ones</p>" if left else ""
    return scroll("".join([*parts, "</svg>"])) + more


def _bar(manifest: Manifest, y: int, scale: Scale) -> Iterator[str]:
    own, end = scale(manifest.own_bytes), scale(manifest.size_bytes)
    shared = manifest.size_bytes - manifest.own_bytes
    proportion = f"{human_size(manifest.own_bytes)} of {human_size(manifest.size_bytes)} its own"
    yield f"<g><title>{manifest.checkpoint}: {proportion}</title>"
    yield f'<text class="name" x="{_SIZES_LEFT - 8}" y="{y + 13}">{manifest.checkpoint}</text>'
    if manifest.own_bytes:
        width = max(1.0, round(own - _SIZES_LEFT, 1))
        yield f'<rect class="own" x="{_SIZES_LEFT}" y="{y}" width="{width}" height="16"/>'
    if shared:
        width = max(1.0, round(end - own, 1))
        yield f'<rect class="shared" x="{own}" y="{y}" width="{width}" height="16"/>'
    yield f'<text x="{end + 8}" y="{y + 13}">{proportion}</text></g>'


_LEGEND = legend(
    ("next", "a resume takes it"),
    ("node", "whole"),
    ("abandoned", "abandoned"),
    ("broken", "damaged"),
)


def stored_part(found: Listing, *, served: bool, checked: Mapping[str, str]) -> str:
    """Return the tree and the table of a repository, newest checkpoint first.

    Args:
        found: Contents of the repository.
        served: True if the page can request more parts.
        checked: Result of reading all bytes, by checkpoint.
    """
    head = ["there now", "saved at", "size", "own", "alone", "ranks", "state", "note"]
    head += ["look"] if served else ["every byte"] if checked else []
    alone = alone_bytes(found)
    rows = [_row(found, survey, alone, served=served, checked=checked) for survey in found.surveys]
    spots = [_LEGEND, scroll(tree(found))] if found.surveys else []
    return "".join(
        [
            f"<p>{text(closing(found))}</p>",
            *spots,
            table(head, rows, numbers=(2, 3, 4, 5)),
            "<p>Own is what it wrote itself; alone is what no other checkpoint needs.</p>",
        ]
    )


def lives_part(found: Listing) -> str:
    """Return the timeline and table of attempts, and the sizes of checkpoints."""
    times = generations(found)
    drawn = scroll(times) if times else ""
    return f"<h3>Generations</h3>{drawn}{lives_of(found)}<h3>Sizes</h3>{sizes(found)}"


def _row(
    found: Listing,
    survey: Survey,
    alone: Mapping[str, int],
    *,
    served: bool,
    checked: Mapping[str, str],
) -> tuple[str, ...]:
    about: tuple[str, ...] = (NONE, NONE, NONE, NONE, NONE)
    name = survey.checkpoint.folder
    if survey.manifest:
        about = (
            at(survey.manifest.created_at),
            human_size(survey.manifest.size_bytes),
            human_size(survey.manifest.own_bytes),
            human_size(alone[name]),
            text(survey.manifest.world.get("size", NONE)),
        )
    state = f'<span class="s-{survey.state.lower()}">{found.state(survey)}</span>'
    mark = ' <span class="badge">next</span>' if survey.checkpoint == found.resume else ""
    more = (_links(survey),) if served else (checked.get(name, NONE),) if checked else ()
    return (
        f'<span class="one-line">{name}{mark}</span>',
        *about,
        state,
        text(note(found, survey)),
        *more,
    )


def _links(survey: Survey) -> str:
    name = survey.checkpoint.folder
    if survey.manifest is None:
        return NONE
    return (
        f'<span class="links"><a href="#tensors/{name}">tensors</a> '
        f'<button data-verify="{name}" aria-label="verify {name}">verify</button></span>'
    )


def verified(survey: Survey, level: VerifyLevel) -> str:
    """Return the result of verifying a checkpoint."""
    name = survey.checkpoint.folder
    if not survey.findings and survey.manifest:
        files = count(len(survey.manifest.files), "file")
        size = human_size(survey.manifest.size_bytes)
        verdict = f"{name}: every byte of {files}, {size}, is what was written."
        return f'<p class="verdict v-same">{verdict}</p>'
    rows = [
        (
            f'<span class="s-{each.severity}">{each.severity}</span>',
            text(each.file),
            f"{each.start}-{each.stop}" if each.stop > each.start else NONE,
            text(each.tensor or NONE),
            text(each.problem),
            text(each.fix),
        )
        for each in survey.findings
    ]
    state = "DAMAGED" if survey.damaged else "a warning"
    head = ("severity", "file", "bytes", "tensor", "problem", "what helps")
    return f'<p class="verdict v-differ">{name}: {state} (level {level.value}).</p>' + table(
        head, rows, ()
    )
