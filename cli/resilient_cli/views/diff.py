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
_LEAST = 0.001
_COUNTED = (CONFIG, MODEL_CONFIG, SOFTWARE, TRAINER_STATE, SCHEDULE, GROUPS, DATA)
_PARTS = (MODEL, OPTIMIZER, OTHER)


def render_diff(found: Comparison, *, every: bool, page: str = "") -> CommandResult:
    """Return the result of ``ckpt diff``.

    Args:
        found: Comparison of the two checkpoints.
        every: Whether all differences are listed, and not only the largest.
        page: Path of the HTML page; empty if none was written.
    """
    ids = tuple(one.name for one in found.tensors if one.is_equal is not True)
    blocks: list[Table | KeyValues | str] = [_about(found)]
    for part in _PARTS:
        changes = [one for one in _vectors(found, part) if one.is_equal is not True]
        rows = [_row(one) for one in changes]
        columns = ("RELATIVE", "MAX ABS", "CHANGED", "TENSOR")
        blocks += _listed(columns, rows, None if every else _ROWS_MAX, f"in {part}")
    fields = [_field_row(one) for one in found.fields if every or one.is_in == "both"]
    blocks += _listed(("FIELD", "A", "B"), fields, None if every else _FIELDS_MAX, "fields")
    opaque = [
        f"differs, not understood: {escape_control_chars(_opaque(one), '')}" for one in found.opaque
    ]
    blocks += opaque if every else opaque[:_FIELDS_MAX]
    if len(opaque) > _FIELDS_MAX and not every:
        blocks.append(f"... and {len(opaque) - _FIELDS_MAX} more not understood (--all)")
    blocks += [f"not compared: {escape_control_chars(one, '')}" for one in found.notes]
    blocks.append(verdict(found))
    blocks += [f"page: {page}"] if page else []
    return CommandResult("ckpt.diff", "comparison", _document(found), tuple(blocks), ids)


def _listed(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int | None, what: str
) -> Iterator[Table | str]:
    """Yield a table of the first rows, and the number of the rows that are left out."""
    if rows:
        yield Table(columns, tuple(rows[:most]))
    if most is not None and len(rows) > most:
        yield f"... and {len(rows) - most} more {what} (--all)"


def _vectors(found: Comparison, part: str) -> list[TensorChange]:
    """Return the tensors of a part, without the update counters of an optimizer."""
    return [one for one in found.tensors if one.part == part and not is_counter(one)]


def is_counter(one: TensorChange) -> bool:
    """Return whether a tensor counts an optimizer's updates of one parameter."""
    elements = one.measures.elements if one.measures else 0
    return one.part == OPTIMIZER and one.name.endswith(".step") and elements == 1


def updates(found: Comparison) -> str:
    """Return the update counts of the parameters; equal counts are listed once."""
    norms = [one.measures.norms for one in found.tensors if one.measures and is_counter(one)]
    told = [_both(f"{one:.10g}", f"{other:.10g}") for one, other in dict.fromkeys(norms)]
    rest = len(told) - _NAMES_MAX
    return ", ".join(told[:_NAMES_MAX]) + (f" and {rest} other counts" if rest > 0 else "")


def _about(found: Comparison) -> KeyValues:
    before, after = found.before, found.after
    pairs = [
        ("a", before.url),
        ("b", after.url),
        ("layout", _both(before.layout, after.layout)),
        ("step", _both(_number(before.step), _number(after.step))),
        ("ranks", _both(_number(before.world), _number(after.world))),
        ("rate", _both(rates(before), rates(after))),
        ("random", _randoms(found.random)),
    ]
    if counts := updates(found):
        pairs.append(("updates", counts))
    if found.history != (0, 0, 0):
        left, right, same = found.history
        pairs.append(("log", f"{_both(str(left), str(right))} entries, the first {same} the same"))
    pairs += [(name, text) for name in _COUNTED if (text := _counted(found, name))]
    pairs += [(name, text) for name in _PARTS if (text := summed(found, name))]
    for name, tensors in zip(("only in a", "only in b"), found.only, strict=True):
        if tensors:
            pairs.append((name, _named(tensors)))
    if found.tied:
        pairs.append(
            ("tied", f"{', '.join(found.tied[:_NAMES_MAX])}: stored once on the other side")
        )
    return KeyValues(tuple(pairs))


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _number(value: int | None) -> str:
    return NONE if value is None else str(value)


def rates(side: CheckpointView) -> str:
    """Return the learning rates with which a checkpoint continues."""
    return ", ".join(f"{one:.6g}" for one in dict.fromkeys(side.rates)) or NONE


def _randoms(found: Sequence[RandomChange]) -> str:
    """Return the changes of the random generators; ranks with the same change are grouped."""
    told: dict[str, list[int]] = {}
    for one in found:
        told.setdefault(f"{one.kind} {fate(one)}", []).append(one.rank)
    ranks = {one.rank for one in found}
    return (
        ", ".join(
            what
            if len(ranks) == len(of)
            else f"{what} (rank {', '.join(map(str, of[:_NAMES_MAX]))})"
            for what, of in told.items()
        )
        or NONE
    )


def fate(one: RandomChange) -> str:
    """Return the change of a random generator."""
    if one.is_in != "both":
        return f"only in {one.is_in}"
    if one.same:
        return "same"
    if not one.draws:
        return "differs" if one.draws == 0 else "another random stream"
    return f"{count(abs(one.draws), 'draw')} {'ahead' if one.draws > 0 else 'behind'}"


def _counted(found: Comparison, section: str) -> str:
    mine = [one for one in found.fields if one.section == section]
    differ = sum(one.is_in == "both" for one in mine)
    alone = [sum(one.is_in == side for one in mine) for side in "ab"]
    parts = [
        *((f"{found.same_fields[section]} the same",) if found.same_fields[section] else ()),
        *((f"{differ} differ",) if differ else ()),
        *(f"{n} only in {side}" for n, side in zip(alone, "ab", strict=True) if n),
    ]
    return ", ".join(parts)


def summed(found: Comparison, part: str) -> str:
    """Return how many tensors of a part differ, and by how much; empty if the part has none."""
    mine = _vectors(found, part)
    if not mine:
        return ""
    differ = [one for one in mine if one.is_equal is not True]
    said = f"{count(len(mine), 'tensor')}, "
    if not differ:
        return said + "bit for bit the same"
    known = [one.measures.relative for one in differ if one.measures and one.measures.relative]
    far = f"; largest relative change {max(known):.1e}" if known else ""
    return said + f"{len(differ)} differ{far}"


def _named(tensors: Sequence[Tensor]) -> str:
    names = ", ".join(f"{one.part}/{one.name}" for one in tensors[:_NAMES_MAX])
    rest = len(tensors) - _NAMES_MAX
    return f"{count(len(tensors), 'tensor')}: {names}{f' and {rest} more' if rest > 0 else ''}"


def _row(change: TensorChange) -> tuple[str, ...]:
    found = change.measures
    if found is None:
        shapes = _both(*("x".join(map(str, one)) or "scalar" for one in change.shapes))
        return (NONE, NONE, NONE, f"{change.name} ({change.why}: {shapes})")
    share = found.changed / found.elements if found.elements else 0.0
    dtypes = "" if change.dtypes[0] == change.dtypes[1] else f" ({' -> '.join(change.dtypes)})"
    broken = [
        f"{_both(*map(str, counts))} {what}"
        for counts, what in ((found.nans, "NaN"), (found.infinite, "infinite"))
        if any(counts)
    ]
    told = f" ({', '.join(broken)})" if broken else ""
    return (relative(found), f"{found.max_abs:.1e}", percent(share), change.name + dtypes + told)


def percent(share: float) -> str:
    """Format a share; a share is never rounded to 0 % or 100 %."""
    if 0 < share < _LEAST or 1 - _LEAST < share < 1:
        return "<0.1 %" if share < _LEAST else ">99.9 %"
    return f"{100 * share:.0f} %" if share in (0.0, 1.0) else f"{100 * share:.1f} %"


def relative(found: Measures) -> str:
    """Format the relative change of a tensor.

    The result is ``NaN`` or ``inf`` if the number of NaN or infinite elements changed, because the
    change of the other elements is then hardly meaningful.
    """
    if found.nans[0] != found.nans[1] or found.infinite[0] != found.infinite[1]:
        return "NaN" if found.nans[0] != found.nans[1] else "inf"
    if found.relative is None:
        return "from 0" if not found.norms[0] else NONE
    return f"{found.relative:.1e}"


def _field_row(one: FieldChange) -> tuple[str, ...]:
    left = NONE if one.is_in == "b" else _short(one.before)
    right = NONE if one.is_in == "a" else _short(one.after)
    return (f"{one.section}: {one.name}", left, right)


def _opaque(one: OpaqueChange) -> str:
    return one.place if one.is_in == "both" else f"{one.place} (only in {one.is_in})"


def _short(value: Any) -> str:
    text = plain(json_number(value))
    return text if len(text) <= _VALUE_MAX else text[: _VALUE_MAX - 3] + "..."


def verdict(found: Comparison) -> str:
    """Return the last line: whether the checkpoints differ, and in what."""
    if not found.differs:
        same = sum(found.same_fields.values())
        return (
            f"No difference: {count(len(found.tensors), 'tensor')} bit for bit, "
            f"{count(same, 'field')}, {count(len(found.random), 'generator')}."
        )
    differ = sum(one.is_equal is not True for one in found.tensors)
    alone = sum(map(len, found.only))
    said = [f"{differ} of {count(len(found.tensors), 'tensor')}"] if differ else []
    said += [f"{count(alone, 'tensor')} on one side only"] if alone else []
    fields = sum(one.is_in == "both" for one in found.fields)
    said += [count(fields, "field")] if fields else []
    streams = sum(one.same is False for one in found.random)
    said += [count(streams, "random stream")] if streams else []
    unread = len(found.opaque)
    said += [f"{count(unread, 'value')} that no reader can parse"] if unread else []
    return f"They differ: {', '.join(said) or 'see above'}."


def _document(found: Comparison) -> dict[str, Any]:
    left, right, same = found.history
    return {
        "before": _side(found.before),
        "after": _side(found.after),
        "differs": found.differs,
        "fields": [
            {
                "type": "field",
                "section": one.section,
                "name": one.name,
                "before": json_number(one.before),
                "after": json_number(one.after),
                "in": one.is_in,
            }
            for one in found.fields
        ],
        "same_fields": dict(found.same_fields),
        "log": {"before": left, "after": right, "same": same},
        "random": [
            {
                "type": "generator",
                "rank": one.rank,
                "kind": one.kind,
                "same": one.same,
                "draws": one.draws,
                "in": one.is_in,
            }
            for one in found.random
        ],
        "tensors": [_tensor(one) for one in found.tensors],
        "only_before": [f"{one.part}/{one.name}" for one in found.only[0]],
        "only_after": [f"{one.part}/{one.name}" for one in found.only[1]],
        "tied": list(found.tied),
        "not_understood": [{"place": one.place, "in": one.is_in} for one in found.opaque],
        "notes": list(found.notes),
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


def _tensor(one: TensorChange) -> dict[str, Any]:
    return {
        "type": "tensor",
        "name": one.name,
        "part": one.part,
        "shape_before": list(one.shapes[0]),
        "shape_after": list(one.shapes[1]),
        "dtype_before": one.dtypes[0],
        "dtype_after": one.dtypes[1],
        "equal": one.is_equal,
        "why": one.why or None,
        **dict(_measures(one.measures)),
    }


def _measures(found: Measures | None) -> Iterator[tuple[str, Any]]:
    yield "elements", found.elements if found else None
    yield "changed", found.changed if found else None
    for name in ("max_abs", "relative", "cosine", "max_ulp"):
        yield name, json_number(getattr(found, name)) if found else None
    for name in ("norms", "nans", "infinite"):
        yield name, [json_number(one) for one in getattr(found, name)] if found else None
