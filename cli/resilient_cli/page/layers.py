"""How far each layer of two checkpoints is apart, drawn from the first layer to the last."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.layouts.values import MODEL, OPTIMIZER
from resilient_cli.page.drawing import WIDTH, Scale, opened
from resilient_cli.page.tables import legend, scroll, short
from resilient_cli.views.comparing import is_counter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.comparison.values import TensorChange

_ROW, _LEFT, _RIGHT, _TOP = 26, 250, 120, 24
_SHOWN = 120
_DECADES_MAX = 12
_NAME_MAX = 38
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")
_SIDES = (MODEL, OPTIMIZER)


@dataclass(slots=True)
class _Layer:
    """What the tensors of a layer add up to, by part.

    Attributes:
        apart: squares of the distance.
        norm: squares of the first side.
        broken: whether a number came or went that is none.
    """

    apart: dict[str, float] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def add(self, one: TensorChange) -> None:
        """Take in a tensor that was measured."""
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
        """Return the distance over the norm; None where it was zero, or nothing was measured."""
        if part not in self.apart:
            return None
        if not self.apart[part]:
            return 0.0
        return math.sqrt(self.apart[part] / self.norm[part]) if self.norm[part] else math.inf


def layer_of(name: str) -> str:
    """Return the layer that a tensor is in: up to the first number, or the module that has it."""
    part, _, path = name.partition("/")
    # Of the optimizer's, the last word says what it is of the parameter.
    path = path.rpartition(".")[0] or path if part == OPTIMIZER else path or name
    found = _LAYER.match(path)
    return found[1] if found else path.rpartition(".")[0] or path


def layers(changes: Sequence[TensorChange]) -> str:
    """Return the picture: a row for each layer, a bar for its weights and one for its moments."""
    found: dict[str, _Layer] = {}
    for one in sorted(changes, key=lambda one: natural(layer_of(one.name))):
        if one.part in _SIDES and one.measures and not is_counter(one):
            found.setdefault(layer_of(one.name), _Layer()).add(one)
    if not found:
        return ""
    shown = dict(list(found.items())[:_SHOWN])
    known = [value for one in shown.values() for part in _SIDES if (value := one.relative(part))]
    finite = [one for one in known if math.isfinite(one)]
    high = math.ceil(math.log10(max(finite))) if finite else 0
    low = math.floor(math.log10(min(finite))) if finite else -1
    low = max(min(low, high - 1), high - _DECADES_MAX)
    left = min(_LEFT, 24 + 7 * max(map(len, shown)))
    scale = Scale(low, high, left, WIDTH - _RIGHT)
    below = _TOP + len(shown) * _ROW
    parts = [opened("layers", WIDTH, below + 4, "relative change of each layer")]
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        x = scale(power)
        parts.append(f'<path class="grid" d="M{x} {_TOP - 4}V{below}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{_TOP - 10}">1e{power}</text>')
    for nth, (name, layer) in enumerate(shown.items()):
        parts += _drawn(name, layer, scale, _TOP + nth * _ROW)
    rest = len(found) - len(shown)
    more = f"<p>and {rest} more layers</p>" if rest else ""
    marks = legend(("p-model", "weights"), ("p-optimizer", "state of the optimizer"))
    return marks + scroll("".join([*parts, "</svg>"])) + more


def natural(name: str) -> list[tuple[int, str]]:
    """Sort h.2 before h.10."""
    words = re.split(r"(\d+)", name)
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in words]


def _drawn(name: str, one: _Layer, scale: Scale, y: int) -> Iterator[str]:
    yield f"<g><title>{short(name)}</title>"
    shown = name if len(name) <= _NAME_MAX else "..." + name[3 - _NAME_MAX :]
    yield f'<text class="name" x="{scale.first - 8}" y="{y + 14}">{short(shown)}</text>'
    ends = []
    for nth, part in enumerate(_SIDES):
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
