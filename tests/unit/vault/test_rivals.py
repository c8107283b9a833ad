"""Two jobs at one repository: what one changes while the other looks is no loss."""

from __future__ import annotations

import pytest
from manifests import begin, save

from resilient.clock import SystemClock
from resilient.errors import Fenced
from resilient.events import Emitter
from resilient.format.names import CHECKPOINTS, GENERATIONS, CheckpointId
from resilient.testing.memory import MemoryStore
from resilient.vault import begin as beginning
from resilient.vault.desk import Desk, Limits
from resilient.vault.reading.choose import Choice, choose
from resilient.vault.reading.read import Proved, Wanted
from resilient.vault.registry.catalog import lineage, read_manifest
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

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
    return Comms(MemoryBoard(), World(), "rivals")


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
    chosen = choose(store, comms(), "auto", Wanted(), 5.0)
    assert chosen.checkpoint == SECOND
    assert [one.name for one in chosen.skipped] == []


def test_no_life_begins_from_what_was_rotated_away_while_it_loaded():
    store = MemoryStore()
    begin(store, None)
    save(store, FIRST)
    choice = Choice(Proved(read_manifest(store, FIRST), {}), ())
    save(store, SECOND)
    forget(store, FIRST)
    clock = SystemClock()
    desk = Desk(store, comms(), Limits(), clock, Emitter(clock))
    with pytest.raises(Fenced, match="was rotated away"):
        beginning.begin(desk, choice, "start")
    assert lineage(store).candidates == (SECOND,)
