"""Other checkpoints of a run as places of the same chunks: what did not change is there too.

A chunk is told by its digest, so one of another step with the same digest is the same bytes: of
weights that are frozen, of documents that are alike.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.vault.registry.catalog import committed, read_manifest

if TYPE_CHECKING:
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store


class Sibling:
    """Another checkpoint, read by the keys of the damaged one.

    Attributes:
        url: its name, for people.
    """

    def __init__(self, store: Store, damaged: Manifest, other: Manifest) -> None:
        self.url = str(other.checkpoint)
        self._store, self._other = store, other
        self._names = {damaged.key(one.name): one.name for one in damaged.files}
        self._entries = {one.name: one for one in other.files}

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return bytes of the file of the same name there.

        Raises:
            KeyNotFound: it has no such file.
            StoreError: it could not be read.
        """
        entry = self._entries.get(self._names.get(key, ""))
        if entry is None:
            raise KeyNotFound(f"no `{key}` in {self.url}", key=key)
        return self._store.get_range(self._other.key(entry.name), start, length)

    def may_have(self, entry: FileEntry, number: int) -> bool:
        """Say whether a chunk should be there, by what its manifest says."""
        held = self._entries.get(entry.name)
        return held is not None and entry.chunks[number] == _chunk(held, number)


def siblings_of(store: Store, manifest: Manifest) -> list[Sibling]:
    """Return the other checkpoints of a repository that have a chunk in common with one.

    Crash: reads only.
    """
    found = []
    for checkpoint in committed(store):
        if checkpoint == manifest.checkpoint:
            continue
        with suppress(IntegrityError, KeyNotFound, IncompatibleCheckpoint):
            other = Sibling(store, manifest, read_manifest(store, checkpoint))
            if any(_shares(other, one) for one in manifest.files):
                found.append(other)
    return found


def _shares(other: Sibling, entry: FileEntry) -> bool:
    return any(other.may_have(entry, number) for number in range(len(entry.chunks)))


def _chunk(entry: FileEntry, number: int) -> str | None:
    return entry.chunks[number] if number < len(entry.chunks) else None
