"""A little run over a near and a durable tier, both on one shelf so that they can die together."""

from __future__ import annotations

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.promotion import add_near_tier
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import ResilientError
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import Crash
from tests.crash.lives import Folded, Life
from tests.crash.shelf import Shelf

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
) -> CheckpointContext:
    clock = clock or SystemClock()
    comms = ControlGroup(board or InMemoryKVStore(), world or World(), scope)
    emit = Emitter(clock, (told,) if told else ())
    limits = CheckpointOptions(**{"retention": Retention(KEEP), "within_seconds": 20.0, **limits})
    return add_near_tier(
        CheckpointContext(durable, comms, limits, clock, emit),
        near,
        tiering or TieringOptions(every, 2),
    )


def train(near, durable, until=STEPS, every=2, *, life=None, told=None) -> Life:
    """Resume, train to ``until`` saving every step, and close; raise what it died of."""
    life = life or Life()
    state = Folded(0, is_large=True)
    parts = {"model": Part(state)}
    checkpointer = CheckpointEngine(desk_over(near, durable, every, told=told))
    try:
        resumed = checkpointer.resume(parts)
        life.started_at = resumed.step if resumed else 0
        while state.steps < until:
            state.step()
            checkpoint = checkpointer.save(state.steps, parts, CheckpointInfo())
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


def checkpointer_of(near, durable, every=1, **limits) -> CheckpointEngine:
    checkpointer = CheckpointEngine(desk_over(near, durable, every, **limits))
    checkpointer.resume({})
    return checkpointer


def save(checkpointer, *at, keep=()) -> None:
    for step in at:
        checkpointer.save(step, {}, CheckpointInfo(), keep=keep)
        checkpointer.wait()
