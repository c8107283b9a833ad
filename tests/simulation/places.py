"""The two places that simulated ranks share: a store and a board, each behind a bad network."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import PeerFailed, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from resilient.storage.store import Data, ObjectInfo
    from resilient.testing.memory_store import MemoryStore
    from tests.simulation.loop import Loop

_CUT_SECONDS_MAX = 30.0
"""A connection that is silent for longer is given up."""


@dataclass
class Link:
    """A process's way to the places: what is lost is sent again, so it only comes later.

    Attributes:
        loss: share of messages that must be sent again.
        error: share of a store's answers that are a 503, half of them after the effect.
        cut_until_seconds: nothing passes before.
        sick_until_seconds: the store does not serve this host before; the board does.
    """

    loop: Loop
    loss: float = 0.0
    error: float = 0.0
    cut_until_seconds: float = 0.0
    sick_until_seconds: float = 0.0

    def cross(self) -> bool:
        """Take as long as a message takes; say whether it came through."""
        left_seconds = self.cut_until_seconds - self.loop.now_seconds
        if left_seconds > _CUT_SECONDS_MAX:
            self.loop.sleep(_CUT_SECONDS_MAX)
            return False
        seconds = max(left_seconds, 0.0) + self.loop.draw.expovariate(1 / 0.002)
        while self.loop.draw.random() < self.loss:
            seconds += self.loop.draw.uniform(0.2, 3.0)
        self.loop.sleep(seconds)
        return True

    def fails(self) -> bool:
        """Say whether the store's answer is an error."""
        is_sick = self.loop.now_seconds < self.sick_until_seconds
        return is_sick or self.loop.draw.random() < self.error


class SimStore:
    """One process's view of a MemoryStore that all share.

    Args:
        shared: the objects.
        link: the way there.
        seen: told of each write that has happened, at once; of a deletion with None.
    """

    exclusive = True

    def __init__(
        self, shared: MemoryStore, link: Link, seen: Callable[[str, bytes | None], None]
    ) -> None:
        self.url = shared.url
        self._shared = shared
        self._link = link
        self._seen = seen

    def put(self, key: str, data: Data) -> None:
        self._write(self._shared.put, key, data)

    def put_new(self, key: str, data: Data) -> None:
        self._write(self._shared.put_new, key, data)

    def get(self, key: str) -> bytes:
        with self._asked(key):
            return self._shared.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._asked(key):
            return self._shared.get_range(key, start, length)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        with self._asked(prefix):
            return list(self._shared.list(prefix))

    def delete(self, key: str) -> None:
        with self._asked(key):
            self._shared.delete(key)
            self._seen(key, None)

    def stat(self, key: str) -> ObjectInfo:
        with self._asked(key):
            return self._shared.stat(key)

    def _write(self, write: Callable[[str, Data], None], key: str, data: Data) -> None:
        content = bytes(data)
        with self._asked(key):
            write(key, content)
            self._seen(key, content)

    @contextmanager
    def _asked(self, key: str) -> Iterator[None]:
        """Go there, be served or not, and come back or not."""
        if not self._link.cross() or self._link.fails():
            raise StoreUnavailable(f"503 for `{key}`", key=key)
        yield
        if not self._link.cross() or self._link.fails():
            raise StoreUnavailable(f"no answer about `{key}`", key=key)


class Hub:
    """What the board of one life holds, on the host that serves it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.values: dict[str, bytes] = {}
        self.is_gone = False
        self.requests = 0
        self.sent_bytes = 0

    def lose(self) -> None:
        """Die with the host: all who ask or wait learn it."""
        self.is_gone = True
        self.loop.changed()


class SimBoard:
    """One process's view of a board.

    Args:
        hub: the place.
        link: the way there.
    """

    def __init__(self, hub: Hub, link: Link) -> None:
        self._hub = hub
        self._link = link

    def post(self, key: str, value: bytes) -> None:
        with self._asked(len(key) + len(value)) as values:
            values[key] = value
            self._hub.loop.changed()

    def peek(self, key: str) -> bytes | None:
        with self._asked(len(key)) as values:
            return values.get(key)

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        hub = self._hub
        with self._asked(sum(map(len, keys))) as values:
            hub.loop.wait(lambda: hub.is_gone or all(key in values for key in keys), within_seconds)
            held = [values.get(key) for key in keys]
        return None if None in held else held  # type: ignore[return-value]

    def remove(self, key: str) -> None:
        with self._asked(len(key)) as values:
            values.pop(key, None)

    def another(self) -> SimBoard:
        return self

    def here(self) -> str:
        return "127.0.0.1"

    @contextmanager
    def _asked(self, size_bytes: int) -> Iterator[dict[str, Any]]:
        self._hub.requests += 1
        self._hub.sent_bytes += size_bytes
        self._reach()
        yield self._hub.values
        self._reach()

    def _reach(self) -> None:
        if not self._link.cross() or self._hub.is_gone:
            raise PeerFailed("the board is gone", rank=0)
