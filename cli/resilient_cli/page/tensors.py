"""Table and plots of tensors: distributions of values, and changes of layers."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.diff.tensor_names import matched
from resilient.diff.tensor_stats import histogram
from resilient.errors import KeyNotFound
from resilient.layouts.model import MODEL, OPTIMIZER, Unreadable
from resilient_cli.output import human_size
from resilient_cli.page.svg import WIDTH, Scale, opened
from resilient_cli.page.tables import Cell, Row, legend, path, scroll, searched, short, text
from resilient_cli.views.diff import is_counter
from resilient_cli.views.text import NONE, count, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.diff.model import CheckpointView, Comparison, TensorChange
    from resilient.diff.tensor_stats import Histogram, HistogramBins
    from resilient.layouts.model import Tensor

    Told = Callable[[int, int], None]

_WIDTH, _HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BELOW = 44, 20, 10, 24
_BARS_MIN, _BARS_MAX, _POWERS_MAX = 12, 64, 80
_SIDES = "ab"
_LEAST = 1.5


def histograms(found: Sequence[Histogram], names: Sequence[str]) -> str:
    """Return the histograms and statistics of one tensor, or of a pair.

    Args:
        found: Histogram of each tensor.
        names: Name of each checkpoint.
    """
    from resilient.diff.tensor_stats import alike

    # Use twice the cube root of the number of elements as bars: the rule of Rice, 1944.
    room = round(2 * max(one.seen for one in found) ** (1 / 3))
    bars = [one.at_most(min(_BARS_MAX, max(_BARS_MIN, room))) for one in alike(found)]
    widest = max((one.exponent for one in bars), default=0)
    bars = [one.coarser(widest) for one in bars]
    figures = [
        _figure(_values(bars), "Values", "by value"),
        _figure(_powers([dict(one.powers) for one in found]), "Magnitude", _SIZES),
    ]
    marks = ""
    if len(found) > 1:
        marks = legend(
            *((f"h-{one}", text(n)) for one, n in zip(_SIDES, names, strict=True)),
        )
    return f'{marks}<div class="pair">{"".join(figures)}</div>{_numbers(found, names)}'


_SIZES = "by power of two, counts in powers of ten"


def _figure(drawn: str, name: str, about: str) -> str:
    shown = drawn or "<p>No finite number.</p>"
    return f"<figure><figcaption><b>{name}</b> {about}</figcaption>{shown}</figure>"


def _values(sides: Sequence[HistogramBins]) -> str:
    filled = [one for one in sides if one.counts]
    if not filled:
        return ""
    low = min(one.first for one in filled)
    high = max(one.first + len(one.counts) for one in filled)
    most = max(max(one.counts) for one in filled)
    across = Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    up = Scale(0, most, _HEIGHT - _BELOW, _TOP)
    width = math.ldexp(1.0, filled[0].exponent)
    parts = [
        opened("small", _WIDTH, _HEIGHT, "histogram of values"),
        *_grid(up, [(one, f"{one:.3g}") for one in up.ticks(3)]),
    ]
    edges = Scale(low * width, high * width, _LEFT, _WIDTH - _RIGHT)
    parts += (_tick(edges(one), f"{one:.4g}") for one in edges.ticks(5))
    for side, one in zip(_SIDES, sides, strict=False):
        counts = {one.first + nth: (n, up(n)) for nth, n in enumerate(one.counts) if n}
        parts += _columns(side, counts, across, lambda nth: f"from {nth * width:.6g}")
    return "".join([*parts, "</svg>"])


def _powers(sides: Sequence[Mapping[int, int]]) -> str:
    known = [power for one in sides for power in one]
    if not known:
        return ""
    high = max(known) + 1
    low = max(min(known), high - _POWERS_MAX)
    most = max(n for one in sides for n in one.values())
    top = max(1, math.ceil(math.log10(most)) if most > 1 else 1)
    across = Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    up = Scale(-0.3, top, _HEIGHT - _BELOW, _TOP)
    decades = range(0, top + 1, max(1, top // 4))
    parts = [
        opened("small", _WIDTH, _HEIGHT, "histogram of sizes"),
        *_grid(up, [(one, _power_of_ten(one)) for one in decades]),
    ]
    whole = [one for one in across.ticks(6) if one == int(one)]
    parts += (_tick(across(one), f"2^{int(one)}") for one in whole)
    for side, one in zip(_SIDES, sides, strict=False):
        folded: dict[int, int] = {}
        for power, n in one.items():
            folded[max(low, power)] = folded.get(max(low, power), 0) + n
        counts = {power: (n, up(math.log10(n))) for power, n in folded.items()}
        parts += _columns(side, counts, across, lambda nth: f"2^{nth} to 2^{nth + 1}")
    return "".join([*parts, "</svg>"])


def _power_of_ten(one: int) -> str:
    return f"{10**one:g}" if one < 4 else f"1e{one}"  # noqa: PLR2004 - as long as it is short


def _grid(up: Scale, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    for value, name in ticks:
        y = up(value)
        yield f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="name" x="{_LEFT - 6}" y="{y + 4}">{name}</text>'


def _tick(x: float, name: str) -> str:
    return f'<text class="tick" x="{x}" y="{_HEIGHT - 7}">{name}</text>'


def _columns(
    side: str,
    counts: Mapping[int, tuple[int, float]],
    across: Scale,
    named: Callable[[int], str],
) -> Iterator[str]:
    """Yield one column for each cell; a minimum height keeps rare values visible."""
    floor = _HEIGHT - _BELOW
    yield f'<g class="h-{side}">'
    for nth, (n, y) in counts.items():
        x, width = across(nth), max(1.0, round(across(nth + 1) - across(nth) - 1, 1))
        height = max(_LEAST, round(floor - y, 1))
        yield (
            f'<rect x="{x}" y="{round(floor - height, 1)}" width="{width}" height="{height}">'
            f"<title>{named(nth)}: {count(n, 'element')}</title></rect>"
        )
    yield "</g>"


def _numbers(found: Sequence[Histogram], names: Sequence[str]) -> str:
    """Return the statistics, one column for each checkpoint."""
    rows = [
        ("range", [_range(one) for one in found]),
        ("mean", [_number(one.summary.mean) for one in found]),
        ("deviation", [_number(one.summary.deviation) for one in found]),
        ("norm", [_number(one.summary.norm) for one in found]),
        ("zero", [_part(one.summary.zeros, one.seen) for one in found]),
        ("NaN", [_count(one.summary.nans) for one in found]),
        ("infinite", [_count(one.summary.infinite) for one in found]),
    ]
    looked = [f"{one.seen:,} of {one.elements:,}" for one in found]
    rows.append(
        ("looked at", looked if any(o.seen < o.elements for o in found) else ["all"] * len(found))
    )
    if len(found) == 1:
        pairs = "".join(f"<div><dt>{name}</dt><dd>{cells[0]}</dd></div>" for name, cells in rows)
        return f'<dl class="facts">{pairs}</dl>'
    head = "".join(f'<th scope="col" class="n">{text(one)}</th>' for one in names)
    body = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f'<td class="n">{one}</td>' for one in cells)
        + "</tr>"
        for name, cells in rows
    )
    head = f"<thead><tr><td></td>{head}</tr></thead>"
    return f'<table class="numbers">{head}<tbody>{body}</tbody></table>'


def _range(one: Histogram) -> str:
    if one.summary.low is None:
        return NONE
    return f"{_number(one.summary.low)} to {_number(one.summary.high)}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.5g}"


def _part(some: int, of: int) -> str:
    return f"{some:,} ({share(some, of)})" if some else "none"


def _count(some: int) -> str:
    return f'<strong class="bad">{some:,}</strong>' if some else "none"


_ROW, _LAYERS_LEFT, _LAYERS_RIGHT, _LAYERS_TOP = 26, 250, 120, 24
_SHOWN = 120
_DECADES_MAX = 12
_NAME_MAX = 38
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")
_LAYER_PARTS = (MODEL, OPTIMIZER)


@dataclass(slots=True)
class _Layer:
    """Sums over the tensors of a layer, by part.

    Attributes:
        apart: Squared norms of the differences.
        norm: Squared norms of the first checkpoint.
        broken: Parts in which the number of NaN or infinite values changed.
    """

    apart: dict[str, float] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def add(self, one: TensorChange) -> None:
        """Add a measured tensor."""
        found = one.measures
        if found is None:
            return
        if found.nans[0] != found.nans[1] or found.infinite[0] != found.infinite[1]:
            self.broken.add(one.part)
        first = found.norms[0]
        apart = found.relative * first if found.relative is not None else found.norms[1]
        with_squares = (self.apart, apart), (self.norm, first)
        for sums, value in with_squares:
            sums[one.part] = sums.get(one.part, 0.0) + value * value

    def relative(self, part: str) -> float | None:
        """Return the relative difference: infinity from a zero norm, None without a measurement."""
        if part not in self.apart:
            return None
        if not self.apart[part]:
            return 0.0
        return math.sqrt(self.apart[part] / self.norm[part]) if self.norm[part] else math.inf


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or else its module."""
    part, _, path = name.partition("/")
    # The last word of an optimizer tensor names the kind of state of a parameter.
    path = path.rpartition(".")[0] or path if part == OPTIMIZER else path or name
    found = _LAYER.match(path)
    return found[1] if found else path.rpartition(".")[0] or path


def layers(changes: Sequence[TensorChange]) -> str:
    """Draw each layer in a row: a bar for its weights, and one for its optimizer state."""
    found: dict[str, _Layer] = {}
    for one in sorted(changes, key=lambda one: natural(layer_of(one.name))):
        if one.part in _LAYER_PARTS and one.measures and not is_counter(one):
            found.setdefault(layer_of(one.name), _Layer()).add(one)
    if not found:
        return ""
    shown = dict(list(found.items())[:_SHOWN])
    known = [
        value for one in shown.values() for part in _LAYER_PARTS if (value := one.relative(part))
    ]
    finite = [one for one in known if math.isfinite(one)]
    high = math.ceil(math.log10(max(finite))) if finite else 0
    low = math.floor(math.log10(min(finite))) if finite else -1
    low = max(min(low, high - 1), high - _DECADES_MAX)
    left = min(_LAYERS_LEFT, 24 + 7 * max(map(len, shown)))
    scale = Scale(low, high, left, WIDTH - _LAYERS_RIGHT)
    below = _LAYERS_TOP + len(shown) * _ROW
    parts = [opened("layers", WIDTH, below + 4, "relative change of each layer")]
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        x = scale(power)
        parts.append(f'<path class="grid" d="M{x} {_LAYERS_TOP - 4}V{below}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{_LAYERS_TOP - 10}">1e{power}</text>')
    for nth, (name, layer) in enumerate(shown.items()):
        parts += _drawn(name, layer, scale, _LAYERS_TOP + nth * _ROW)
    rest = len(found) - len(shown)
    more = f"<p>and {rest} more layers</p>" if rest else ""
    marks = legend(("p-model", "weights"), ("p-optimizer", "state of the optimizer"))
    return marks + scroll("".join([*parts, "</svg>"])) + more


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts h.2 before h.10."""
    words = re.split(r"(\d+)", name)
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in words]


def _drawn(name: str, one: _Layer, scale: Scale, y: int) -> Iterator[str]:
    yield f"<g><title>{short(name)}</title>"
    shown = name if len(name) <= _NAME_MAX else "..." + name[3 - _NAME_MAX :]
    yield f'<text class="name" x="{scale.first - 8}" y="{y + 14}">{short(shown)}</text>'
    ends = []
    for nth, part in enumerate(_LAYER_PARTS):
        value = one.relative(part)
        if value is None:
            continue
        power = math.log10(value) if value else scale.low
        end = scale(min(scale.high, max(scale.low, power)))
        width = max(2.0, round(end - scale.first, 1))
        wrong = " broken" if part in one.broken else ""
        if value or wrong:
            told = f"<title>{part}: {_named(value, wrong)}</title>"
            place = f'x="{scale.first}" y="{y + 2 + nth * 9}" width="{width}" height="8"'
            yield f'<rect class="p-{part}{wrong}" {place}>{told}</rect>'
        ends.append((end, _named(value, wrong)))
    told = " / ".join(text for _, text in ends)
    last = max((end for end, _ in ends), default=scale.first)
    yield f'<text x="{last + 8}" y="{y + 14}">{told}</text></g>'


def _named(value: float, wrong: str) -> str:
    if wrong:
        return "NaN"
    if value == math.inf:
        return "from 0"
    return f"{value:.1e}" if value else "same"


_ROWS_MAX = 3000


def tensors(
    side: CheckpointView,
    details: Mapping[str, str] | None = None,
    load: Callable[[str], str] | None = None,
) -> str:
    """Return the table of the tensors of a checkpoint.

    Args:
        side: The checkpoint.
        details: Pictures of tensors by name, if they are already made.
        load: Function from a tensor's name to the address of its pictures, if made on demand.
    """
    inside = sorted(side.tensors, key=lambda one: (one.part, natural(one.name)))
    rows = [_row(one, details or {}, load) for one in inside[:_ROWS_MAX]]
    size = human_size(sum(one.size_bytes for one in side.tensors))
    elements = sum(one.elements for one in side.tensors)
    said = (
        f"<p><strong>{text(side.name)}</strong>: {count(len(side.tensors), 'tensor')}, "
        f"{elements:,} elements, {size}.</p>"
    )
    head = ("tensor", "shape", "dtype", "elements", "size")
    left = len(side.tensors) - _ROWS_MAX
    more = f"<p>and {left} more: resilient ckpt inspect REF --tensors</p>" if left > 0 else ""
    return said + searched("tensor-list", head, rows, (3, 4), "tensors of the checkpoint") + more


def name_of(one: Tensor) -> str:
    """Return the name of a tensor with its part, as ``ckpt cat`` takes it."""
    return f"{one.part}/{one.name}"


def _row(one: Tensor, details: Mapping[str, str], load: Callable[[str], str] | None) -> Row:
    name = name_of(one)
    cells = (
        path(name),
        "x".join(map(str, one.shape)) or "scalar",
        text(one.dtype),
        Cell(f"{one.elements:,}", float(one.elements)),
        Cell(human_size(one.size_bytes), float(one.size_bytes)),
    )
    address = load(name) if load and one.elements else ""
    return Row(cells, part=one.part, detail=details.get(name, ""), load=address)


PICTURES_MAX = 200
"""Maximum number of tensors with pictures in a page file: the first, or the most different."""
_BLOCKS_MAX = 8
_UNKNOWN = "<p>The numbers of this dtype are not known.</p>"


def picture_of(side: CheckpointView, name: str, told: Told) -> str:
    """Return the pictures of one tensor.

    Raises:
        KeyNotFound: The checkpoint has no such tensor.
        Unreadable: The tensor is damaged, or cannot be read by ranges.
        StoreError: The store could not be read.
    """
    tensor = next((one for one in side.tensors if name_of(one) == name), None)
    if tensor is None:
        raise _no_such(name)
    found = histogram(side, tensor, told)
    return histograms([found], [side.name]) if found else _UNKNOWN


def picture_of_both(before: CheckpointView, after: CheckpointView, name: str, told: Told) -> str:
    """Return the pictures of a tensor of two checkpoints, on top of each other.

    Raises:
        KeyNotFound: One of the checkpoints has no such tensor.
        Unreadable: A tensor is damaged, or cannot be read by ranges.
        StoreError: The store could not be read.
    """
    pair = next((one for one in matched(before, after)[0] if one.name == name), None)
    if pair is None or pair.before is None or pair.after is None:
        raise _no_such(name)
    found = _of_both(before, after, (pair.before, pair.after), told)
    return histograms(found, [before.name, after.name]) if found else _UNKNOWN


def pictures_of(side: CheckpointView, told: Told) -> dict[str, str]:
    """Return the pictures of the first tensors of a checkpoint by name, from a sample of each."""
    found: dict[str, str] = {}
    wanted = [one for one in side.tensors if one.elements][:PICTURES_MAX]
    for nth, tensor in enumerate(wanted, 1):
        with suppress(Unreadable):
            spread = histogram(side, tensor, blocks_max=_BLOCKS_MAX)
            found[name_of(tensor)] = histograms([spread], [side.name]) if spread else _UNKNOWN
        told(nth, len(wanted))
    return found


def pictures_of_both(found: Comparison, told: Told) -> dict[str, str]:
    """Return the pictures of the tensors that differ most by name, from a sample of each."""
    before, after = found.before, found.after
    pairs = {one.name: (one.before, one.after) for one in matched(before, after)[0]}
    told_apart = [one for one in found.tensors if one.measures and not is_counter(one)]
    differ = [one.name for one in told_apart if not one.is_equal]
    names = [name for name in differ if name in pairs][:PICTURES_MAX]
    drawn: dict[str, str] = {}
    for nth, name in enumerate(names, 1):
        one, other = pairs[name]
        if one is not None and other is not None and one.elements:
            with suppress(Unreadable):
                spread = _of_both(before, after, (one, other), lambda *_: None, _BLOCKS_MAX)
                names_of = [_called(before, "A"), _called(after, "B")]
                drawn[name] = histograms(spread, names_of) if spread else _UNKNOWN
        told(nth, len(names))
    return drawn


def _called(side: CheckpointView, letter: str) -> str:
    return f"{letter}: {side.name}"


def _of_both(
    before: CheckpointView,
    after: CheckpointView,
    pair: tuple[Tensor, Tensor],
    told: Told,
    blocks_max: int | None = None,
) -> Sequence[Histogram]:
    options = {} if blocks_max is None else {"blocks_max": blocks_max}
    one = histogram(before, pair[0], lambda done, of: told(done, 2 * of), **options)
    other = histogram(after, pair[1], lambda done, of: told(of + done, 2 * of), **options)
    return [one, other] if one and other else []


def _no_such(name: str) -> KeyNotFound:
    return KeyNotFound(f"there is no tensor `{name[:200]}`", key=name)
