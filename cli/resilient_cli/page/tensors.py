"""The tensors of a checkpoint, as a part of the page; each opens to how its numbers are spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_cli.page.layers import natural
from resilient_cli.page.tables import Cell, Row, path, searched, text
from resilient_cli.render import human_size
from resilient_cli.views.words import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.comparison.values import Side
    from resilient.layouts.values import Tensor

_ROWS_MAX = 3000


def tensors(
    side: Side,
    details: Mapping[str, str] | None = None,
    load: Callable[[str], str] | None = None,
) -> str:
    """Return the tensors of a checkpoint.

    Args:
        side: the checkpoint.
        details: pictures by name, where they are made already.
        load: the address that pictures are asked for at, where they are not.
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
