"""Pictures of how the numbers of tensors are spread, of one or of two over each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resilient_cli.page.drawing import Scale, opened
from resilient_cli.page.tables import legend, text
from resilient_cli.views.words import NONE, count, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.comparison.histograms import Bars, Histogram

_WIDTH, _HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BELOW = 44, 20, 10, 24
_BARS_MIN, _BARS_MAX, _POWERS_MAX = 12, 64, 80
_SIDES = "ab"
_LEAST = 1.5


def histograms(found: Sequence[Histogram], names: Sequence[str]) -> str:
    """Return the pictures and the numbers of one tensor, or of two that belong together.

    Args:
        found: how they are spread.
        names: what each is called: the checkpoints.
    """
    from resilient.comparison.histograms import alike

    # As many as there are numbers to fill them: the rule of Rice, 1944.
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


def _values(sides: Sequence[Bars]) -> str:
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
    """Yield a column for each cell; a few elements among millions are seen all the same."""
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
    """Return the numbers below: a column for each side."""
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
