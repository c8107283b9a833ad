"""HTML of the differences between two checkpoints, as a section and as a page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resilient.diff.model import SECTIONS
from resilient_cli.page.page import PageSection, whole_page
from resilient_cli.page.tables import Cell, Row, path, searched, short, table, text
from resilient_cli.page.tensors import layers, pictures_of_both
from resilient_cli.views.diff import (
    fate,
    is_counter,
    percent,
    rates,
    relative,
    summed,
    updates,
    verdict,
)
from resilient_cli.views.text import NONE, count, json_number, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.diff.model import CheckpointView, Comparison, FieldChange, Measures, TensorChange

_ROWS_MAX, _NAMES_MAX = 3000, 100
_FIRST = 1e300
"""Sort value that comes before every number."""


def comparison(
    found: Comparison,
    details: Mapping[str, str] | None = None,
    load: Callable[[str], str] | None = None,
) -> str:
    """Return the section about a comparison.

    Args:
        found: The comparison.
        details: Pictures of tensors by name, if they are already made.
        load: Function from a tensor's name to the address of its pictures, if made on demand.
    """
    differs = "differ" if found.differs else "same"
    parts = [
        f'<p class="verdict v-{differs}">{text(verdict(found))}</p>',
        _tiles(found),
        _sides(found),
    ]
    drawn = layers(found.tensors)
    if drawn:
        parts.append("<h3>Relative change of each layer</h3>")
        parts.append("<p>L2 norm of the difference over that of the first, by powers of ten.</p>")
        parts.append(drawn)
    if found.fields:
        parts += ["<h3>Fields</h3>", _fields(found)]
    if found.tensors:
        parts += ["<h3>Tensors</h3>", _tensors(found, details or {}, load)]
    parts += _rest(found)
    return "".join(parts)


def _tiles(found: Comparison) -> str:
    differ = sum(tensor.is_equal is not True for tensor in found.tensors)
    known = [
        tensor.measures.relative
        for tensor in found.tensors
        if tensor.measures and tensor.measures.relative
    ]
    nans = sum(tensor.measures.nans[1] for tensor in found.tensors if tensor.measures)
    streams = [stream_change for stream_change in found.random if stream_change.is_in == "both"]
    tiles = (
        (f"{differ} of {len(found.tensors)}", "tensors differ"),
        (f"{max(known):.2g}" if known else "0", "largest relative change"),
        (str(sum(field.is_in == "both" for field in found.fields)), "fields differ"),
        (
            f"{sum(stream.same is True for stream in streams)} of {len(streams)}",
            "random streams equal",
        ),
        (f"{nans:,}", "NaN in the second"),
    )
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{of}</span></div>' for value, of in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _sides(found: Comparison) -> str:
    def both(name: str, said: Callable[[CheckpointView], str]) -> tuple[str, str, str]:
        return (name, said(found.before), said(found.after))

    rows = [
        both("where", lambda side: f'<span class="where">{text(side.url)}</span>'),
        both("layout", lambda side: text(side.layout)),
        both("step", lambda side: NONE if side.step is None else str(side.step)),
        both("ranks", lambda side: NONE if side.world is None else str(side.world)),
        both("learning rate", rates),
    ]
    left, right, same = found.history
    if (left, right, same) != (0, 0, 0):
        rows.append(("log", f"{left} entries", f"{right} entries, the first {same} the same"))
    facts = [("updates", text(updates(found)))]
    facts += [(section, summed(found, section)) for section in ("model", "optimizer", "other")]
    facts += [
        (f"random: {text(generator.kind)}, rank {generator.rank}", fate(generator))
        for generator in found.random[:_NAMES_MAX]
    ]
    pairs = "".join(f"<div><dt>{name}</dt><dd>{told}</dd></div>" for name, told in facts if told)
    return table(("", "A", "B"), rows, ()) + f'<dl class="facts">{pairs}</dl>'


def _fields(found: Comparison) -> str:
    order = {name: nth for nth, name in enumerate(SECTIONS)}
    some = sorted(
        found.fields, key=lambda change: (change.is_in != "both", order.get(change.section, 99))
    )
    rows = [_field(change) for change in some[:_ROWS_MAX]]
    return searched("fields", ("field", "of", "A", "B"), rows, (), "fields that differ") + _more(
        len(some)
    )


def _field(change: FieldChange) -> Row:
    left = NONE if change.is_in == "b" else _value(change.before)
    right = NONE if change.is_in == "a" else _value(change.after)
    cells = (short(change.name), text(change.section.replace("_", " ")), left, right)
    return Row(cells, part=change.section)


def _value(value: object) -> str:
    return f'<span class="where">{short(plain(json_number(value)))}</span>'


def _tensors(
    found: Comparison, details: Mapping[str, str], load: Callable[[str], str] | None
) -> str:
    head = (
        *("tensor", "shape", "dtype", "relative L2", "max abs", "cosine", "changed"),
        *("max ULP", "NaN"),
    )
    some = [tensor for tensor in found.tensors if not is_counter(tensor)]
    rows = [_tensor(change, details, load) for change in some[:_ROWS_MAX]]
    shown = searched(
        "changes",
        head,
        rows,
        tuple(range(3, 9)),
        "tensors, the most different first",
        differing=True,
    )
    return shown + _more(len(some))


def _more(total: int) -> str:
    left = total - _ROWS_MAX
    return f"<p>and {left} more: resilient ckpt diff A B --json</p>" if left > 0 else ""


def _tensor(
    change: TensorChange, details: Mapping[str, str], load: Callable[[str], str] | None
) -> Row:
    shapes = _both(*("x".join(map(str, shape)) or "scalar" for shape in change.shapes))
    about = (path(change.name), shapes, text(_both(*change.dtypes)))
    is_same = change.is_equal is True
    if change.measures is None:
        why = Cell(f'<span class="bad">{text(change.why)}</span>', _FIRST)
        return Row((*about, why, *[NONE] * 5), part=change.part, is_same=is_same)
    can_be_opened = load is not None and bool(change.measures.elements)
    return Row(
        (*about, *_measures(change, change.measures)),
        part=change.part,
        is_same=is_same,
        detail=details.get(change.name, ""),
        load=load(change.name) if load and can_be_opened else "",
    )


def _measures(change: TensorChange, found: Measures) -> Iterator[Cell]:
    if change.is_equal:
        yield Cell("same", 0.0)
    else:
        wrong = found.nans[0] != found.nans[1] or found.infinite[0] != found.infinite[1]
        told = relative(found)
        value = _FIRST if wrong else found.relative if found.relative is not None else _FIRST / 10
        yield Cell(f'<span class="bad">{told}</span>' if wrong else told, value)
    share = found.changed / found.elements if found.elements else 0.0
    yield Cell(f"{found.max_abs:.2g}", _number(found.max_abs))
    yield Cell(NONE) if found.cosine is None else Cell(_cosine(found), found.cosine)
    yield Cell(percent(share), share)
    yield Cell(NONE) if found.max_ulp is None else Cell(f"{found.max_ulp:,}", float(found.max_ulp))
    broken = f"{_both(*map(str, found.nans))}" if any(found.nans) else "0"
    yield Cell(
        f'<strong class="bad">{broken}</strong>' if any(found.nans) else "0", sum(found.nans)
    )


def _cosine(found: Measures) -> str:
    """Return the cosine; a tensor that differs is never rounded to 1."""
    shown = f"{found.cosine:.6f}"
    return text(">0.999999") if found.changed and shown == "1.000000" else shown


def _number(value: float) -> float:
    return value if math.isfinite(value) else _FIRST


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} to {after}"


def _rest(found: Comparison) -> Iterator[str]:
    for name, tensors in zip(("A", "B"), found.only, strict=True):
        if tensors:
            yield f"<h3>Only in {name}</h3><p>{count(len(tensors), 'tensor')}</p><ul>"
            for tensor in tensors[:_NAMES_MAX]:
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                yield f"<li>{path(f'{tensor.part}/{tensor.name}')} {shape}</li>"
            left = len(tensors) - _NAMES_MAX
            yield f"<li>and {left} more</li></ul>" if left > 0 else "</ul>"
    if found.tied:
        names = ", ".join(found.tied[:_NAMES_MAX])
        yield f"<p>Stored once on the other side: {short(names, 2000)}</p>"
    if found.opaque:
        places = "".join(
            f"<li>{short(change.place, 500)}</li>" for change in found.opaque[:_ROWS_MAX]
        )
        yield f"<h3>Differs, not understood</h3><ul>{places}</ul>" + _more(len(found.opaque))
    if found.notes:
        notes = "".join(f"<li>{short(note, 500)}</li>" for note in found.notes)
        yield f"<h3>Not compared</h3><ul>{notes}</ul>"


def comparison_page(found: Comparison, told: Callable[[int, int], None]) -> str:
    """Return the complete page about two checkpoints, which loads nothing else.

    Args:
        found: The comparison.
        told: Progress callback: number of drawn pictures, and number of all pictures.
    """
    pictures = pictures_of_both(found, told)
    name = f"{found.before.name} and {found.after.name}"
    said = f"A is {text(found.before.url)}, B is {text(found.after.url)}"
    body = comparison(found, pictures)
    return whole_page(name, said, [PageSection("compare", "Two checkpoints side by side", body)])
