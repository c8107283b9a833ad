"""What may be on the disk at each moment, as the user of a store knows it from its answers."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from resilient.errors import KeyExists
from resilient.format.keys import MANIFEST, CheckpointId, split_checkpoint_key
from resilient.storage.store import Sweepable
from tests.crash.little import DURABLE, NEAR, Book

if TYPE_CHECKING:
    from collections.abc import Callable

NOTHING = frozenset([None])


def place_of(key: str) -> str:
    """Return the tier that a key lies in, as the beginning of its keys; empty without tiers."""
    tier, _, _ = key.partition("/")
    return f"{tier}/" if tier in (NEAR, DURABLE) else ""


def manifest_of(key: str) -> CheckpointId | None:
    """Return the checkpoint whose manifest lies under ``key``."""
    checkpoint, name = split_checkpoint_key(key.removeprefix(place_of(key))) or (None, "")
    return checkpoint if name == MANIFEST else None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a crash at this moment may leave.

    Attributes:
        allowed: the contents that each key may have; None: no object.
        in_flight: what the save that is not over has stored.
        newest: the newest acknowledged checkpoint.
        promoted: the newest that was put into the durable tier.
        commits: how many manifests were put so far, by tier.
        doubtful: manifests that a killed process may have put or taken away, until the next
            life has begun.
        pinned: what tags were told to hold.
        damaged: what lost a file that parity can give back.
    """

    allowed: dict[str, frozenset[bytes | None]]
    in_flight: dict[str, bytes]
    newest: CheckpointId | None = None
    promoted: CheckpointId | None = None
    commits: Counter[str] = field(default_factory=Counter)
    doubtful: frozenset[str] = frozenset()
    pinned: frozenset[CheckpointId] = frozenset()
    damaged: frozenset[CheckpointId] = frozenset()


class Ledger(Book):
    """Keeps ``Expected`` up to date and hands each one to ``note``."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.now = Expected({key: frozenset([one]) for key, one in objects.items()}, {})
        self.note = lambda expected: None
        self.see: Callable[[], dict[str, bytes]] | None = None
        self._saving: CheckpointId | None = None
        self._lock = threading.RLock()

    def called(self, key: str, content: bytes | None) -> None:
        """A put or a delete began: both outcomes are allowed."""
        with self._lock:
            self._allow(key, self.now.allowed.get(key, NOTHING) | {content})

    def returned(self, key: str, content: bytes | None) -> None:
        """It returned: only one is."""
        with self._lock:
            if content is not None:
                self._stored(key, content)
            self._allow(key, frozenset([content]))

    def _stored(self, key: str, content: bytes) -> None:
        now, place = self.now, place_of(key)
        checkpoint, _ = split_checkpoint_key(key.removeprefix(place)) or (None, "")
        if checkpoint and checkpoint == self._saving:
            now = replace(now, in_flight=now.in_flight | {key: content})
        if manifest_of(key):
            now = replace(now, commits=now.commits + Counter([place]))
        if manifest_of(key) and place.startswith(DURABLE):
            now = replace(now, promoted=max(filter(None, (now.promoted, checkpoint))))
        self.now = now

    def refused(self, key: str, content: bytes, before: frozenset[bytes | None]) -> None:
        """The key is taken, so this call changed nothing."""
        with self._lock:
            self._allow(key, before | (self.now.allowed[key] - {content}))

    def saving(self, checkpoint: CheckpointId) -> None:
        with self._lock:
            self._saving = checkpoint
            self._change(in_flight={})

    def saved(self, checkpoint: CheckpointId) -> None:
        with self._lock:
            self._saving = None
            newest = max(filter(None, (self.now.newest, checkpoint)))
            self._change(in_flight={}, newest=newest)

    def failed(self) -> None:
        with self._lock:
            self._saving = None
            self._change(in_flight={})

    def died(self) -> None:
        """The process was killed; what it was doing may have happened or not, and may come yet."""
        doubtful = {
            key
            for key, contents in self.now.allowed.items()
            if len(contents) > 1 and manifest_of(key)
        }
        self._saving = None
        self._change(in_flight={}, doubtful=self.now.doubtful | doubtful)

    def began(self, generation: int) -> None:
        """A life began: what it has seen by then is settled."""
        del generation
        if self.see is None:
            return
        there = self.see()
        allowed = {key: frozenset([there.get(key)]) for key in self.now.allowed}
        more = Counter(place_of(key) for key in self.now.doubtful if key in there)
        commits = self.now.commits + more
        self._change(allowed=allowed, commits=commits, doubtful=frozenset())

    def lost_power(self, objects: dict[str, bytes]) -> None:
        """The machine starts again with what is there; that is settled now."""
        keys = self.now.allowed.keys() | objects.keys()
        allowed = {key: frozenset([objects.get(key)]) for key in keys}
        commits = self.now.commits | Counter(place_of(key) for key in objects if manifest_of(key))
        self._saving = None
        self._change(allowed=allowed, in_flight={}, commits=commits, doubtful=frozenset())

    def pin(self, checkpoint: CheckpointId) -> None:
        self._change(pinned=self.now.pinned | {checkpoint})

    def unpin(self, checkpoint: CheckpointId) -> None:
        self._change(pinned=self.now.pinned - {checkpoint})

    def damaged(self, checkpoint: CheckpointId) -> None:
        self._change(damaged=self.now.damaged | {checkpoint})

    def repaired(self, checkpoint: CheckpointId) -> None:
        self._change(damaged=self.now.damaged - {checkpoint})

    def _allow(self, key: str, contents: frozenset[bytes | None]) -> None:
        self._change(allowed=self.now.allowed | {key: contents})

    def _change(self, **fields) -> None:
        with self._lock:
            self.now = replace(self.now, **fields)
            self.note(self.now)


class NotedStore:
    """A store whose calls and answers a ledger hears of.

    To tell the ledger is a turn like any other, or a record would not be the same twice.
    """

    def __init__(self, store, ledger: Ledger, turn=nullcontext) -> None:
        self._turn = turn
        self.url, self.exclusive = store.url, store.exclusive
        self._store, self._ledger = store, ledger
        self.settle = getattr(store, "settle", lambda: None)
        self.get, self.get_range = store.get, store.get_range
        self.list, self.stat = store.list, store.stat
        if isinstance(store, Sweepable):
            # What it removes, nobody sees: uploads and temporary files.
            self.sweep = store.sweep

    def put(self, key, data) -> None:
        content = bytes(data)
        self._called(key, content)
        self._store.put(key, data)
        self._returned(key, content)

    def put_new(self, key, data) -> None:
        content, before = bytes(data), self._ledger.now.allowed.get(key, NOTHING)
        self._called(key, content)
        try:
            self._store.put_new(key, data)
        except KeyExists:
            with self._turn():
                self._ledger.refused(key, content, before)
            raise
        self._returned(key, content)

    def delete(self, key) -> None:
        self._called(key, None)
        self._store.delete(key)
        self._returned(key, None)

    def _called(self, key, content) -> None:
        with self._turn():
            self._ledger.called(key, content)

    def _returned(self, key, content) -> None:
        with self._turn():
            self._ledger.returned(key, content)
