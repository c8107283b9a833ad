"""Which ranks share a near repository: one for all, or one on the disk of each host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Places:
    """The ranks of a life by the near repository that they see.

    Attributes:
        groups: of each near repository its ranks, rising, in the order of their lowest; empty if
            all ranks see the same, or there is none.
    """

    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each place, which cares for it; the coordinator is the first."""
        return tuple(group[0] for group in self.groups) or (0,)

    def number(self, rank: int) -> int:
        """Return the number of a rank's place, from 0."""
        return next((at for at, group in enumerate(self.groups) if rank in group), 0)

    def leads(self, rank: int) -> bool:
        """Say whether a rank cares for its place."""
        return rank in self.leaders
