"""A deleter and a writer at once: every point of the one, with the other in between.

The histories have frozen tensors, so checkpoints refer to files of older folders. In each order,
every committed checkpoint reads back whole: those of the line of descent and all others.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from itertools import combinations

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.garbage_collection import apply_plan, collect_garbage, scan_and_plan
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.dedup import make_dedup_base
from resilient.errors import Fenced, ResilientError
from resilient.format.keys import CheckpointId
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, frozen_parts_of, save

LAST = Retention(keep_last=1)


class Interrupted(FaultyStore):
    """Lets another process do something before the operations of these numbers."""

    def __init__(self, store, turns) -> None:
        super().__init__(store)
        self.turns = dict(turns)

    def _run(self, *args):
        turn = self.turns.pop(self.operations, None)
        if turn:
            turn()
        return super()._run(*args)


def history(lives=1) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(_written(lives))
    return store


@cache
def _written(lives) -> dict[str, bytes]:
    store = MemoryStore()
    begin(store)
    for step in (1, 2, 3, 4):
        goes_on(store, step)
    for _ in range(lives - 1):
        begin(store, CheckpointId(1, 4))
    return store.objects


def goes_on(store, step=0) -> None:
    """The newest life saves and rotates; its first save compares with where it began."""
    life = max(list_numbers(store))
    newest = next(iter(lineage(store).candidates), None)
    checkpoint = CheckpointId(life, step or newest.step + 1)
    bases = [newest] if newest else []
    save(store, checkpoint, bases=bases, parts=frozen_parts_of(checkpoint.step), parent=None)
    collect_garbage(store, Retention(keep_last=2), life, written=checkpoint)


def prune(store) -> None:
    apply_plan(store, scan_and_plan(store, LAST, in_full=True), max(list_numbers(store)))


def resumes(store) -> None:
    """Another life begins from the newest that it can read, and saves."""
    for one in lineage(store).candidates:
        with suppress(ResilientError):
            proved = read(store, one)
            break
    else:
        return
    life = begin(store, proved.manifest.checkpoint)
    step = proved.manifest.checkpoint.step + 1
    bases = [make_dedup_base(proved, store)]
    save(store, CheckpointId(life, step), bases=bases, parts=frozen_parts_of(step))


def broken(store) -> list[str]:
    found = []
    for one in committed(store):
        try:
            read(store, one)
        except ResilientError as error:
            found.append(f"{one}: {error}")
    return found


def length(work, lives) -> int:
    counting = FaultyStore(history(lives))
    work(counting)
    return counting.operations


@pytest.mark.parametrize("lives", [1, 2])
@pytest.mark.parametrize(
    ("one", "other"),
    [(prune, goes_on), (goes_on, prune), (prune, resumes), (goes_on, resumes), (resumes, prune)],
    ids=lambda work: work.__name__,
)
def test_whoever_comes_between_every_committed_checkpoint_is_whole(
    one, other, lives, count_states, thinned
):
    """Once in the midst of the other, at every point; and twice, at pairs of points.

    With two lives, a third of the pairs.
    """
    operations = length(one, lives)
    singles = [(at,) for at in range(operations)]
    pairs = list(combinations(range(operations), 2))
    cases = singles + thinned(pairs if lives == 1 else pairs[::3])
    found = []
    for places in cases:
        store = history(lives)
        with suppress(Fenced):
            one(Interrupted(store, dict.fromkeys(places, partial(other, store))))
        found += [(places, problem) for problem in broken(store)]
    count_states(len(cases), len(found))
    assert not found, found[:5]


def test_the_histories_hold_references():
    store = history(2)
    goes_on(store)
    prune(store)
    (newest,) = committed(store)
    assert {one.origin for one in read(store, newest).manifest.files} > {None, CheckpointId(1, 1)}
