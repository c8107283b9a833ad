"""A checkpointer of one rank over a store in memory."""

from __future__ import annotations

import threading

from resilient.checkpointer import Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.testing.memory import MemoryStore
from resilient.vault.desk import Desk, Limits
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World


class Held(MemoryStore):
    """Puts of tensors wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.begun: list[str] = []

    def put_new(self, key, data):
        if key.startswith("checkpoint-") and not key.endswith("manifest.json"):
            self.begun.append(key)
            assert self.go_on.wait(20)
        super().put_new(key, data)


def open_one(store, world=None, board=None, **limits) -> Checkpointer:
    comms = Comms(board or MemoryBoard(), world or World(), "life")
    emit = Emitter(SystemClock())
    return Checkpointer(Desk(store, comms, Limits(**limits), SystemClock(), emit))
