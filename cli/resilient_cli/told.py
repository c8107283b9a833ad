"""A Store and a Folder for reading that say how much was read of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_cli.listed import ListedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.storage.folder import Folder, Listing
    from resilient.storage.store import Store

    Told = Callable[[int, int], None]


class ToldStore(ListedStore):
    """Another store, whose reader is told.

    Args:
        inner: the store itself.
        told: called with bytes read and bytes that will be.
        of_bytes: how many will be; more when more is read.
    """

    def __init__(self, inner: Store, told: Told, of_bytes: int) -> None:
        super().__init__(inner)
        self._told, self._of_bytes, self._done = told, of_bytes, 0

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._tell(super().get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a piece of the object."""
        return self._tell(super().get_range(key, start, length))

    def _tell(self, data: bytes) -> bytes:
        self._done += len(data)
        self._told(self._done, max(self._done, self._of_bytes))
        return data


class ToldFolder:
    """Another folder, whose reader is told.

    Args:
        inner: the folder itself.
        told: called with bytes read and bytes that are there.
        of_bytes: how many those are, if it is not listed.
    """

    def __init__(self, inner: Folder, told: Told, of_bytes: int = 0) -> None:
        self.url = inner.url
        self._inner, self._told, self._of_bytes = inner, told, of_bytes
        self._done = 0
        self._seen: dict[str, list[tuple[int, int]]] = {}

    @property
    def seen_bytes(self) -> int:
        """How many bytes were read, each counted once."""
        return sum(end - start for spans in self._seen.values() for start, end in spans)

    def list(self) -> Listing:
        """Return what is there now."""
        found = self._inner.list()
        self._of_bytes = sum(found.sizes.values())
        return found

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        data = self._inner.read(name, start, length)
        self._done += len(data)
        self._told(self._done, max(self._done, self._of_bytes))
        self._seen[name] = _joined(self._seen.get(name, []), start, start + len(data))
        return data


def _joined(spans: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return spans with one more, those that meet it joined with it."""
    apart = [one for one in spans if one[1] < start or one[0] > end]
    met = [one for one in spans if one[1] >= start and one[0] <= end]
    met.append((start, end))
    return [*apart, (min(one[0] for one in met), max(one[1] for one in met))]
