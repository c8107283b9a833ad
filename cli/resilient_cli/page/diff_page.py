"""HTML of the differences between two checkpoints, as a section and as a page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resilient.diff.model import SECTIONS
from resilient_cli.page.page import PageSection, whole_page
from resilient_cli.page.tables import Cell, Row, path, searchable_table, short, table, text
from resilient_cli.page.tensors import layers, pair_pictures
from resilient_cli.views.diff import (
    describe_random_change,
    is_counter,
    percent,
    rates,
    relative,
    summarize_part,
    updates,
    verdict,
)
from resilient_cli.views.text import NONE, count, json_number, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.diff.model import CheckpointView, Comparison, FieldChange, Measures, TensorChange

_ROWS_MAX, _NAMES_MAX = 3000, 100
_SORTS_FIRST = 1e300
"""Sort value that comes before every number."""


def comparison(
    result: Comparison,
    details: Mapping[str, str] | None = None,
    load: Callable[[str], str] | None = None,
) -> str:
    """Return the section about a comparison.

    Args:
        result: The comparison.
        details: Pictures of tensors by name, if they are already made.
        load: Function from a tensor's name to the address of its pictures, if made on demand.
    """
    differs = "differ" if result.differs else "same"
    parts = [
        f'<p class="verdict v-{differs}">{text(verdict(result))}</p>',
        _tiles(result),
        _sides(result),
    ]
    picture = layers(result.tensors)
    if picture:
        parts.append("<h3>Relative change of each layer</h3>")
        parts.append(
            "<p>L2 norm of the difference, divided by the L2 norm of A, by powers of ten.</p>"
        )
        parts.append(picture)
    if result.fields:
        parts += ["<h3>Fields</h3>", _fields(result)]
    if result.tensors:
        parts += ["<h3>Tensors</h3>", _tensors(result, details or {}, load)]
    parts += _remaining_sections(result)
    return "".join(parts)


def _tiles(result: Comparison) -> str:
    differing_count = sum(tensor.is_equal is not True for tensor in result.tensors)
    changes = [
        tensor.measures.relative
        for tensor in result.tensors
        if tensor.measures and tensor.measures.relative
    ]
    nans = sum(tensor.measures.nans[1] for tensor in result.tensors if tensor.measures)
    streams = [stream_change for stream_change in result.random if stream_change.is_in == "both"]
    tiles = (
        (f"{differing_count} of {len(result.tensors)}", "tensors differ"),
        (f"{max(changes):.2g}" if changes else "0", "largest relative change"),
        (str(sum(field.is_in == "both" for field in result.fields)), "fields differ"),
        (
            f"{sum(stream.same is True for stream in streams)} of {len(streams)}",
            "random streams equal",
        ),
        (f"{nans:,}", "NaN in the second"),
    )
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{unit}</span></div>' for value, unit in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _sides(result: Comparison) -> str:
    def add_fact(name: str, describe: Callable[[CheckpointView], str]) -> tuple[str, str, str]:
        return (name, describe(result.before), describe(result.after))

    rows = [
        add_fact("where", lambda side: f'<span class="where">{text(side.url)}</span>'),
        add_fact("layout", lambda side: text(side.layout)),
        add_fact("step", lambda side: NONE if side.step is None else str(side.step)),
        add_fact("ranks", lambda side: NONE if side.world is None else str(side.world)),
        add_fact("learning rate", rates),
    ]
    left_steps, right_steps, same_steps = result.history
    if (left_steps, right_steps, same_steps) != (0, 0, 0):
        rows.append(
            (
                "log",
                f"{left_steps} entries",
                f"{right_steps} entries, the first {same_steps} the same",
            )
        )
    facts = [("updates", text(updates(result)))]
    facts += [
        (section, summarize_part(result, section)) for section in ("model", "optimizer", "other")
    ]
    facts += [
        (
            f"random: {text(generator.kind)}, rank {generator.rank}",
            describe_random_change(generator),
        )
        for generator in result.random[:_NAMES_MAX]
    ]
    pairs = "".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts if fact)
    return table(("", "A", "B"), rows, ()) + f'<dl class="facts">{pairs}</dl>'


def _fields(result: Comparison) -> str:
    order = {name: nth for nth, name in enumerate(SECTIONS)}
    changes = sorted(
        result.fields, key=lambda change: (change.is_in != "both", order.get(change.section, 99))
    )
    rows = [_field(change) for change in changes[:_ROWS_MAX]]
    return searchable_table(
        "fields", ("field", "of", "A", "B"), rows, (), "fields that differ"
    ) + _hidden_note(len(changes))


def _field(change: FieldChange) -> Row:
    before_cell = NONE if change.is_in == "b" else _value(change.before)
    after_cell = NONE if change.is_in == "a" else _value(change.after)
    cells = (short(change.name), text(change.section.replace("_", " ")), before_cell, after_cell)
    return Row(cells, part=change.section)


def _value(value: object) -> str:
    return f'<span class="where">{short(plain(json_number(value)))}</span>'


def _tensors(
    result: Comparison, details: Mapping[str, str], load: Callable[[str], str] | None
) -> str:
    head = (
        *("tensor", "shape", "dtype", "relative L2", "max abs", "cosine", "changed"),
        *("max ULP", "NaN"),
    )
    changes = [tensor for tensor in result.tensors if not is_counter(tensor)]
    rows = [_tensor(change, details, load) for change in changes[:_ROWS_MAX]]
    html = searchable_table(
        "changes",
        head,
        rows,
        tuple(range(3, 9)),
        "tensors, the most different first",
        differing=True,
    )
    return html + _hidden_note(len(changes))


def _hidden_note(total: int) -> str:
    hidden_count = total - _ROWS_MAX
    return (
        f"<p>and {hidden_count} more: resilient ckpt diff A B --json</p>"
        if hidden_count > 0
        else ""
    )


def _tensor(
    change: TensorChange, details: Mapping[str, str], load: Callable[[str], str] | None
) -> Row:
    shapes = _before_and_after(*("x".join(map(str, shape)) or "scalar" for shape in change.shapes))
    name_cells = (path(change.name), shapes, text(_before_and_after(*change.dtypes)))
    is_same = change.is_equal is True
    if change.measures is None:
        reason_cell = Cell(f'<span class="bad">{text(change.why)}</span>', _SORTS_FIRST)
        return Row((*name_cells, reason_cell, *[NONE] * 5), part=change.part, is_same=is_same)
    can_be_opened = load is not None and bool(change.measures.elements)
    return Row(
        (*name_cells, *_measures(change, change.measures)),
        part=change.part,
        is_same=is_same,
        detail=details.get(change.name, ""),
        load=load(change.name) if load and can_be_opened else "",
    )


def _measures(change: TensorChange, measures: Measures) -> Iterator[Cell]:
    if change.is_equal:
        yield Cell("same", 0.0)
    else:
        is_broken = (
            measures.nans[0] != measures.nans[1] or measures.infinite[0] != measures.infinite[1]
        )
        relative_change = relative(measures)
        value = (
            _SORTS_FIRST
            if is_broken
            else measures.relative
            if measures.relative is not None
            else _SORTS_FIRST / 10
        )
        yield Cell(
            f'<span class="bad">{relative_change}</span>' if is_broken else relative_change, value
        )
    share = measures.changed / measures.elements if measures.elements else 0.0
    yield Cell(f"{measures.max_abs:.2g}", _number(measures.max_abs))
    yield Cell(NONE) if measures.cosine is None else Cell(_cosine(measures), measures.cosine)
    yield Cell(percent(share), share)
    yield (
        Cell(NONE)
        if measures.max_ulp is None
        else Cell(f"{measures.max_ulp:,}", float(measures.max_ulp))
    )
    bad_numbers = f"{_before_and_after(*map(str, measures.nans))}" if any(measures.nans) else "0"
    yield Cell(
        f'<strong class="bad">{bad_numbers}</strong>' if any(measures.nans) else "0",
        sum(measures.nans),
    )


def _cosine(measures: Measures) -> str:
    """Return the cosine; a tensor that differs is never rounded to 1."""
    cosine = f"{measures.cosine:.6f}"
    return text(">0.999999") if measures.changed and cosine == "1.000000" else cosine


def _number(value: float) -> float:
    return value if math.isfinite(value) else _SORTS_FIRST


def _before_and_after(before: str, after: str) -> str:
    return before if before == after else f"{before} to {after}"


def _remaining_sections(result: Comparison) -> Iterator[str]:
    for name, tensors in zip(("A", "B"), result.only, strict=True):
        if tensors:
            yield f"<h3>Only in {name}</h3><p>{count(len(tensors), 'tensor')}</p><ul>"
            for tensor in tensors[:_NAMES_MAX]:
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                yield f"<li>{path(f'{tensor.part}/{tensor.name}')} {shape}</li>"
            hidden_count = len(tensors) - _NAMES_MAX
            yield f"<li>and {hidden_count} more</li></ul>" if hidden_count > 0 else "</ul>"
    if result.tied:
        names = ", ".join(result.tied[:_NAMES_MAX])
        yield f"<p>Stored once on the other side: {short(names, 2000)}</p>"
    if result.opaque:
        places = "".join(
            f"<li>{short(change.place, 500)}</li>" for change in result.opaque[:_ROWS_MAX]
        )
        yield f"<h3>Differs, not understood</h3><ul>{places}</ul>" + _hidden_note(
            len(result.opaque)
        )
    if result.notes:
        notes = "".join(f"<li>{short(note, 500)}</li>" for note in result.notes)
        yield f"<h3>Not compared</h3><ul>{notes}</ul>"


def comparison_page(result: Comparison, progress: Callable[[int, int], None]) -> str:
    """Return the complete page about two checkpoints, which loads nothing else.

    Args:
        result: The comparison.
        progress: Progress callback: number of drawn pictures, and number of all pictures.
    """
    pictures = pair_pictures(result, progress)
    name = f"{result.before.name} and {result.after.name}"
    subtitle = f"A is {text(result.before.url)}, B is {text(result.after.url)}"
    body = comparison(result, pictures)
    return whole_page(
        name, subtitle, [PageSection("compare", "Two checkpoints side by side", body)]
    )
