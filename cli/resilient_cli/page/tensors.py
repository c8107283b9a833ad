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
from resilient_cli.page.svg import WIDTH, Scale, opening_tag
from resilient_cli.page.tables import Cell, Row, legend, path, scroll, searchable_table, short, text
from resilient_cli.views.diff import is_counter
from resilient_cli.views.text import NONE, count, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.diff.model import CheckpointView, Comparison, TensorChange
    from resilient.diff.tensor_stats import Histogram, HistogramBins
    from resilient.layouts.model import Tensor

    ProgressCallback = Callable[[int, int], None]

_WIDTH, _HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BELOW = 44, 20, 10, 24
_BARS_MIN, _BARS_MAX, _POWERS_MAX = 12, 64, 80
_SIDES = "ab"
_BAR_HEIGHT_MIN = 1.5


def histograms(all_plots: Sequence[Histogram], names: Sequence[str]) -> str:
    """Return the histograms and statistics of one tensor, or of a pair.

    Args:
        all_plots: Histogram of each tensor.
        names: Name of each checkpoint.
    """
    from resilient.diff.tensor_stats import alike

    # Use twice the cube root of the number of elements as bars: the rule of Rice, 1944.
    bin_count = round(2 * max(plot.seen for plot in all_plots) ** (1 / 3))
    bars = [plot.at_most(min(_BARS_MAX, max(_BARS_MIN, bin_count))) for plot in alike(all_plots)]
    widest = max((bar.exponent for bar in bars), default=0)
    bars = [bar.coarser(widest) for bar in bars]
    figures = [
        _figure(_values(bars), "Values", "by value"),
        _figure(_powers([dict(plot.powers) for plot in all_plots]), "Magnitude", _SIZES),
    ]
    marks = ""
    if len(all_plots) > 1:
        marks = legend(
            *((f"h-{side}", text(n)) for side, n in zip(_SIDES, names, strict=True)),
        )
    return f'{marks}<div class="pair">{"".join(figures)}</div>{_numbers(all_plots, names)}'


_SIZES = "by power of two, counts in powers of ten"


def _figure(picture: str, name: str, about: str) -> str:
    content = picture or "<p>No finite number.</p>"
    return f"<figure><figcaption><b>{name}</b> {about}</figcaption>{content}</figure>"


def _values(sides: Sequence[HistogramBins]) -> str:
    filled_sides = [bars for bars in sides if bars.counts]
    if not filled_sides:
        return ""
    low = min(bars.first for bars in filled_sides)
    high = max(bars.first + len(bars.counts) for bars in filled_sides)
    count_max = max(max(bars.counts) for bars in filled_sides)
    x_scale = Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    y_scale = Scale(0, count_max, _HEIGHT - _BELOW, _TOP)
    width = math.ldexp(1.0, filled_sides[0].exponent)
    parts = [
        opening_tag("small", _WIDTH, _HEIGHT, "histogram of values"),
        *_grid(y_scale, [(tick, f"{tick:.3g}") for tick in y_scale.ticks(3)]),
    ]
    edges = Scale(low * width, high * width, _LEFT, _WIDTH - _RIGHT)
    parts += (_tick(edges(tick), f"{tick:.4g}") for tick in edges.ticks(5))
    for side, bars in zip(_SIDES, sides, strict=False):
        counts = {bars.first + nth: (n, y_scale(n)) for nth, n in enumerate(bars.counts) if n}
        parts += _columns(side, counts, x_scale, lambda nth: f"from {nth * width:.6g}")
    return "".join([*parts, "</svg>"])


def _powers(sides: Sequence[Mapping[int, int]]) -> str:
    all_powers = [power for powers in sides for power in powers]
    if not all_powers:
        return ""
    high = max(all_powers) + 1
    low = max(min(all_powers), high - _POWERS_MAX)
    count_max = max(n for powers in sides for n in powers.values())
    top = max(1, math.ceil(math.log10(count_max)) if count_max > 1 else 1)
    x_scale = Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    y_scale = Scale(-0.3, top, _HEIGHT - _BELOW, _TOP)
    decades = range(0, top + 1, max(1, top // 4))
    parts = [
        opening_tag("small", _WIDTH, _HEIGHT, "histogram of sizes"),
        *_grid(y_scale, [(decade, _power_of_ten(decade)) for decade in decades]),
    ]
    integers = [tick for tick in x_scale.ticks(6) if tick == int(tick)]
    parts += (_tick(x_scale(tick), f"2^{int(tick)}") for tick in integers)
    for side, powers in zip(_SIDES, sides, strict=False):
        sums: dict[int, int] = {}
        for power, n in powers.items():
            sums[max(low, power)] = sums.get(max(low, power), 0) + n
        counts = {power: (n, y_scale(math.log10(n))) for power, n in sums.items()}
        parts += _columns(side, counts, x_scale, lambda nth: f"2^{nth} to 2^{nth + 1}")
    return "".join([*parts, "</svg>"])


def _power_of_ten(exponent: int) -> str:
    return f"{10**exponent:g}" if exponent < 4 else f"1e{exponent}"  # noqa: PLR2004 - as long as it is short


def _grid(y_scale: Scale, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    for value, name in ticks:
        y = y_scale(value)
        yield f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="name" x="{_LEFT - 6}" y="{y + 4}">{name}</text>'


def _tick(x: float, name: str) -> str:
    return f'<text class="tick" x="{x}" y="{_HEIGHT - 7}">{name}</text>'


def _columns(
    side: str,
    counts: Mapping[int, tuple[int, float]],
    x_scale: Scale,
    label_of: Callable[[int], str],
) -> Iterator[str]:
    """Yield one column for each cell; a minimum height keeps rare values visible."""
    floor = _HEIGHT - _BELOW
    yield f'<g class="h-{side}">'
    for nth, (n, y) in counts.items():
        x, width = x_scale(nth), max(1.0, round(x_scale(nth + 1) - x_scale(nth) - 1, 1))
        height = max(_BAR_HEIGHT_MIN, round(floor - y, 1))
        yield (
            f'<rect x="{x}" y="{round(floor - height, 1)}" width="{width}" height="{height}">'
            f"<title>{label_of(nth)}: {count(n, 'element')}</title></rect>"
        )
    yield "</g>"


def _numbers(plots: Sequence[Histogram], names: Sequence[str]) -> str:
    """Return the statistics, one column for each checkpoint."""
    rows = [
        ("range", [_range(plot) for plot in plots]),
        ("mean", [_number(plot.summary.mean) for plot in plots]),
        (
            "deviation",
            [_number(plot.summary.deviation) for plot in plots],
        ),
        ("norm", [_number(plot.summary.norm) for plot in plots]),
        (
            "zero",
            [_part(plot.summary.zeros, plot.seen) for plot in plots],
        ),
        ("NaN", [_count(plot.summary.nans) for plot in plots]),
        (
            "infinite",
            [_count(plot.summary.infinite) for plot in plots],
        ),
    ]
    amounts = [f"{plot.seen:,} of {plot.elements:,}" for plot in plots]
    rows.append(
        (
            "read",
            amounts if any(o.seen < o.elements for o in plots) else ["all"] * len(plots),
        )
    )
    if len(plots) == 1:
        pairs = "".join(f"<div><dt>{name}</dt><dd>{cells[0]}</dd></div>" for name, cells in rows)
        return f'<dl class="facts">{pairs}</dl>'
    head = "".join(f'<th scope="col" class="n">{text(side_name)}</th>' for side_name in names)
    body = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f'<td class="n">{cell}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    head = f"<thead><tr><td></td>{head}</tr></thead>"
    return f'<table class="numbers">{head}<tbody>{body}</tbody></table>'


def _range(tensor_histogram: Histogram) -> str:
    if tensor_histogram.summary.low is None:
        return NONE
    return f"{_number(tensor_histogram.summary.low)} to {_number(tensor_histogram.summary.high)}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.5g}"


def _part(part_count: int, of: int) -> str:
    return f"{part_count:,} ({share(part_count, of)})" if part_count else "none"


def _count(elements: int) -> str:
    return f'<strong class="bad">{elements:,}</strong>' if elements else "none"


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
        difference_norms: Squared norms of the differences.
        norm: Squared norms of the first checkpoint.
        broken: Parts in which the number of NaN or infinite values changed.
    """

    difference_norms: dict[str, float] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def add(self, change: TensorChange) -> None:
        """Add a measured tensor."""
        measures = change.measures
        if measures is None:
            return
        if measures.nans[0] != measures.nans[1] or measures.infinite[0] != measures.infinite[1]:
            self.broken.add(change.part)
        norm_before = measures.norms[0]
        difference_norm = (
            measures.relative * norm_before if measures.relative is not None else measures.norms[1]
        )
        with_squares = (self.difference_norms, difference_norm), (self.norm, norm_before)
        for sums, value in with_squares:
            sums[change.part] = sums.get(change.part, 0.0) + value * value

    def relative(self, part: str) -> float | None:
        """Return the relative difference: infinity from a zero norm, None without a measurement."""
        if part not in self.difference_norms:
            return None
        if not self.difference_norms[part]:
            return 0.0
        return (
            math.sqrt(self.difference_norms[part] / self.norm[part])
            if self.norm[part]
            else math.inf
        )


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or else its module."""
    part, _, path = name.partition("/")
    # The last word of an optimizer tensor names the kind of state of a parameter.
    path = path.rpartition(".")[0] or path if part == OPTIMIZER else path or name
    match = _LAYER.match(path)
    return match[1] if match else path.rpartition(".")[0] or path


def layers(changes: Sequence[TensorChange]) -> str:
    """Draw each layer in a row: a bar for its weights, and a bar for its optimizer state."""
    layer_by_name: dict[str, _Layer] = {}
    for change in sorted(changes, key=lambda change: natural(layer_of(change.name))):
        if change.part in _LAYER_PARTS and change.measures and not is_counter(change):
            layer_by_name.setdefault(layer_of(change.name), _Layer()).add(change)
    if not layer_by_name:
        return ""
    layers_shown = dict(list(layer_by_name.items())[:_SHOWN])
    ratios = [
        value
        for layer_shown in layers_shown.values()
        for part in _LAYER_PARTS
        if (value := layer_shown.relative(part))
    ]
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    high = math.ceil(math.log10(max(finite))) if finite else 0
    low = math.floor(math.log10(min(finite))) if finite else -1
    low = max(min(low, high - 1), high - _DECADES_MAX)
    left_margin = min(_LAYERS_LEFT, 24 + 7 * max(map(len, layers_shown)))
    scale = Scale(low, high, left_margin, WIDTH - _LAYERS_RIGHT)
    bottom_y = _LAYERS_TOP + len(layers_shown) * _ROW
    parts = [opening_tag("layers", WIDTH, bottom_y + 4, "relative change of each layer")]
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        x = scale(power)
        parts.append(f'<path class="grid" d="M{x} {_LAYERS_TOP - 4}V{bottom_y}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{_LAYERS_TOP - 10}">1e{power}</text>')
    for nth, (name, layer) in enumerate(layers_shown.items()):
        parts += _draw_layer(name, layer, scale, _LAYERS_TOP + nth * _ROW)
    hidden_count = len(layer_by_name) - len(layers_shown)
    hidden_note = f"<p>and {hidden_count} more layers</p>" if hidden_count else ""
    marks = legend(("p-model", "weights"), ("p-optimizer", "state of the optimizer"))
    return marks + scroll("".join([*parts, "</svg>"])) + hidden_note


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts h.2 before h.10."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def _draw_layer(name: str, layer: _Layer, scale: Scale, y: int) -> Iterator[str]:
    yield f"<g><title>{short(name)}</title>"
    label = name if len(name) <= _NAME_MAX else "..." + name[3 - _NAME_MAX :]
    yield f'<text class="name" x="{scale.first - 8}" y="{y + 14}">{short(label)}</text>'
    ends = []
    for nth, part in enumerate(_LAYER_PARTS):
        value = layer.relative(part)
        if value is None:
            continue
        power = math.log10(value) if value else scale.low
        end = scale(min(scale.high, max(scale.low, power)))
        width = max(2.0, round(end - scale.first, 1))
        broken_class = " broken" if part in layer.broken else ""
        if value or broken_class:
            tooltip = f"<title>{part}: {_change_text(value, broken_class)}</title>"
            place = f'x="{scale.first}" y="{y + 2 + nth * 9}" width="{width}" height="8"'
            yield f'<rect class="p-{part}{broken_class}" {place}>{tooltip}</rect>'
        ends.append((end, _change_text(value, broken_class)))
    tooltip = " / ".join(text for _, text in ends)
    bars_end = max((end for end, _ in ends), default=scale.first)
    yield f'<text x="{bars_end + 8}" y="{y + 14}">{tooltip}</text></g>'


def _change_text(value: float, wrong: str) -> str:
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
    sorted_tensors = sorted(side.tensors, key=lambda tensor: (tensor.part, natural(tensor.name)))
    rows = [_row(tensor, details or {}, load) for tensor in sorted_tensors[:_ROWS_MAX]]
    size = human_size(sum(tensor.size_bytes for tensor in side.tensors))
    elements = sum(tensor.elements for tensor in side.tensors)
    summary = (
        f"<p><strong>{text(side.name)}</strong>: {count(len(side.tensors), 'tensor')}, "
        f"{elements:,} elements, {size}.</p>"
    )
    head = ("tensor", "shape", "dtype", "elements", "size")
    hidden_count = len(side.tensors) - _ROWS_MAX
    hidden_note = (
        f"<p>and {hidden_count} more: resilient ckpt inspect REF --tensors</p>"
        if hidden_count > 0
        else ""
    )
    return (
        summary
        + searchable_table("tensor-list", head, rows, (3, 4), "tensors of the checkpoint")
        + hidden_note
    )


def name_of(tensor: Tensor) -> str:
    """Return the name of a tensor with its part, as ``ckpt cat`` takes it."""
    return f"{tensor.part}/{tensor.name}"


def _row(tensor: Tensor, details: Mapping[str, str], load: Callable[[str], str] | None) -> Row:
    name = name_of(tensor)
    cells = (
        path(name),
        "x".join(map(str, tensor.shape)) or "scalar",
        text(tensor.dtype),
        Cell(f"{tensor.elements:,}", float(tensor.elements)),
        Cell(human_size(tensor.size_bytes), float(tensor.size_bytes)),
    )
    address = load(name) if load and tensor.elements else ""
    return Row(cells, part=tensor.part, detail=details.get(name, ""), load=address)


PICTURES_MAX = 200
"""Maximum number of tensors with pictures in a page file: the first, or the most different."""
_BLOCKS_MAX = 8
_UNKNOWN = "<p>The numbers of this dtype are not known.</p>"


def picture_of(side: CheckpointView, name: str, progress: ProgressCallback) -> str:
    """Return the pictures of one tensor.

    Raises:
        KeyNotFound: The checkpoint has no such tensor.
        Unreadable: The tensor is damaged, or cannot be read by ranges.
        StoreError: The store could not be read.
    """
    tensor = next((candidate for candidate in side.tensors if name_of(candidate) == name), None)
    if tensor is None:
        raise _not_found_error(name)
    result = histogram(side, tensor, progress)
    return histograms([result], [side.name]) if result else _UNKNOWN


def pair_picture(
    before: CheckpointView, after: CheckpointView, name: str, progress: ProgressCallback
) -> str:
    """Return the pictures of a tensor of two checkpoints, on top of each other.

    Raises:
        KeyNotFound: One of the checkpoints has no such tensor.
        Unreadable: A tensor is damaged, or cannot be read by ranges.
        StoreError: The store could not be read.
    """
    pair = next((change for change in matched(before, after)[0] if change.name == name), None)
    if pair is None or pair.before is None or pair.after is None:
        raise _not_found_error(name)
    both_histograms = _pair_histograms(before, after, (pair.before, pair.after), progress)
    return histograms(both_histograms, [before.name, after.name]) if both_histograms else _UNKNOWN


def pictures_of(side: CheckpointView, progress: ProgressCallback) -> dict[str, str]:
    """Return the pictures of the first tensors of a checkpoint by name, from a sample of each."""
    pictures: dict[str, str] = {}
    candidates = [candidate for candidate in side.tensors if candidate.elements][:PICTURES_MAX]
    for nth, tensor in enumerate(candidates, 1):
        with suppress(Unreadable):
            tensor_histogram = histogram(side, tensor, blocks_max=_BLOCKS_MAX)
            pictures[name_of(tensor)] = (
                histograms([tensor_histogram], [side.name]) if tensor_histogram else _UNKNOWN
            )
        progress(nth, len(candidates))
    return pictures


def pair_pictures(comparison: Comparison, progress: ProgressCallback) -> dict[str, str]:
    """Return the pictures of the tensors that differ most by name, from a sample of each."""
    before, after = comparison.before, comparison.after
    pairs = {change.name: (change.before, change.after) for change in matched(before, after)[0]}
    measured_tensors = [
        tensor for tensor in comparison.tensors if tensor.measures and not is_counter(tensor)
    ]
    differing_names = [change.name for change in measured_tensors if not change.is_equal]
    names = [name for name in differing_names if name in pairs][:PICTURES_MAX]
    pictures: dict[str, str] = {}
    for nth, name in enumerate(names, 1):
        tensor_before, tensor_after = pairs[name]
        if tensor_before is not None and tensor_after is not None and tensor_before.elements:
            with suppress(Unreadable):
                both_histograms = _pair_histograms(
                    before, after, (tensor_before, tensor_after), lambda *_: None, _BLOCKS_MAX
                )
                names_of = [_side_label(before, "A"), _side_label(after, "B")]
                pictures[name] = (
                    histograms(both_histograms, names_of) if both_histograms else _UNKNOWN
                )
        progress(nth, len(names))
    return pictures


def _side_label(side: CheckpointView, letter: str) -> str:
    return f"{letter}: {side.name}"


def _pair_histograms(
    before: CheckpointView,
    after: CheckpointView,
    pair: tuple[Tensor, Tensor],
    progress: ProgressCallback,
    blocks_max: int | None = None,
) -> Sequence[Histogram]:
    options = {} if blocks_max is None else {"blocks_max": blocks_max}
    histogram_before = histogram(
        before, pair[0], lambda position, total: progress(position, 2 * total), **options
    )
    histogram_after = histogram(
        after, pair[1], lambda position, total: progress(total + position, 2 * total), **options
    )
    return [histogram_before, histogram_after] if histogram_before and histogram_after else []


def _not_found_error(name: str) -> KeyNotFound:
    return KeyNotFound(f"there is no tensor `{name[:200]}`", key=name)
