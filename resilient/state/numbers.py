"""What was measured, as plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import UnsavableState

if TYPE_CHECKING:
    from collections.abc import Mapping


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; tensors of one element are their value.

    Raises:
        UnsavableState: one is no number.
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            path = f"metrics/{name}"
            raise UnsavableState(
                f"`{path}` is no number: it is a {type(value).__name__}",
                path=path,
                hint="give one number for each name, of a tensor its mean() or item()",
            ) from error
    return plain
