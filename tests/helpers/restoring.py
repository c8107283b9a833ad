"""Restore a repository as two ranks would, without starting processes."""

from __future__ import annotations

from manifests import Values

from resilient.checkpointer import Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.state.capture import Part
from resilient.storage.open import open_store
from resilient.testing.gang import run_gang
from resilient.vault.desk import Desk, Limits
from resilient.vault.registry.references import resolve
from resilient.world.comms import Comms


def restored_step(folder) -> tuple[int, list[str]]:
    """Return the step that two ranks resume from, and what they said on the way."""
    store, told = open_store(str(folder)), []
    assert resolve(store, "latest")

    def rank_main(world, board):
        emit = Emitter(SystemClock(), (lambda record, event: told.append(event.line()),))
        names = {"model", "optimizer", "scheduler", "data", "callbacks", "best", "trainer_state"}
        parts = {name: Part(Values()) for name in names}
        parts |= {name: Part(Values(), "rank") for name in ("rng_state", "meters", "seen")}
        desk = Desk(store, Comms(board, world, "test"), Limits(), SystemClock(), emit)
        checkpointer = Checkpointer(desk)
        try:
            return checkpointer.resume(parts).step
        finally:
            checkpointer.close()

    steps = set(run_gang(2, rank_main))
    assert len(steps) == 1
    return steps.pop(), told
