"""Tree, sizes and table of the checkpoints in a repository.

The tree has a line for each attempt, which begins at the parent checkpoint of the attempt. The tree
marks the checkpoint from which a resume starts. The sizes show the bytes that each checkpoint
shares with other checkpoints.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from resilient_cli.output import human_size
from resilient_cli.page.svg import WIDTH, Scale, opening_tag
from resilient_cli.page.tables import at, legend, scroll, table, text
from resilient_cli.views.listing import note, summary_line
from resilient_cli.views.text import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.checkpoint.generations import Generation
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient_cli.survey import Survey, VerifyLevel
    from resilient_cli.views.listing import Listing

_LEFT, _RIGHT, _TOP, _LANE = 96, 40, 30, 58
_LIVES_MAX, _LABEL_GAP = 24, 44
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


def tree(contents: Listing) -> str:
    """Draw the checkpoints by step, each attempt in a separate row."""
    steps = {survey.checkpoint: float(survey.checkpoint.step) for survey in contents.surveys}
    parent_steps = {
        generation.number: float(generation.parent.step)
        for generation in contents.generations
        if generation.parent
    }
    positions = [*steps.values(), *parent_steps.values()]
    if not positions:
        return ""
    low = 0.0 if min(positions) < max(positions) / 2 else min(positions)
    scale = Scale(low, max(positions), _LEFT, WIDTH - _RIGHT)
    return _draw(contents, _Axis("tree of checkpoints by step", scale, steps, parent_steps))


def generations(contents: Listing) -> str:
    """Draw the checkpoints by time: the start of each attempt, and its saves."""
    claim_times = {
        generation.number: _moment_ms(generation.claimed_at) for generation in contents.generations
    }
    save_times = {
        survey.checkpoint: _moment_ms(survey.manifest.created_at)
        for survey in contents.surveys
        if survey.manifest
    }
    claim_time_by_name = {name: at for name, at in claim_times.items() if at is not None}
    times = {name: at for name, at in save_times.items() if at is not None}
    moments = [*claim_time_by_name.values(), *times.values()]
    if not moments or not claim_time_by_name:
        return ""
    first = min(moments)
    scale = Scale(0, max(1.0, max(moments) - first), _LEFT, WIDTH - _RIGHT)
    axis = _Axis(
        "timeline of generations",
        scale,
        {name: at - first for name, at in times.items()},
        {name: at - first for name, at in claim_time_by_name.items()},
        is_time=True,
    )
    return _draw(contents, axis)


def attempts_table(contents: Listing) -> str:
    """Return the table of attempts."""
    steps: dict[int, list[CheckpointId]] = defaultdict(list)
    for survey in contents.surveys:
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
        for generation in reversed(contents.generations)
    ]
    head = ("generation", "started from", "cause", "host", "claimed at", "holds now")
    return table(head, rows, numbers=(0,))


def _moment_ms(iso: str) -> float | None:
    try:
        return datetime.fromisoformat(iso).timestamp() * 1000
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _draw(contents: Listing, axis: _Axis) -> str:
    numbers = sorted(
        {generation.number for generation in contents.generations}
        | {checkpoint.generation for checkpoint in axis.checkpoints}
    )[-_LIVES_MAX:]
    lanes = {number: _TOP + nth * _LANE for nth, number in enumerate(numbers)}
    axis_y = _TOP + len(numbers) * _LANE - 14
    places: Places = {
        checkpoint_id: (axis.scale(at), lanes[checkpoint_id.generation])
        for checkpoint_id, at in axis.checkpoints.items()
        if checkpoint_id.generation in lanes
    }
    generation_of = {generation.number: generation for generation in contents.generations}
    parts = [opening_tag("tree", WIDTH, axis_y + 22, axis.name)]
    for value in axis.scale.ticks():
        x, name = axis.scale(value), duration(value) if axis.is_time else f"{value:g}"
        parts.append(f'<path class="grid" d="M{x} 10V{axis_y}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{axis_y + 15}">{name}</text>')
    for number, y in lanes.items():
        parts += _lane(number, y, generation_of.get(number), axis, places)
    parts += _nodes(contents, places)
    return "".join([*parts, "</svg>"])


def _lane(
    number: int, y: float, generation: Generation | None, axis: _Axis, places: Places
) -> Iterator[str]:
    """Yield the name of an attempt, the line through its checkpoints, and its branch."""
    cause = generation.cause if generation else ""
    yield f'<text class="name lane" x="{_LEFT - 22}" y="{y + 1}">generation {number}</text>'
    yield f'<text class="name" x="{_LEFT - 22}" y="{y + 14}">{text(cause[:14])}</text>'
    positions = sorted(
        x for checkpoint_id, (x, _) in places.items() if checkpoint_id.generation == number
    )
    parent = places.get(generation.parent) if generation and generation.parent else None
    start_value = axis.lives.get(number)
    start = axis.scale(start_value) if start_value is not None else None
    if start is None:
        start = parent[0] if parent else positions[0] if positions else _LEFT
    if positions and positions[-1] > min(positions[0], start):
        yield f'<path class="line" d="M{min(positions[0], start)} {y}H{positions[-1]}"/>'
    if parent and parent[1] != y:
        x, parent_y = parent
        bend = (parent_y + y) / 2
        yield (
            f'<path class="line branch" d="M{x} {parent_y}C{x} {bend} {start} {bend} {start} {y}"/>'
        )
    if not positions or axis.is_time or parent:
        yield f'<path class="begun" d="M{start} {y - 6}v12"/>'


def _nodes(contents: Listing, places: Places) -> Iterator[str]:
    label_ends: dict[float, float] = {}
    for survey in sorted(contents.surveys, key=lambda survey: survey.checkpoint):
        if survey.checkpoint not in places:
            continue
        x, y = places[survey.checkpoint]
        state = contents.state(survey).lower()
        yield f'<g class="n-{state}"><title>{_title(contents, survey)}</title>'
        if survey.checkpoint == contents.resume:
            yield f'<circle class="next" cx="{x}" cy="{y}" r="11"/>'
        if survey.damaged:
            yield f'<path class="broken" d="M{x - 6} {y - 6}l12 12M{x + 6} {y - 6}l-12 12"/>'
        else:
            yield f'<circle class="node" cx="{x}" cy="{y}" r="6"/>'
        if x - label_ends.get(y, -_LABEL_GAP) >= _LABEL_GAP:
            label_ends[y] = x
            yield f'<text class="tick" x="{x}" y="{y + 23}">{survey.checkpoint.step}</text>'
        tags = ", ".join(contents.tags_on(survey.checkpoint))
        if tags:
            label = text(tags if len(tags) <= 18 else tags[:15] + "...")  # noqa: PLR2004 - room
            yield f'<text class="tick tag" x="{x}" y="{y - 14}">{label}</text>'
        yield "</g>"


def _title(contents: Listing, survey: Survey) -> str:
    size = human_size(survey.manifest.size_bytes) if survey.manifest else NONE
    next_one = ", a resume takes it" * (survey.checkpoint == contents.resume)
    return f"{survey.checkpoint}: {contents.state(survey)}, {size}{next_one}"


_SHOWN, _ROW = 30, 22
_SIZES_LEFT, _SIZES_RIGHT = 150, 230


def alone_bytes(contents: Listing) -> dict[str, int]:
    """Return the bytes of each checkpoint that no other checkpoint needs, by folder."""
    users = Counter(
        survey.manifest.key(file.name)
        for survey in contents.surveys
        if survey.manifest
        for file in survey.manifest.files
    )
    return {
        survey.checkpoint.folder: sum(
            file.size_bytes
            for file in survey.manifest.files
            if users[survey.manifest.key(file.name)] == 1
        )
        for survey in contents.surveys
        if survey.manifest
    }


def sizes(contents: Listing) -> str:
    """Return the stored size, the size without dedup, and a bar for each checkpoint."""
    manifests = [survey.manifest for survey in contents.surveys if survey.manifest]
    if not manifests:
        return ""
    total_bytes = sum(manifest.size_bytes for manifest in manifests)
    tiles = (
        (human_size(contents.size_bytes), "stored"),
        (human_size(total_bytes), "if each were whole"),
        (share(total_bytes - contents.size_bytes, total_bytes), "saved by sharing"),
        (human_size(max(manifest.own_bytes for manifest in manifests)), "largest write"),
    )
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{unit}</span></div>' for value, unit in tiles
    )
    return f'<div class="tiles">{cells}</div>{_legend()}{_bars(manifests)}'


def _legend() -> str:
    return legend(("own", "written by it"), ("shared", "in files of older checkpoints"))


def _bars(manifests: list[Manifest]) -> str:
    manifests_shown = manifests[:_SHOWN]
    scale = Scale(
        0,
        max(1, *(manifest.size_bytes for manifest in manifests_shown)),
        _SIZES_LEFT,
        WIDTH - _SIZES_RIGHT,
    )
    height = len(manifests_shown) * _ROW + 6
    parts = [opening_tag("sizes", WIDTH, height, "size of each checkpoint")]
    for nth, manifest in enumerate(manifests_shown):
        parts += _bar(manifest, nth * _ROW + 3, scale)
    hidden_count = len(manifests) - len(manifests_shown)
    hidden_note = f"<p>and {hidden_count} older checkpoints</p>" if hidden_count else ""
    return scroll("".join([*parts, "</svg>"])) + hidden_note


def _bar(manifest: Manifest, y: int, scale: Scale) -> Iterator[str]:
    own_width, end = scale(manifest.own_bytes), scale(manifest.size_bytes)
    shared_bytes = manifest.size_bytes - manifest.own_bytes
    proportion = f"{human_size(manifest.own_bytes)} of {human_size(manifest.size_bytes)} its own"
    yield f"<g><title>{manifest.checkpoint}: {proportion}</title>"
    yield f'<text class="name" x="{_SIZES_LEFT - 8}" y="{y + 13}">{manifest.checkpoint}</text>'
    if manifest.own_bytes:
        width = max(1.0, round(own_width - _SIZES_LEFT, 1))
        yield f'<rect class="own" x="{_SIZES_LEFT}" y="{y}" width="{width}" height="16"/>'
    if shared_bytes:
        width = max(1.0, round(end - own_width, 1))
        yield f'<rect class="shared" x="{own_width}" y="{y}" width="{width}" height="16"/>'
    yield f'<text x="{end + 8}" y="{y + 13}">{proportion}</text></g>'


_LEGEND = legend(
    ("next", "a resume takes it"),
    ("node", "whole"),
    ("abandoned", "abandoned"),
    ("broken", "damaged"),
)


def repository_part(contents: Listing, *, is_served: bool, verdicts: Mapping[str, str]) -> str:
    """Return the tree and the table of a repository, newest checkpoint first.

    Args:
        contents: Contents of the repository.
        is_served: True if the page can request more parts.
        verdicts: Result of reading all bytes, by checkpoint.
    """
    head = ["there now", "saved at", "size", "own", "alone", "ranks", "state", "note"]
    head += ["look"] if is_served else ["every byte"] if verdicts else []
    unshared_bytes = alone_bytes(contents)
    rows = [
        _row(contents, survey, unshared_bytes, is_served=is_served, verdicts=verdicts)
        for survey in contents.surveys
    ]
    spots = [_LEGEND, scroll(tree(contents))] if contents.surveys else []
    return "".join(
        [
            f"<p>{text(summary_line(contents))}</p>",
            *spots,
            table(head, rows, numbers=(2, 3, 4, 5)),
            "<p>Own is what it wrote itself; alone is what no other checkpoint needs.</p>",
        ]
    )


def attempts_part(contents: Listing) -> str:
    """Return the timeline and table of attempts, and the sizes of checkpoints."""
    times = generations(contents)
    picture = scroll(times) if times else ""
    return f"<h3>Generations</h3>{picture}{attempts_table(contents)}<h3>Sizes</h3>{sizes(contents)}"


def _row(
    contents: Listing,
    survey: Survey,
    alone: Mapping[str, int],
    *,
    is_served: bool,
    verdicts: Mapping[str, str],
) -> tuple[str, ...]:
    manifest_cells: tuple[str, ...] = (NONE, NONE, NONE, NONE, NONE)
    name = survey.checkpoint.folder
    if survey.manifest:
        manifest_cells = (
            at(survey.manifest.created_at),
            human_size(survey.manifest.size_bytes),
            human_size(survey.manifest.own_bytes),
            human_size(alone[name]),
            text(survey.manifest.world.get("size", NONE)),
        )
    state = f'<span class="s-{survey.state.lower()}">{contents.state(survey)}</span>'
    mark = ' <span class="badge">next</span>' if survey.checkpoint == contents.resume else ""
    extra_cells = (
        (_links(survey),) if is_served else (verdicts.get(name, NONE),) if verdicts else ()
    )
    return (
        f'<span class="one-line">{name}{mark}</span>',
        *manifest_cells,
        state,
        text(note(contents, survey)),
        *extra_cells,
    )


def _links(survey: Survey) -> str:
    name = survey.checkpoint.folder
    if survey.manifest is None:
        return NONE
    return (
        f'<span class="links"><a href="#tensors/{name}">tensors</a> '
        f'<button data-verify="{name}" aria-label="verify {name}">verify</button></span>'
    )


def verification_html(survey: Survey, level: VerifyLevel) -> str:
    """Return the result of verifying a checkpoint."""
    name = survey.checkpoint.folder
    if not survey.findings and survey.manifest:
        files = count(len(survey.manifest.files), "file")
        size = human_size(survey.manifest.size_bytes)
        verdict = f"{name}: every byte of {files}, {size}, is what was written."
        return f'<p class="verdict v-same">{verdict}</p>'
    rows = [
        (
            f'<span class="s-{finding.severity}">{finding.severity}</span>',
            text(finding.file),
            f"{finding.start}-{finding.stop}" if finding.stop > finding.start else NONE,
            text(finding.tensor or NONE),
            text(finding.problem),
            text(finding.fix),
        )
        for finding in survey.findings
    ]
    state = "DAMAGED" if survey.damaged else "a warning"
    head = ("severity", "file", "bytes", "tensor", "problem", "what helps")
    return f'<p class="verdict v-differ">{name}: {state} (level {level.value}).</p>' + table(
        head, rows, ()
    )
