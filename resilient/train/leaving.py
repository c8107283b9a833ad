"""How far the last save gets before the host is gone: by the time that is left and past saves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from resilient.clock import Timed

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.clock import Clock

_REMEMBERED = 64
_MARGIN_SECONDS = 1.0


class Tier(IntEnum):
    """Where a save is to get to; of several ranks' the greatest counts, which asks for least."""

    DURABLE = 0
    """The repository, and with a near one both."""
    NEAR = 1
    """The near repository alone; the next life goes on from there if it runs on this host."""
    MEMORY = 2
    """The keeper, which makes it durable after the trainers are gone, if it is left the time."""
    IN_FLIGHT = 3
    """Nothing new: what is in flight is finished."""


@dataclass(slots=True)
class SavesTook:
    """What the saves of this life took, the last ones of them.

    Attributes:
        copy_seconds: until training could go on.
        land_seconds: from the beginning until it was committed, in the near repository if there
            is one, less what it rested: with somebody waiting for it, it takes no longer.
        spread_seconds: of the last save, its rests among them; None before the first.
        stalled_seconds: that training has waited for all saves together.
    """

    copy_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    land_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    spread_seconds: float | None = None
    stalled_seconds: float = 0.0

    def stalling(self, clock: Clock) -> Timed:
        """Add the time spent inside to what training has waited."""
        return Timed(clock, self._waited)

    def _waited(self, seconds: float) -> None:
        self.stalled_seconds += seconds

    def landed(self, took_seconds: float, rested_seconds: float) -> None:
        """Remember a save that is durable.

        Args:
            took_seconds: from its beginning.
            rested_seconds: of these it rested, for nobody waited for it.
        """
        self.land_seconds.append(max(took_seconds - rested_seconds, 0.0))
        self.spread_seconds = took_seconds

    @property
    def land_p95(self) -> float | None:
        """What 19 of 20 saves did not exceed; None before the first."""
        return p95(self.land_seconds)


def p95(values: Collection[float]) -> float | None:
    """Return the least of ``values`` that 95 of 100 do not exceed (nearest rank); None of none."""
    if not values:
        return None
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def choose_tier(left_seconds: float, took: SavesTook, *, has_near: bool, has_keeper: bool) -> Tier:
    """Return the safest tier that a save reaches in time.

    With nothing measured the safest: trying loses nothing. Else by the p95; if by that no tier is
    reached, by the fastest save so far, because a try that fails harms nothing either.

    Args:
        left_seconds: until the process must be gone.
        took: past saves.
        has_near: whether saves go to a near repository first. A promotion is taken to last as
            long as a save, for it carries the same bytes.
        has_keeper: whether a keeper makes durable what it was handed.
    """
    land = took.land_p95
    if land is None:
        return Tier.DURABLE
    needs = {Tier.DURABLE: 2 * land if has_near else land}
    if has_near:
        needs[Tier.NEAR] = land
    if has_keeper:
        needs[Tier.MEMORY] = p95(took.copy_seconds) or 0.0
    for tier, seconds in needs.items():
        if seconds + _MARGIN_SECONDS <= left_seconds:
            return tier
    if min(took.land_seconds) <= left_seconds:
        return Tier.NEAR if has_near else Tier.DURABLE
    return Tier.IN_FLIGHT
