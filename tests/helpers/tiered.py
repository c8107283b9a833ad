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
    "desk_over",
    "run_until_crash",
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
    kv_store=None,
    world=None,
    on_event=None,
    scope="life",
    tiering=None,
    clock=None,
    **limits,
) -> CheckpointContext:
    clock = clock or SystemClock()
    comms = ControlGroup(kv_store or InMemoryKVStore(), world or World(), scope)
    emit = Emitter(clock, (on_event,) if on_event else ())
    limits = CheckpointOptions(**{"retention": Retention(KEEP), "within_seconds": 20.0, **limits})
    return add_near_tier(
        CheckpointContext(durable, comms, limits, clock, emit),
        near,
        tiering or TieringOptions(every, 2),
    )


def train(near, durable, until=STEPS, every=2, *, attempt=None, on_event=None) -> Life:
    """Resume, train to ``until`` saving every step, and close; raise what it died of."""
    attempt = attempt or Life()
    state = Folded(0, is_large=True)
    parts = {"model": Part(state)}
    checkpointer = CheckpointEngine(desk_over(near, durable, every, on_event=on_event))
    try:
        result = checkpointer.resume(parts)
        attempt.started_at = result.step if result else 0
        while state.steps < until:
            state.step()
            checkpoint = checkpointer.save(state.steps, parts, CheckpointInfo())
            checkpointer.wait()
            attempt.acknowledged.append(checkpoint)
    finally:
        checkpointer.close()
    attempt.final = state.ending()
    return attempt


def run_until_crash(near, durable, **options) -> Life:
    """Return how far a life came that may die."""
    attempt = Life()
    try:
        train(near, durable, attempt=attempt, **options)
    except (Crash, ResilientError) as error:
        attempt.died = isinstance(error, Crash)
        attempt.error = error
    return attempt


def steps(store) -> list[int]:
    return [checkpoint.step for checkpoint in committed(store)]


def checkpointer_of(near, durable, every=1, **limits) -> CheckpointEngine:
    checkpointer = CheckpointEngine(desk_over(near, durable, every, **limits))
    checkpointer.resume({})
    return checkpointer


def save(checkpointer, *at, keep=()) -> None:
    for step in at:
        checkpointer.save(step, {}, CheckpointInfo(), keep=keep)
        checkpointer.wait()
