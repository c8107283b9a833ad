"""Who this process is among the ranks of one life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """The place of one rank.

    Attributes:
        rank: 0 to ``size - 1``.
        size: how many ranks train together.
        local_rank: the rank among those of this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank rules in agreements and writes the manifest."""
        return self.rank == 0
