"""The one order in which micro-batches are added, and what of it each rank does (pure).

The leaves of a binary tree are the micro-batches of a step, numbered from 0. A node covers an
aligned run of leaves: ``2**k`` of them from a multiple of ``2**k`` on, cut off where the leaves
end. Floating-point addition commutes but does not associate, so whoever joins only neighbours
that are the two halves of a node gets the same bits as anybody else who does.

A rank computes a contiguous run of leaves, and what it can join of them is the shortest list of
nodes that covers the run; their sums are all that it sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# A plan looks at no more than this many ways to deal the leaves out.
_WAYS_MAX = 20_000


class Node(NamedTuple):
    """A run of leaves, ``start`` to ``stop - 1``, that is summed as one."""

    start: int
    stop: int


def parent(left: Node, right: Node, leaves: int) -> Node | None:
    """Return the node whose halves these are; None if there is no such node.

    Args:
        left: a node.
        right: a node.
        leaves: of the tree.
    """
    half = left.stop - left.start
    is_power = half & (half - 1) == 0
    if left.stop != right.start or not is_power or left.start % (2 * half):
        return None
    stop = min(left.start + 2 * half, leaves)
    return Node(left.start, stop) if right.stop == stop else None


class Joining(Generic[T]):
    """Joins values of nodes as they come, from left to right.

    Args:
        leaves: of the tree.
        add: the sum of two values, left and right; may change either.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self._held: list[tuple[Node, T]] = []

    def take(self, node: Node, value: T) -> None:
        """Take the value of a node, and join as much as is there.

        Raises:
            ValueError: it does not follow what was taken before, so that leaves would be missing.
        """
        if self._held and self._held[-1][0].stop != node.start:
            raise ValueError(f"leaf {node.start} does not follow {self._held[-1][0].stop - 1}")
        while self._held:
            whole = parent(self._held[-1][0], node, self._leaves)
            if whole is None:
                break
            node, value = whole, self._add(self._held.pop()[1], value)
        self._held.append((node, value))

    def nodes(self) -> tuple[Node, ...]:
        """Return what could not be joined any further."""
        return tuple(node for node, _ in self._held)

    def values(self) -> list[T]:
        """Return the values of :meth:`nodes`."""
        return [value for _, value in self._held]

    def root(self) -> T:
        """Return the value of the whole tree.

        Raises:
            ValueError: leaves are missing.
        """
        if self.nodes() != (Node(0, self._leaves),):
            raise ValueError(f"{self.nodes()} are not all of {self._leaves} leaves")
        return self._held[0][1]


def cover(run: Node, leaves: int) -> tuple[Node, ...]:
    """Return the nodes that a rank with a run of leaves sends, from left to right."""
    joining: Joining[None] = Joining(leaves, lambda _left, _right: None)
    for leaf in range(run.start, run.stop):
        joining.take(Node(leaf, leaf + 1), None)
    return joining.nodes()


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes which leaves, and what each sends.

    Attributes:
        leaves: micro-batches of a step.
        runs: by rank; a rank that is one too many has an empty one.
        nodes: by rank, the covers of its run.
    """

    leaves: int
    runs: tuple[Node, ...]
    nodes: tuple[tuple[Node, ...], ...]


@cache
def plan_for(leaves: int, ranks: int) -> Plan:
    """Deal leaves to ranks: as evenly as can be, and cut so that few nodes are sent.

    Raises:
        ValueError: there are no leaves or no ranks.
    """
    if leaves < 1 or ranks < 1:
        raise ValueError(f"{leaves} leaves cannot be dealt to {ranks} ranks")
    runs, start = [], 0
    for count in _counts(leaves, ranks):
        runs.append(Node(start, start + count))
        start += count
    return Plan(leaves, tuple(runs), tuple(cover(run, leaves) for run in runs))


def _counts(leaves: int, ranks: int) -> list[int]:
    """Return how many leaves each rank has: the same, or one more for some of them."""
    few, more = divmod(leaves, ranks)
    if not more or not few or ranks * (more + 1) > _WAYS_MAX:
        return [few + (rank < more) for rank in range(ranks)]
    # cheapest[given]: fewest nodes of the ranks so far, if `given` of them have one leaf more,
    # and who does.
    cheapest: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank in range(ranks):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for given, (cost, counts) in cheapest.items():
            start = rank * few + given
            for extra in (1, 0):
                fits = given + extra <= more <= given + extra + ranks - rank - 1
                if not fits:
                    continue
                sent = len(cover(Node(start, start + few + extra), leaves))
                way = (cost + sent, (*counts, few + extra))
                known = found.get(given + extra)
                if known is None or way[0] < known[0]:
                    found[given + extra] = way
        cheapest = found
    return list(cheapest[more][1])
