"""How much room is left: something that some stores can tell and others cannot."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from resilient.storage.store import Store


@runtime_checkable
class FreeSpace(Protocol):
    """A store that can tell, or wraps one that may. Not a part of the seven verbs of a Store."""

    def free_bytes(self) -> int | None:
        """Return how many bytes may still be put, None if nobody knows."""


def free_bytes(store: Store) -> int | None:
    """Return how many bytes ``store`` has left, None if it cannot tell."""
    return store.free_bytes() if isinstance(store, FreeSpace) else None


def free_bytes_at(folder: Path) -> int | None:
    """Return what statvfs(3) says an ordinary user may still write under ``folder``.

    Before the folder is made its nearest parent answers. A file system that has no size, as
    some network ones report, does not know. Quotas are not seen.
    """
    for one in (folder, *folder.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                told = os.statvfs(one)
            except PermissionError:
                return None
            return told.f_bavail * told.f_frsize if told.f_blocks else None
    return None
