"""Two jobs at one repository: what one changes while the other looks is no loss."""

from __future__ import annotations

import pytest

from resilient.checkpoint import start_generation as beginning
from resilient.checkpoint.catalog import lineage, read_manifest
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore.read import ReadRequest, VerifiedCheckpoint
from resilient.checkpoint.resume_selection import ResumeChoice, select_resume_checkpoint
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import Fenced
from resilient.events import Emitter
from resilient.format.keys import CHECKPOINTS, GENERATIONS, CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, save

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)


class Watched(MemoryStore):
    """Lets a rival act right after the first listing of a prefix."""

    def __init__(self, prefixes, rival):
        super().__init__()
        self._prefixes, self._rival = prefixes, rival

    def list(self, prefix=""):
        found = super().list(prefix)
        if prefix in self._prefixes and self.objects:
            rival, self._rival = self._rival, lambda _: None
            rival(self)
        return found


def forget(store, checkpoint):
    for key in [one for one in store.objects if one.startswith(checkpoint.folder)]:
        del store.objects[key]


def comms():
    return ControlGroup(InMemoryKVStore(), World(), "rivals")


@pytest.mark.parametrize("first", [CHECKPOINTS, GENERATIONS])
def test_a_life_that_a_rival_begins_between_two_listings_is_no_loss(first):
    def rival(store):
        save(store, SECOND)
        begin(store, SECOND)
        forget(store, FIRST)

    store = Watched((), rival)
    begin(store, None)
    save(store, FIRST)
    store._prefixes = (first,)
    known = lineage(store)
    assert known.lost == ""
    assert known.candidates[0] in (FIRST, SECOND)


def test_what_a_rival_rotated_away_after_the_plan_leads_to_another_look():
    def rival(store):
        save(store, SECOND)
        forget(store, FIRST)

    store = Watched((), rival)
    begin(store, None)
    save(store, FIRST)
    store._prefixes = (CHECKPOINTS,)
    chosen = select_resume_checkpoint(store, comms(), "auto", ReadRequest(), 5.0)
    assert chosen.checkpoint == SECOND
    assert [one.name for one in chosen.skipped] == []


def test_no_life_begins_from_what_was_rotated_away_while_it_loaded():
    store = MemoryStore()
    begin(store, None)
    save(store, FIRST)
    choice = ResumeChoice(VerifiedCheckpoint(read_manifest(store, FIRST), {}), ())
    save(store, SECOND)
    forget(store, FIRST)
    clock = SystemClock()
    desk = CheckpointContext(store, comms(), CheckpointOptions(), clock, Emitter(clock))
    with pytest.raises(Fenced, match="was deleted"):
        beginning.start_generation(desk, choice, "start")
    assert lineage(store).candidates == (SECOND,)
