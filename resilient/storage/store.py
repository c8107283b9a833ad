"""Protocol of an object store, and optional capabilities (free space, removal of leftovers)."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from resilient.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from resilient.clock import Clock

Data = bytes | bytearray | memoryview
"""Any contiguous buffer of bytes."""

_SEGMENT = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]*")
_KEY_LENGTH_MAX = 900


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """Key and size of an object, known without reading its content.

    Attributes:
        key: Key, relative to the store's root.
        size_bytes: Length of the content in bytes.
    """

    key: str
    size_bytes: int


class Store(Protocol):
    """Objects by key under one root.

    Every implementation promises:

    * **Atomic**: a reader sees a whole object or no object, even if the writer dies.
    * **Durable**: when ``put`` or ``put_new`` returns, the object survives a power loss.
    * **Exclusive**: if several processes call ``put_new`` for one key, exactly one call returns.
      The other calls raise ``KeyExists`` and change nothing. A store that cannot promise this
      has ``exclusive = False``, and its ``put_new`` raises ``NotExclusive``.
    * **Read your writes**: ``get``, ``stat`` and ``list`` see every put and delete that returned.
    * **Keys**: relative, segments of ``[A-Za-z0-9._@+=-]`` joined by ``/``; no segment begins
      with a dot. Any other key raises ``StoreError``. Names outside the grammar are invisible.
    * **Errors**: a store raises only ``StoreError`` and its subclasses.

    A ``put`` that raised may have stored the object or not; it never stores a part of it. Methods
    may be called from several threads at once.
    """

    url: str
    exclusive: bool

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` and replace an existing object.

        Raises:
            StoreFull: There is no space; the old object, if any, is intact.
            StoreDenied: The store does not allow the write.
            StoreUnavailable: The store did not answer; a retry is safe.
        """

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        Raises:
            KeyExists: The key is taken; nothing was changed.
            NotExclusive: This store cannot promise exclusive creation.
        """

    def get(self, key: str) -> bytes:
        """Return the whole object.

        Raises:
            KeyNotFound: The store has no such object.
        """

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end.

        Raises:
            KeyNotFound: The store has no such object.
        """

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """List every object whose key begins with ``prefix``, in the order of keys."""

    def delete(self, key: str) -> None:
        """Delete the object; a missing object is not an error."""

    def stat(self, key: str) -> ObjectInfo:
        """Return the key and the size of the object.

        Raises:
            KeyNotFound: The store has no such object.
        """


@runtime_checkable
class Sweepable(Protocol):
    """Store in which a killed writer leaves more than objects."""

    def sweep(
        self, is_deletable: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Delete the leftovers of unfinished writes and return the keys they belonged to.

        Args:
            is_deletable: Predicate of a key: true if its leftovers may be deleted.
            older_than_seconds: Minimum age of deleted leftovers.
            clock: Source of the present time.

        Raises:
            ConfigError: A package that the sweep needs is missing.
            StoreError: The store refused the request or did not answer.
        """


def check_key(key: str) -> str:
    """Return ``key`` if it follows the grammar of keys.

    Raises:
        StoreError: The key is empty, too long or absolute, contains ``..``, or has other
            characters.
    """
    if not is_key(key):
        raise StoreError(f"not a valid key of a store: {key[:80]!r}", key=key)
    return key


def is_key(key: str) -> bool:
    """Return whether ``key`` follows the grammar; foreign and temporary files do not."""
    return len(key) <= _KEY_LENGTH_MAX and all(_SEGMENT.fullmatch(part) for part in key.split("/"))


@runtime_checkable
class FreeSpace(Protocol):
    """A store, or a wrapper of one, that may know its free space.

    This is not one of the seven methods of a Store.
    """

    def free_bytes(self) -> int | None:
        """Return how many bytes may still be put, None if unknown."""


def free_bytes(store: Store) -> int | None:
    """Return how many bytes ``store`` has left, None if unknown."""
    return store.free_bytes() if isinstance(store, FreeSpace) else None


def free_bytes_at(folder: Path) -> int | None:
    """Return how many bytes statvfs(3) lets an ordinary user still write under ``folder``.

    Before the folder exists, its nearest existing parent is measured. The result is None for a
    file system without a size, as some network file systems report. Quotas are not considered.
    """
    for parent in (folder, *folder.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                stats = os.statvfs(parent)
            except PermissionError:
                return None
            return stats.f_bavail * stats.f_frsize if stats.f_blocks else None
    return None
