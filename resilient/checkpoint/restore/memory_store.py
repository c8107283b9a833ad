"""Store wrapper that reads files from the saver daemon's memory if they are intact there."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.tiers.tiered_store import TieredStore, use_other_replica
from resilient.errors import IntegrityError
from resilient.format.digest import CHUNK_BYTES, FileDigest, digest_file
from resilient.storage.shared_memory import map_file
from resilient.storage.store import ObjectInfo
from resilient.storage.transfer import max_ranges, read_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from resilient.storage.store import Data, Store
    from resilient.storage.transfer import Arrived, ScatterBuffer

_PIECE_BYTES = 512 << 10
"""Piece size that fits a core's own cache, so that bytes are digested before they leave it."""


class MemoryCachedStore:
    """Store that reads files from shared memory if they still equal the stored files.

    Only the wrapped store decides which objects exist. Manifests and generation records are never
    taken from memory. So memory can speed up a resume and never changes its result. Files that
    changed in memory are read from the store instead.

    Args:
        store: Repository.
        record: Files in shared memory, by key.
        emit: Callback with the key of a file that changed in memory; called once per file.
    """

    def __init__(
        self, store: Store, record: Mapping[str, StagedFileRecord], emit: Callable[[str], None]
    ) -> None:
        self._store = store
        self._files = dict(record)
        self._emit = emit
        self.url = store.url
        self.exclusive = store.exclusive
        self.ranges = max_ranges(store)
        self.recalled_bytes = 0
        self._cached_names: set[str] = set()
        self._lock = threading.Lock()

    @property
    def unverified_keys(self) -> set[str]:
        """Keys whose bytes came from memory, or from a tier that saves are not written to.

        The stored copies of these keys are not verified.
        """
        from_tiers = (
            self._store.unverified_keys if isinstance(self._store, TieredStore) else set[str]()
        )
        return self._cached_names | from_tiers

    def exclude_copy(self, key: str) -> bool:
        """Stop using the near copy of an object, if the store has tiers."""
        return use_other_replica(self._store, key)

    def get(self, key: str) -> bytes:
        """Return the whole object, from memory if it is intact there."""
        record = self._files.get(key)
        data = _read_intact(record) if record else None
        if data is None:
            self._reject(key)
            return self._store.get(key)
        self._count(key, len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of an object, from the store."""
        return self._store.get_range(key, start, length)

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from offset ``start``, from memory if the wanted chunks are intact there.

        The callback verifies each chunk once: ``on_arrival`` raises IntegrityError for wrong bytes.
        For bytes from memory, that error only makes this method read from the store.
        """
        record = self._files.get(key)
        if record is None or not _is_chunks(record, start, start + len(buffer)):
            return read_into(self._store, key, start, buffer, on_arrival)
        if not _fill_from_memory(record, start, buffer, on_arrival):
            self._reject(key)
            return read_into(self._store, key, start, buffer, on_arrival)
        self._count(key, len(buffer))
        return len(buffer)

    def put(self, key: str, data: Data) -> None:
        """Store ``data``."""
        self._store.put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` if the key is free."""
        self._store.put_new(key, data)

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return the objects of the store."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object from the store."""
        self._store.delete(key)

    def stat(self, key: str) -> ObjectInfo:
        """Return the store's entry of an object, or the length of a file in memory."""
        record = self._files.get(key)
        return ObjectInfo(key, record.proof.size_bytes) if record else self._store.stat(key)

    def _reject(self, key: str) -> None:
        with self._lock:
            record = self._files.pop(key, None)
        if record is not None:
            self._emit(key)

    def _count(self, key: str, size_bytes: int) -> None:
        with self._lock:
            self._cached_names.add(key)
            self.recalled_bytes += size_bytes


def _read_intact(record: StagedFileRecord) -> bytes | None:
    """Return a copy of the shared bytes, or None if they are gone or not what was stored."""
    try:
        data = bytes(map_file(Path(record.path), record.proof.size_bytes, writable=False))
    except (OSError, ValueError):
        return None
    return data if digest_file(data) == record.proof else None


def _is_chunks(record: StagedFileRecord, start: int, stop: int) -> bool:
    """Return whether a range consists of whole chunks; only those can be verified."""
    return not start % CHUNK_BYTES and (not stop % CHUNK_BYTES or stop == record.proof.size_bytes)


def _fill_from_memory(
    record: StagedFileRecord, start: int, buffer: ScatterBuffer, on_arrival: Arrived
) -> bool:
    """Fill ``buffer`` with whole chunks of the shared bytes; return whether all are intact."""
    try:
        with Path(record.path).open("rb", buffering=0) as file:
            file.seek(start)
            for at in range(0, len(buffer), _PIECE_BYTES):
                pieces = buffer.cut(at, at + _PIECE_BYTES)
                if any(file.readinto(piece) != len(piece) for piece in pieces):
                    return False
                on_arrival(at, at + sum(map(len, pieces)))
    except (IntegrityError, OSError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class StagedFileRecord:
    """File of a checkpoint in shared memory, with the digests of the stored file.

    Attributes:
        path: Path of the shared file.
        proof: Length and digests of the content.
    """

    path: str
    proof: FileDigest

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        proof = self.proof
        return {"path": self.path, "proof": [proof.size_bytes, proof.digest, list(proof.chunks)]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StagedFileRecord:
        """Return the record that ``to_json`` described."""
        size_bytes, digest, chunks = value["proof"]
        return StagedFileRecord(
            str(value["path"]), FileDigest(int(size_bytes), str(digest), tuple(chunks))
        )
