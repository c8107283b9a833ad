"""What can be seen and is not durable yet: a process that was killed left it, and nobody synced it.

Who builds on it could lose it later: a power loss takes back a name that somebody has read, or
brings back a manifest whose files were swept since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from resilient.storage.store import is_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from resilient.storage.files import Files
    from resilient.storage.store import Store


@runtime_checkable
class Settling(Protocol):
    """A store where there is a difference, or which wraps one that may be such."""

    def settle(self) -> None:
        """Make durable whatever can be seen now; once for a process is enough.

        Raises:
            StoreError: it could not be made durable, so nothing may be built upon it.
        """


def settle(store: Store) -> None:
    """Make durable what can be seen in ``store``, where that is not one and the same.

    Raises:
        StoreError: it could not be made durable.
    """
    if isinstance(store, Settling):
        store.settle()


def folders_of(files: Files, folder: Path) -> Iterator[Path]:
    """Return a store's folders, each before the one that holds its name."""
    for item in files.items(folder):
        if item.is_folder and is_key(item.name):
            yield from folders_of(files, folder / item.name)
    yield folder
