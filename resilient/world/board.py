"""The Board: a small key-value place that all ranks of a life can see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence


class Board(Protocol):
    """Verbs over keys; values are bytes. It never touches the collective backend.

    A board may be used by one thread at a time; ``another`` gives a second thread its own.
    """

    def post(self, key: str, value: bytes) -> None:
        """Set ``key``; the last value wins.

        Raises:
            PeerFailed: the place is gone (its host died).
        """

    def peek(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if nobody posted it yet; never waits."""

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Return the values of all ``keys`` once posted, or None when the time is over."""

    def remove(self, key: str) -> None:
        """Forget ``key``; a missing one is no error."""

    def another(self) -> Board:
        """Return a board on the same place for use by another thread."""

    def here(self) -> str:
        """Return the address of this host as the others on the board reach it."""


@runtime_checkable
class Closing(Protocol):
    """A board with a connection that somebody must end."""

    def close(self) -> None:
        """End the connection."""
