"""Result of ``ckpt diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.diff.model import CONFIG, DATA, GROUPS, MODEL_CONFIG, SCHEDULE, SOFTWARE
from resilient.diff.model import TRAINER as TRAINER_STATE
from resilient.layouts.model import MODEL, OPTIMIZER, OTHER
from resilient.redaction import escape_control_chars
from resilient_cli.output import CommandResult, KeyValues, Table
from resilient_cli.views.text import NONE, count, json_number, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.diff.model import (
        CheckpointView,
        Comparison,
        FieldChange,
        Measures,
        OpaqueChange,
        RandomChange,
        TensorChange,
    )
    from resilient.layouts.model import Tensor

_ROWS_MAX, _FIELDS_MAX, _NAMES_MAX = 8, 16, 6
_VALUE_MAX = 24
_SHARE_MIN = 0.001
_COUNTED = (CONFIG, MODEL_CONFIG, SOFTWARE, TRAINER_STATE, SCHEDULE, GROUPS, DATA)
_PARTS = (MODEL, OPTIMIZER, OTHER)


def render_diff(comparison: Comparison, *, lists_all: bool, page: str = "") -> CommandResult:
    """Return the result of ``ckpt diff``.

    Args:
        comparison: Comparison of the two checkpoints.
        lists_all: Whether all differences are listed, and not only the largest.
        page: Path of the HTML page; empty if none was written.
    """
    ids = tuple(tensor.name for tensor in comparison.tensors if tensor.is_equal is not True)
    blocks: list[Table | KeyValues | str] = [_summary(comparison)]
    for part in _PARTS:
        changes = [change for change in _vectors(comparison, part) if change.is_equal is not True]
        rows = [_row(change) for change in changes]
        columns = ("RELATIVE", "MAX ABS", "CHANGED", "TENSOR")
        blocks += _truncate_rows(columns, rows, None if lists_all else _ROWS_MAX, f"in {part}")
    fields = [
        _field_row(field) for field in comparison.fields if lists_all or field.is_in == "both"
    ]
    blocks += _truncate_rows(
        ("FIELD", "A", "B"), fields, None if lists_all else _FIELDS_MAX, "fields"
    )
    opaque_lines = [
        f"differs, not understood: {escape_control_chars(_opaque(change), '')}"
        for change in comparison.opaque
    ]
    blocks += opaque_lines if lists_all else opaque_lines[:_FIELDS_MAX]
    if len(opaque_lines) > _FIELDS_MAX and not lists_all:
        blocks.append(f"... and {len(opaque_lines) - _FIELDS_MAX} more not understood (--all)")
    blocks += [f"not compared: {escape_control_chars(note, '')}" for note in comparison.notes]
    blocks.append(verdict(comparison))
    blocks += [f"page: {page}"] if page else []
    return CommandResult("ckpt.diff", "comparison", _document(comparison), tuple(blocks), ids)


def _truncate_rows(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int | None, noun: str
) -> Iterator[Table | str]:
    """Yield a table of the first rows, and the number of the rows that are left out."""
    if rows:
        yield Table(columns, tuple(rows[:most]))
    if most is not None and len(rows) > most:
        yield f"... and {len(rows) - most} more {noun} (--all)"


def _vectors(comparison: Comparison, part: str) -> list[TensorChange]:
    """Return the tensors of a part, without the update counters of an optimizer."""
    return [
        tensor for tensor in comparison.tensors if tensor.part == part and not is_counter(tensor)
    ]


def is_counter(change: TensorChange) -> bool:
    """Return whether a tensor counts an optimizer's updates of one parameter."""
    elements = change.measures.elements if change.measures else 0
    return change.part == OPTIMIZER and change.name.endswith(".step") and elements == 1


def updates(comparison: Comparison) -> str:
    """Return the update counts of the parameters; equal counts are listed once."""
    norms = [
        tensor.measures.norms
        for tensor in comparison.tensors
        if tensor.measures and is_counter(tensor)
    ]
    texts = [
        _before_and_after(f"{norm:.10g}", f"{norm_after:.10g}")
        for norm, norm_after in dict.fromkeys(norms)
    ]
    hidden_count = len(texts) - _NAMES_MAX
    return ", ".join(texts[:_NAMES_MAX]) + (
        f" and {hidden_count} other counts" if hidden_count > 0 else ""
    )


def _summary(comparison: Comparison) -> KeyValues:
    before, after = comparison.before, comparison.after
    pairs = [
        ("a", before.url),
        ("b", after.url),
        ("layout", _before_and_after(before.layout, after.layout)),
        ("step", _before_and_after(_number(before.step), _number(after.step))),
        ("ranks", _before_and_after(_number(before.world), _number(after.world))),
        ("rate", _before_and_after(rates(before), rates(after))),
        ("random", _randoms(comparison.random)),
    ]
    if counts := updates(comparison):
        pairs.append(("updates", counts))
    if comparison.history != (0, 0, 0):
        left_steps, right_steps, same_steps = comparison.history
        entries = _before_and_after(str(left_steps), str(right_steps))
        pairs.append(("log", f"{entries} entries, the first {same_steps} the same"))
    pairs += [(name, text) for name in _COUNTED if (text := _count_changes(comparison, name))]
    pairs += [(name, text) for name in _PARTS if (text := summarize_part(comparison, name))]
    for name, tensors in zip(("only in a", "only in b"), comparison.only, strict=True):
        if tensors:
            pairs.append((name, _tensor_names(tensors)))
    if comparison.tied:
        pairs.append(
            ("tied", f"{', '.join(comparison.tied[:_NAMES_MAX])}: stored once on the other side")
        )
    return KeyValues(tuple(pairs))


def _before_and_after(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _number(value: int | None) -> str:
    return NONE if value is None else str(value)


def rates(side: CheckpointView) -> str:
    """Return the learning rates with which a checkpoint continues."""
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(side.rates)) or NONE


def _randoms(changes: Sequence[RandomChange]) -> str:
    """Return the changes of the random generators; ranks with the same change are grouped."""
    ranks_by_change: dict[str, list[int]] = {}
    for change in changes:
        ranks_by_change.setdefault(f"{change.kind} {describe_random_change(change)}", []).append(
            change.rank
        )
    ranks = {change.rank for change in changes}
    return (
        ", ".join(
            text
            if len(ranks) == len(of)
            else f"{text} (rank {', '.join(map(str, of[:_NAMES_MAX]))})"
            for text, of in ranks_by_change.items()
        )
        or NONE
    )


def describe_random_change(change: RandomChange) -> str:
    """Return the change of a random generator."""
    if change.is_in != "both":
        return f"only in {change.is_in}"
    if change.same:
        return "same"
    if not change.draws:
        return "differs" if change.draws == 0 else "another random stream"
    return f"{count(abs(change.draws), 'draw')} {'ahead' if change.draws > 0 else 'behind'}"


def _count_changes(comparison: Comparison, section: str) -> str:
    changes = [field for field in comparison.fields if field.section == section]
    differing_count = sum(field.is_in == "both" for field in changes)
    counts_by_side = [sum(field.is_in == side for field in changes) for side in "ab"]
    parts = [
        *(
            (f"{comparison.same_fields[section]} the same",)
            if comparison.same_fields[section]
            else ()
        ),
        *((f"{differing_count} differ",) if differing_count else ()),
        *(f"{n} only in {side}" for n, side in zip(counts_by_side, "ab", strict=True) if n),
    ]
    return ", ".join(parts)


def summarize_part(comparison: Comparison, part: str) -> str:
    """Summarize the differing tensors of a part; empty if the part has no tensors."""
    changes = _vectors(comparison, part)
    if not changes:
        return ""
    differing_tensors = [tensor for tensor in changes if tensor.is_equal is not True]
    text = f"{count(len(changes), 'tensor')}, "
    if not differing_tensors:
        return text + "bit for bit the same"
    relative_changes = [
        tensor.measures.relative
        for tensor in differing_tensors
        if tensor.measures and tensor.measures.relative
    ]
    largest_text = (
        f"; largest relative change {max(relative_changes):.1e}" if relative_changes else ""
    )
    return text + f"{len(differing_tensors)} differ{largest_text}"


def _tensor_names(tensors: Sequence[Tensor]) -> str:
    names = ", ".join(f"{tensor.part}/{tensor.name}" for tensor in tensors[:_NAMES_MAX])
    hidden_count = len(tensors) - _NAMES_MAX
    return (
        f"{count(len(tensors), 'tensor')}: "
        f"{names}{f' and {hidden_count} more' if hidden_count > 0 else ''}"
    )


def _row(change: TensorChange) -> tuple[str, ...]:
    measures = change.measures
    if measures is None:
        shapes = _before_and_after(
            *("x".join(map(str, shape)) or "scalar" for shape in change.shapes)
        )
        return (NONE, NONE, NONE, f"{change.name} ({change.why}: {shapes})")
    share = measures.changed / measures.elements if measures.elements else 0.0
    dtypes = "" if change.dtypes[0] == change.dtypes[1] else f" ({' -> '.join(change.dtypes)})"
    bad_numbers = [
        f"{_before_and_after(*map(str, counts))} {kind}"
        for counts, kind in ((measures.nans, "NaN"), (measures.infinite, "infinite"))
        if any(counts)
    ]
    bad_text = f" ({', '.join(bad_numbers)})" if bad_numbers else ""
    return (
        relative(measures),
        f"{measures.max_abs:.1e}",
        percent(share),
        change.name + dtypes + bad_text,
    )


def percent(share: float) -> str:
    """Format a share; a share is never rounded to 0 % or 100 %."""
    if 0 < share < _SHARE_MIN or 1 - _SHARE_MIN < share < 1:
        return "<0.1 %" if share < _SHARE_MIN else ">99.9 %"
    return f"{100 * share:.0f} %" if share in (0.0, 1.0) else f"{100 * share:.1f} %"


def relative(measures: Measures) -> str:
    """Format the relative change of a tensor.

    The result is ``NaN`` or ``inf`` if the number of NaN or infinite elements changed, because the
    change of the other elements is then hardly meaningful.
    """
    if measures.nans[0] != measures.nans[1] or measures.infinite[0] != measures.infinite[1]:
        return "NaN" if measures.nans[0] != measures.nans[1] else "inf"
    if measures.relative is None:
        return "from 0" if not measures.norms[0] else NONE
    return f"{measures.relative:.1e}"


def _field_row(change: FieldChange) -> tuple[str, ...]:
    before_text = NONE if change.is_in == "b" else _short_json(change.before)
    after_text = NONE if change.is_in == "a" else _short_json(change.after)
    return (f"{change.section}: {change.name}", before_text, after_text)


def _opaque(change: OpaqueChange) -> str:
    return change.place if change.is_in == "both" else f"{change.place} (only in {change.is_in})"


def _short_json(value: Any) -> str:
    text = plain(json_number(value))
    return text if len(text) <= _VALUE_MAX else text[: _VALUE_MAX - 3] + "..."


def verdict(comparison: Comparison) -> str:
    """Return the last line, which lists the kinds of differences."""
    if not comparison.differs:
        same_count = sum(comparison.same_fields.values())
        return (
            f"No difference: {count(len(comparison.tensors), 'tensor')} bit for bit, "
            f"{count(same_count, 'field')}, {count(len(comparison.random), 'generator')}."
        )
    differing_count = sum(tensor.is_equal is not True for tensor in comparison.tensors)
    unmatched_count = sum(map(len, comparison.only))
    texts = (
        [f"{differing_count} of {count(len(comparison.tensors), 'tensor')}"]
        if differing_count
        else []
    )
    texts += [f"{count(unmatched_count, 'tensor')} on one side only"] if unmatched_count else []
    fields = sum(field.is_in == "both" for field in comparison.fields)
    texts += [count(fields, "field")] if fields else []
    streams = sum(change.same is False for change in comparison.random)
    texts += [count(streams, "random stream")] if streams else []
    unread = len(comparison.opaque)
    texts += [f"{count(unread, 'value')} that no reader can parse"] if unread else []
    return f"They differ: {', '.join(texts) or 'see above'}."


def _document(comparison: Comparison) -> dict[str, Any]:
    left_steps, right_steps, same_steps = comparison.history
    return {
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "differs": comparison.differs,
        "fields": [
            {
                "type": "field",
                "section": field.section,
                "name": field.name,
                "before": json_number(field.before),
                "after": json_number(field.after),
                "in": field.is_in,
            }
            for field in comparison.fields
        ],
        "same_fields": dict(comparison.same_fields),
        "log": {"before": left_steps, "after": right_steps, "same": same_steps},
        "random": [
            {
                "type": "generator",
                "rank": change.rank,
                "kind": change.kind,
                "same": change.same,
                "draws": change.draws,
                "in": change.is_in,
            }
            for change in comparison.random
        ],
        "tensors": [_tensor(tensor) for tensor in comparison.tensors],
        "only_before": [f"{tensor.part}/{tensor.name}" for tensor in comparison.only[0]],
        "only_after": [f"{tensor.part}/{tensor.name}" for tensor in comparison.only[1]],
        "tied": list(comparison.tied),
        "not_understood": [
            {"place": change.place, "in": change.is_in} for change in comparison.opaque
        ],
        "notes": list(comparison.notes),
    }


def _side(side: CheckpointView) -> dict[str, Any]:
    return {
        "url": side.url,
        "layout": side.layout,
        "checkpoint": side.name,
        "step": side.step,
        "world_size": side.world,
        "rates": list(side.rates),
    }


def _tensor(change: TensorChange) -> dict[str, Any]:
    return {
        "type": "tensor",
        "name": change.name,
        "part": change.part,
        "shape_before": list(change.shapes[0]),
        "shape_after": list(change.shapes[1]),
        "dtype_before": change.dtypes[0],
        "dtype_after": change.dtypes[1],
        "equal": change.is_equal,
        "why": change.why or None,
        **dict(_measures(change.measures)),
    }


def _measures(measures: Measures | None) -> Iterator[tuple[str, Any]]:
    yield "elements", measures.elements if measures else None
    yield "changed", measures.changed if measures else None
    for name in ("max_abs", "relative", "cosine", "max_ulp"):
        yield name, json_number(getattr(measures, name)) if measures else None
    for name in ("norms", "nans", "infinite"):
        yield (
            name,
            [json_number(number) for number in getattr(measures, name)] if measures else None,
        )
