"""How a save ended whose keeper died before it could say so."""

import pytest

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon.client import resolve_outcome
from resilient.checkpoint.save.persist import SaveJob
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import SaveFailed
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import empty_manifest, save

CHECKPOINT = CheckpointId(1, 1)


class Forgetful(MemoryStore):
    """Does not answer the first time it is asked whether an object is there."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def stat(self, key):
        self.asked += 1
        if self.asked == 1:
            raise SaveFailed("no answer")
        return super().stat(key)


def ask(store) -> None:
    clock = SystemClock()
    comms = ControlGroup(InMemoryKVStore(), World(), "verdict")
    desk = CheckpointContext(store, comms, CheckpointOptions(), clock, Emitter(clock, ()))
    job = SaveJob(empty_manifest(CHECKPOINT), (), (), (), True, "save/1", 0.0, float)
    resolve_outcome(desk, job, None, "it was killed")


@pytest.mark.parametrize("kind", [MemoryStore, Forgetful])
def test_what_is_committed_was_saved_although_nobody_heard_it(kind):
    store = kind()
    written = MemoryStore()
    save(written, CHECKPOINT)
    store.objects = written.objects
    ask(store)


def test_what_is_not_committed_was_not_saved_and_the_error_says_what_is_safe():
    with pytest.raises(SaveFailed, match="it was killed; older checkpoints are intact"):
        ask(MemoryStore())
