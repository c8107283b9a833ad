"""A little run over a near and a durable tier, both on one shelf so that they can die together."""

from __future__ import annotations

from lives import Folded, Life
from shelf import Shelf

from resilient.checkpointer import About, Checkpointer
from resilient.clock import SystemClock
from resilient.errors import ResilientError
from resilient.events import Emitter
from resilient.state.capture import Part
from resilient.testing.faults import Crash
from resilient.vault.desk import Desk, Limits
from resilient.vault.registry.catalog import committed
from resilient.vault.registry.retention import Retention
from resilient.vault.saving.near import with_near_tier
from resilient.vault.saving.tiering import Tiering
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

__all__ = [
    "KEEP",
    "STEPS",
    "Shelf",
    "checkpointer_of",
    "crashed",
    "desk_over",
    "save",
    "steps",
    "train",
]

STEPS = 4
KEEP = 2


def desk_over(  # noqa: PLR0913 - what tests vary
    near,
    durable,
    every=2,
    *,
    board=None,
    world=None,
    told=None,
    scope="life",
    tiering=None,
    clock=None,
    **limits,
) -> Desk:
    clock = clock or SystemClock()
    comms = Comms(board or MemoryBoard(), world or World(), scope)
    emit = Emitter(clock, (told,) if told else ())
    limits = Limits(**{"retention": Retention(KEEP), "within_seconds": 20.0, **limits})
    return with_near_tier(
        Desk(durable, comms, limits, clock, emit), near, tiering or Tiering(every, 2)
    )


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


def steps(store) -> list[int]:
    return [one.step for one in committed(store)]


def checkpointer_of(near, durable, every=1, **limits) -> Checkpointer:
    checkpointer = Checkpointer(desk_over(near, durable, every, **limits))
    checkpointer.resume({})
    return checkpointer


def save(checkpointer, *at, keep=()) -> None:
    for step in at:
        checkpointer.save(step, {}, About(), keep=keep)
        checkpointer.wait()
