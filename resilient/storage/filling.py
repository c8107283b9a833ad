"""Ranges of an object straight into memory that the reader owns: what some stores can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from resilient.storage.parts import Parts

if TYPE_CHECKING:
    from resilient.storage.buffers import Room
    from resilient.storage.store import Store

_SHARING_MAX = 8
"""A thread for each."""

Arrived = Callable[[int, int], None]
"""Told of each piece, as soon as it is there, where in the room it begins and stops.

Pieces come one behind the other from the room's beginning. They may begin anew; then what was
there before counts for nothing. What this raises ends the filling.
"""


@runtime_checkable
class Filling(Protocol):
    """A store that fills memory without a copy between. Not a part of the seven verbs of a Store.

    Attributes:
        ranges: how large a range it likes, and how many at once; in parts of this size it puts
            large objects, so many at once of each.
    """

    ranges: Parts

    def fill(self, key: str, start: int, room: Room, arrived: Arrived) -> int:
        """Fill ``room`` from offset ``start`` and return how many bytes came.

        Fewer come only at the object's end. When it raises, ``room`` may hold anything.

        Raises:
            KeyNotFound: no such object.
        """


def fill(store: Store, key: str, start: int, room: Room, arrived: Arrived) -> int:
    """Fill ``room`` from any store; one that cannot do it costs a copy.

    Args:
        store: where the object is.
        key: its key.
        start: offset in it, bytes.
        room: memory for what is wanted.
        arrived: told of each piece.
    """
    if isinstance(store, Filling):
        return store.fill(key, start, room, arrived)
    data = store.get_range(key, start, len(room))
    room.put(0, data)
    arrived(0, len(data))
    return len(data)


def ranges_of(store: Store) -> Parts:
    """Return how large ranges of ``store`` are best read, and how many at once."""
    return store.ranges if isinstance(store, Filling) else Parts(in_flight=4)


def files_at_once(store: Store, size_bytes: int) -> int:
    """Return how many objects of ``size_bytes`` may be on their way to ``store`` at once.

    Their parts together are as many as the store wants on their way, or those of one object. A
    store that bounds them by itself is given some more files, so that it always has parts to send.
    """
    best = ranges_of(store)
    if best.are_shared:
        return min(max(2 * best.in_flight // best.count_for(size_bytes), 2), _SHARING_MAX)
    return max(best.in_flight // max(-(-size_bytes // best.part_bytes), 1), 1)
