"""The answers of ``ckpt cat``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_cli.render import Answer, Facts, human_size
from resilient_cli.views.words import NONE, finite, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.comparison.summing import Summary
    from resilient.comparison.values import Side
    from resilient.layouts.values import Tensor


def tensor_shown(side: Side, tensor: Tensor, found: Summary | None) -> Answer:
    """Return the answer about a tensor.

    Args:
        side: the checkpoint.
        tensor: which one.
        found: its elements in numbers; None of a dtype whose numbers are not known.
    """
    name = f"{tensor.part}/{tensor.name}"
    document = {
        "checkpoint": side.url,
        "name": name,
        "part": tensor.part,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": tensor.elements,
        "size_bytes": tensor.size_bytes,
        "files": list(tensor.files),
        "pieces": len(tensor.pieces),
        **(
            {
                "min": finite(found.low),
                "max": finite(found.high),
                "mean": finite(found.mean),
                "std": finite(found.deviation),
                "norm": finite(found.norm),
                "zeros": found.zeros,
                "nans": found.nans,
                "infinite": found.infinite,
                "first": finite(found.first),
            }
            if found
            else {}
        ),
    }
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    pairs = [
        ("checkpoint", side.url),
        ("tensor", name),
        ("shape", f"{shape} of {tensor.dtype}, {human_size(tensor.size_bytes)}"),
        ("files", ", ".join(tensor.files)),
    ]
    if found:
        pairs += [
            ("range", f"{_number(found.low)} to {_number(found.high)}"),
            ("mean", f"{_number(found.mean)}, deviation {_number(found.deviation)}"),
            ("norm", _number(found.norm)),
            ("counts", f"{found.zeros} zero, {found.nans} NaN, {found.infinite} infinite"),
            ("first", " ".join(_number(one) for one in found.first) or NONE),
        ]
    return Answer("ckpt.cat", "tensor", document, (Facts(tuple(pairs)),), (name,))


def section_shown(side: Side, section: str, fields: Mapping[str, Any]) -> Answer:
    """Return the answer about all values of a section."""
    values = {name: finite(one) for name, one in fields.items()}
    document = {"checkpoint": side.url, "name": section, "values": values}
    pairs = tuple((name, plain(one)) for name, one in values.items())
    return Answer("ckpt.cat", "section", document, (Facts(pairs),), tuple(values))


def field_shown(side: Side, name: str, value: Any) -> Answer:
    """Return the answer about one value."""
    shown = finite(value)
    document = {"checkpoint": side.url, "name": name, "value": shown}
    return Answer("ckpt.cat", "value", document, (plain(shown),), (plain(shown),))


def _number(value: Any) -> str:
    return NONE if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
