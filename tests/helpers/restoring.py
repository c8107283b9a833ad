"""Restore a repository as two ranks would, without starting processes."""

from __future__ import annotations

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.refs import resolve
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from resilient.testing.memory_store import run_ranks
from tests.helpers.manifests import Values


def restored_step(folder) -> tuple[int, list[str]]:
    """Return the step that two ranks resume from, and what they said on the way."""
    store, events = open_store(str(folder)), []
    assert resolve(store, "latest")

    def rank_main(world, kv_store):
        emit = Emitter(SystemClock(), (lambda record, event: events.append(event.message()),))
        names = {"model", "optimizer", "scheduler", "data", "callbacks", "best", "trainer_state"}
        parts = {name: Part(Values()) for name in names}
        parts |= {name: Part(Values(), "rank") for name in ("rng_state", "meters", "seen")}
        context = CheckpointContext(
            store, ControlGroup(kv_store, world, "test"), CheckpointOptions(), SystemClock(), emit
        )
        checkpointer = CheckpointEngine(context)
        try:
            return checkpointer.resume(parts).step
        finally:
            checkpointer.close()

    steps = set(run_ranks(2, rank_main))
    assert len(steps) == 1
    return steps.pop(), events
