"""A checkpointer of one rank over a store in memory."""

from __future__ import annotations

import threading

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.events import Emitter
from resilient.testing.memory_store import MemoryStore


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


def open_one(store, world=None, kv_store=None, **limits) -> CheckpointEngine:
    comms = ControlGroup(kv_store or InMemoryKVStore(), world or World(), "life")
    emit = Emitter(SystemClock())
    return CheckpointEngine(
        CheckpointContext(store, comms, CheckpointOptions(**limits), SystemClock(), emit)
    )
