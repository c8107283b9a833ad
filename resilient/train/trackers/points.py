"""From logs to points: names as the field spells them, plain values, nothing twice (pure)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.train.trackers.tracker import Held

# Said once for a run, not over its steps; tools that have a summary show them there.
SINGLE_VALUES = frozenset(
    {
        *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
        *("train_loss", "total_flos"),
    }
)


def rewritten(name: str) -> str:
    """Return ``eval/loss`` for ``eval_loss``, likewise ``test/...``; else ``train/loss``."""
    for kind in ("eval", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name.removeprefix(f'{kind}_')}"
    return f"train/{name}"


def points_of(logs: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, float | str]:
    """Return what can be drawn of one log entry: numbers and texts, by the tool's names.

    The step is the axis and no point of its own; lists and dicts are left out.
    """
    points: dict[str, float | str] = {}
    for name, value in logs.items():
        plain = _plain(value)
        if name != "step" and plain is not None:
            points[spell(name)] = plain
    return points


def _plain(value: Any) -> float | str | None:
    """Return a number, also of an array or tensor that holds one, or a text; else None."""
    if not isinstance(value, int | float | str) and getattr(value, "size", None) is not None:
        item = getattr(value, "item", None)
        count = getattr(value, "numel", lambda: getattr(value, "size", 0))()
        value = item() if item is not None and count == 1 else None
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float | str) else None


class Curve:
    """Passes each point of a run once.

    Args:
        held: what the tool has from lives before.
    """

    def __init__(self, held: Held | None) -> None:
        self._held = held
        self._last: dict[str, tuple[int, float | str]] = {}

    def new(self, points: Mapping[str, float | str], step: int) -> dict[str, float | str]:
        """Return the points that are not drawn, and take them for drawn."""
        fresh = {
            name: value
            for name, value in points.items()
            if not (self._held is not None and self._held.has(name, step))
            and not _same(self._last.get(name), (step, value))
        }
        self._last |= {name: (step, value) for name, value in fresh.items()}
        return fresh


def _same(one: tuple[int, float | str] | None, other: tuple[int, float | str]) -> bool:
    """Say whether two points are one; a number that is none is equal to itself here."""
    if one is None or one[0] != other[0]:
        return False
    both_nan = all(isinstance(value, float) and math.isnan(value) for _, value in (one, other))
    return both_nan or one[1] == other[1]
