"""A keeper that falls asleep at any point of a save and wakes when its rank has gone on without it.

For a keeper that nobody could kill. Its rank persists the save in its place, if it is not committed
yet, and makes two more; what the keeper then does of its own save takes nothing of that back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.daemon.client import is_committed
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.save.persist import persist
from resilient.checkpoint.verify import verify
from resilient.errors import ResilientError
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.crash.test_reference_races import Interrupted
from tests.helpers.manifests import parts_of
from tests.helpers.one_rank import open_one

FIRST, SLEPT, BEST, LAST = (CheckpointId(1, step) for step in (1, 2, 3, 4))
KEPT = {FIRST: (), SLEPT: (FIRST,), BEST: (BEST,), LAST: (BEST,)}
"""What the run protects at each save: step 1 is the best until step 3 is."""


def jobs_of(store):
    """Return a rank's desk and its jobs, of which it has persisted the first."""
    checkpointer = open_one(store, retention=Retention(keep_last=1))
    taken = []
    checkpointer._persister.submit = lambda desk, job: taken.append((desk, job))
    checkpointer.resume({})
    for one, keep in KEPT.items():
        checkpointer.save(one.step, parts_of(one.step), CheckpointInfo(), keep=keep)
    desk = taken[0][0]
    jobs = {job.about.checkpoint: job for _, job in taken}
    persist(desk, jobs[FIRST])
    return desk, jobs


def history(sleeps_at):
    """Return the store after it all, and how many operations the keeper's save took."""
    store = MemoryStore()
    desk, jobs = jobs_of(store)

    def go_on() -> None:
        if not is_committed(store, SLEPT):
            persist(desk, replace(jobs[SLEPT], topic="here", has_rival=True))
        for one in (BEST, LAST):
            persist(desk, jobs[one])

    asleep = Interrupted(store, {sleeps_at: go_on})
    with suppress(ResilientError):
        persist(replace(desk, store=asleep), replace(jobs[SLEPT], has_rival=True))
    return store, asleep


OPERATIONS = history(-1)[1].operations


def test_the_save_has_operations_to_sleep_at():
    assert OPERATIONS > 8


@pytest.mark.parametrize("sleeps_at", range(OPERATIONS))
def test_a_keeper_that_wakes_takes_nothing_back(sleeps_at):
    store, asleep = history(sleeps_at)
    assert not asleep.turns
    there = committed(store)
    assert there[0] == LAST
    assert BEST in there
    # Between its last look and its manifest a rotation may have taken files of its own save, which
    # is then there and damaged until the next rotation; nobody who goes on begins there.
    assert [one for one in there if one != SLEPT and verify(store, one, "deep")] == []
