"""A little run over a near and a durable tier, both on one shelf so that they can die together."""

from __future__ import annotations

from lives import Folded, Life

from resilient.checkpointer import About, Checkpointer
from resilient.clock import SystemClock
from resilient.errors import ResilientError
from resilient.events import Emitter
from resilient.opening import with_near_tier
from resilient.state.capture import Part
from resilient.storage.store import Entry
from resilient.testing.faults import Crash
from resilient.vault.desk import Desk, Limits
from resilient.vault.promoter import Tiering
from resilient.vault.retention import Retention
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

STEPS = 4
KEEP = 2


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
        return [Entry(one.key[begin:], one.size_bytes) for one in found]

    def delete(self, key) -> None:
        self.store.delete(f"{self.name}/{key}")

    def stat(self, key) -> Entry:
        return Entry(key, self.store.stat(f"{self.name}/{key}").size_bytes)


def desk_over(near, durable, every=2, *, board=None, world=None, told=None, **limits) -> Desk:
    clock = SystemClock()
    comms = Comms(board or MemoryBoard(), world or World(), "life")
    emit = Emitter(clock, (told,) if told else ())
    limits = Limits(**{"retention": Retention(KEEP), "within_seconds": 20.0, **limits})
    return with_near_tier(Desk(durable, comms, limits, clock, emit), near, Tiering(every, 2))


def train(near, durable, until=STEPS, every=2, *, life=None, told=None) -> Life:
    """Resume, train to ``until`` saving every step, and close; raise what it died of."""
    life = life or Life()
    state = Folded(0, is_large=True)
    parts = {"model": Part(state)}
    checkpointer = Checkpointer(desk_over(near, durable, every, told=told))
    try:
        resumed = checkpointer.resume(parts)
        life.started_at = resumed.step if resumed else 0
        while state.steps < until:
            state.step()
            checkpoint = checkpointer.save(state.steps, parts, About())
            checkpointer.wait()
            life.acknowledged.append(checkpoint)
    finally:
        checkpointer.close()
    life.final = state.ending()
    return life


def crashed(near, durable, **how) -> Life:
    """Return how far a life came that may die."""
    life = Life()
    try:
        train(near, durable, life=life, **how)
    except (Crash, ResilientError) as error:
        life.died = isinstance(error, Crash)
        life.error = error
    return life
