"""How a save ended whose keeper died before it could say so."""

import pytest
from manifests import empty_manifest, save

from resilient.clock import SystemClock
from resilient.errors import SaveFailed
from resilient.events import Emitter
from resilient.format.names import CheckpointId
from resilient.testing.memory import MemoryStore
from resilient.vault.desk import Desk, Limits
from resilient.vault.keeper.verdict import find_verdict
from resilient.vault.saving.persist import Job
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

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
    comms = Comms(MemoryBoard(), World(), "verdict")
    desk = Desk(store, comms, Limits(), clock, Emitter(clock, ()))
    job = Job(empty_manifest(CHECKPOINT), (), (), (), True, "save/1", 0.0, float)
    find_verdict(desk, job, None, "it was killed")


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
