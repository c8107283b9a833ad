"""Two stores in one: what lies under a name of its own, so that both can die together."""

from __future__ import annotations

from resilient.storage.posix import fsync_leftovers
from resilient.storage.store import ObjectInfo, Sweepable


class Shelf:
    """A part of another store, whose keys all begin alike."""

    def __init__(self, store, name) -> None:
        self.store, self.name = store, name
        self.url, self.exclusive = f"test://{name}", store.exclusive

    def put(self, key, data) -> None:
        self.store.put(f"{self.name}/{key}", data)

    def put_new(self, key, data) -> None:
        self.store.put_new(f"{self.name}/{key}", data)

    def get(self, key) -> bytes:
        return self.store.get(f"{self.name}/{key}")

    def get_range(self, key, start, length) -> bytes:
        return self.store.get_range(f"{self.name}/{key}", start, length)

    def list(self, prefix=""):
        begin = len(self.name) + 1
        found = self.store.list(f"{self.name}/{prefix}")
        return [ObjectInfo(one.key[begin:], one.size_bytes) for one in found]

    def delete(self, key) -> None:
        self.store.delete(f"{self.name}/{key}")

    def stat(self, key) -> ObjectInfo:
        return ObjectInfo(key, self.store.stat(f"{self.name}/{key}").size_bytes)

    def sweep(self, is_ours, older_than_seconds, clock) -> tuple[str, ...]:
        if not isinstance(self.store, Sweepable):
            return ()
        begin = f"{self.name}/"

        def is_mine(key: str) -> bool:
            return key.startswith(begin) and is_ours(key.removeprefix(begin))

        gone = self.store.sweep(is_mine, older_than_seconds, clock)
        return tuple(key.removeprefix(begin) for key in gone)

    def settle(self) -> None:
        fsync_leftovers(self.store)
