"""Reference implementation of Store in memory, and a runner of ranks as threads of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import KeyExists, KeyNotFound
from resilient.storage.store import ObjectInfo, check_key
from resilient.storage.transfer import as_byte_view, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resilient.storage.store import Data


class MemoryStore:
    """Store in this process's memory, with every guarantee of a Store except durability.

    Attributes:
        objects: Stored objects, which a test may inspect or damage.
    """

    exclusive = True

    def __init__(self, url: str = "test://memory") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        """Store a copy of ``data`` under ``key``, replacing an old object."""
        content = bytes(as_byte_view(data, check_key(key)))
        with self._lock:
            self.objects[key] = content

    def put_new(self, key: str, data: Data) -> None:
        """Store a copy of ``data`` under ``key`` only if no object has that key."""
        content = bytes(as_byte_view(data, check_key(key)))
        with self._lock:
            if key in self.objects:
                raise KeyExists(f"cannot create `{key}` in {self.url}: the key is taken", key=key)
            self.objects[key] = content

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        with self._lock:
            return self._find(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``; fewer only at the object's end."""
        check_range(key, start, length)
        with self._lock:
            return self._find(key)[start : start + length]

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        with self._lock:
            return sorted(
                ObjectInfo(key, len(content))
                for key, content in self.objects.items()
                if key.startswith(prefix)
            )

    def delete(self, key: str) -> None:
        """Remove the object; a missing object is not an error."""
        check_key(key)
        with self._lock:
            self.objects.pop(key, None)

    def stat(self, key: str) -> ObjectInfo:
        """Return the object's entry."""
        with self._lock:
            return ObjectInfo(key, len(self._find(key)))

    def _find(self, key: str) -> bytes:
        if check_key(key) not in self.objects:
            raise KeyNotFound(f"cannot get `{key}`: not in {self.url}", key=key)
        return self.objects[key]


Result = TypeVar("Result")


def run_ranks(size: int, rank_main: Callable[[World, InMemoryKVStore], Result]) -> list[Result]:
    """Run ``rank_main`` once per rank, each in its own thread, and return the results by rank.

    Raises:
        BaseException: The error of the lowest failing rank, after all ranks ended.
    """
    kv_store = InMemoryKVStore()
    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [
            pool.submit(rank_main, World(rank, size, rank), kv_store) for rank in range(size)
        ]
    return [future.result() for future in futures]
