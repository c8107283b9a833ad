"""Which ranks are slower than the group (pure): an event, and never a reason to kill.

Ranks that train together have steps of one length, since all wait for the slowest. What tells
them apart is the time that a rank takes by itself, before its step needs the others: loading its
batch and its forward pass.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.world.pulse import Signs

STEPS_MIN = 10
FACTOR = 1.5
_SECONDS_MIN = 0.01


@dataclass(frozen=True, slots=True)
class StragglerFound(Event):
    """One rank takes much longer by itself than the group's median; all others wait for it."""

    level: ClassVar[Level] = Level.WARNING
    rank: int
    own_seconds: float
    group_seconds: float

    def line(self) -> str:
        """Say who, and by how much."""
        return (
            f"rank {self.rank} is a straggler: it takes {self.own_seconds:.3g} s per step by "
            f"itself, the median rank {self.group_seconds:.3g} s"
        )


def find_stragglers(signs: Mapping[int, Signs]) -> list[StragglerFound]:
    """Return the ranks whose own time per step is far above the group's median.

    Args:
        signs: by rank; ranks that do not tell their own time, or have told too little, are left
            out.
    """
    own = {
        rank: statistics.median(one.own_seconds)
        for rank, one in signs.items()
        if len(one.own_seconds) >= STEPS_MIN
    }
    if len(own) < 2:  # noqa: PLR2004 - nobody is slower than himself
        return []
    # The lower one, so that of two ranks the slow one is found.
    median = statistics.median_low(own.values())
    limit = max(FACTOR * median, median + _SECONDS_MIN)
    return [StragglerFound(rank, one, median) for rank, one in own.items() if one > limit]
