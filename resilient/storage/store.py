"""Store protocol, optional capabilities (free space, sweep).

The Store: immutable objects by key, and what it promises.

How much room is left: something that some stores can tell and others cannot.
"""

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
"""What may be put: any contiguous buffer of bytes."""

_SEGMENT = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]*")
_KEY_LENGTH_MAX = 900


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """What a store knows of an object without reading it.

    Attributes:
        key: the key, relative to the store's root.
        size_bytes: length of the content in bytes.
    """

    key: str
    size_bytes: int


class Store(Protocol):
    """Objects by key under one root.

    Every implementation promises:

    * **Atomic**: a reader sees all of an object or none of it, whenever the writer dies.
    * **Durable**: when ``put`` or ``put_new`` returns, the object survives a power loss.
    * **Exclusive**: of any number of ``put_new`` for one key, by any processes, exactly one
      returns; the others raise ``KeyExists`` and change nothing. A store that cannot promise
      this has ``exclusive = False`` and its ``put_new`` raises ``NotExclusive``.
    * **Read your writes**: ``get``, ``stat`` and ``list`` see every put and delete that returned.
    * **Keys**: relative, segments of ``[A-Za-z0-9._@+=-]`` joined by ``/``, no segment begins
      with a dot; anything else raises ``StoreError``. Names outside the grammar are invisible.
    * **Errors**: only ``StoreError`` and its subclasses leave a store.

    A ``put`` that raised may or may not have happened; both are whole. Methods may be called
    from several threads at once.
    """

    url: str
    exclusive: bool

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key``, replacing what was there.

        Raises:
            StoreFull: no space; the old object, if any, is intact.
            StoreDenied: not allowed to write.
            StoreUnavailable: the store did not answer; trying again is safe.
        """

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key`` only if no object has that key.

        Raises:
            KeyExists: the key is taken; nothing was changed.
            NotExclusive: this store cannot promise it.
        """

    def get(self, key: str) -> bytes:
        """Return the whole object.

        Raises:
            KeyNotFound: no such object.
        """

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end.

        Raises:
            KeyNotFound: no such object.
        """

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""

    def stat(self, key: str) -> ObjectInfo:
        """Return the object's entry.

        Raises:
            KeyNotFound: no such object.
        """


@runtime_checkable
class Sweepable(Protocol):
    """A store where a killed writer leaves more than objects."""

    def sweep(
        self, is_ours: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Remove what unfinished writes left, and return the keys they were for.

        Args:
            is_ours: says of a key whether what was left of writing it may go.
            older_than_seconds: only what was begun longer ago.
            clock: for the present time.

        Raises:
            ConfigError: a package is missing for it.
            StoreError: the store refused, or did not answer.
        """


def check_key(key: str) -> str:
    """Return ``key`` if it follows the grammar of keys.

    Raises:
        StoreError: it is empty, too long, absolute, climbs with ``..`` or has other characters.
    """
    if not is_key(key):
        raise StoreError(f"not a key of a store: {key[:80]!r}", key=key)
    return key


def is_key(key: str) -> bool:
    """Say whether ``key`` follows the grammar; foreign files and temporary ones do not."""
    return len(key) <= _KEY_LENGTH_MAX and all(_SEGMENT.fullmatch(part) for part in key.split("/"))


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
