"""Hosts that are asked to leave while others are not: what they say, and who goes on (pure).

Each agent that is asked says so in the store of the round before its ranks are told, so that it
stands there when the ranks of the others end. Whoever was not asked reads it then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Collection


class Asked(Enum):
    """What a host says that was asked to leave."""

    ALONE = "alone"
    """Of this host alone is known that it goes."""
    WITH_ALL = "all"
    """The request was for the whole run."""
    WITH_RENDEZVOUS = "rendezvous"
    """It serves the rendezvous: without it nobody meets again."""


@dataclass(frozen=True, slots=True)
class HostsLeave(Event):
    """Some hosts were asked to leave and saved with all others, who go on without them.

    Attributes:
        hosts: addresses of those that leave.
        nodes_left: how many were not asked.
        nodes_min: fewest that train.
        nodes_max: most that train.
    """

    level: ClassVar[Level] = Level.WARNING
    hosts: list[str]
    nodes_left: int
    nodes_min: int
    nodes_max: int

    def line(self) -> str:
        """Say who leaves, and who goes on."""
        verb = "leaves" if len(self.hosts) == 1 else "leave"
        on = "host goes" if self.nodes_left == 1 else "hosts go"
        return (
            f"{', '.join(self.hosts)} {verb}; "
            f"{self.nodes_left} of {self.nodes_min}:{self.nodes_max} {on} on"
        )


def hosts_that_stay(asked: Collection[str], nodes: int, nodes_min: int) -> int:
    """Return how many hosts go on without those that were asked to leave, 0 if none does.

    Args:
        asked: what each of those said, a value of :class:`Asked`.
        nodes: of the life that ended; of a fixed number of hosts none may be missing.
        nodes_min: fewest that train.
    """
    # If nobody says so it may be meant for all: a rank was told, or the script stops.
    is_for_some = bool(asked) and all(how == Asked.ALONE.value for how in asked)
    left = nodes - len(asked)
    return left if is_for_some and left >= nodes_min else 0
