"""Crash before and after every store operation of a rollback, an undo and an unlock, and let each
of them fail; then what must hold, and the same command again.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from resilient.checkpoint import commit
from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.fencing import shut_out
from resilient.checkpoint.generations import check_fence, list_numbers
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.rollback import apply_rollback, plan_rollback, plan_undo
from resilient.clock import SystemClock
from resilient.errors import Fenced, ResilientError
from resilient.format.keys import CheckpointId
from resilient.testing.fault_store import (
    Crash,
    FaultPlan,
    FaultyStore,
    StoreFault,
    StoreFaultKind,
    every_crash,
)
from tests.crash.lives import FOREIGN, Witness
from tests.helpers.manifests import begin, frozen_parts_of, save

CLOCK = SystemClock()
TARGET, NEWEST = CheckpointId(1, 2), CheckpointId(2, 4)


def history() -> Witness:
    """Return two lives, of which the second refers to files of the first."""
    store = Witness()
    begin(store)
    for step in (1, 2, 3):
        grow(store, CheckpointId(1, step))
    begin(store, CheckpointId(1, 3))
    grow(store, NEWEST)
    return store


def grow(store, checkpoint) -> None:
    bases = lineage(store).candidates[:1]
    save(store, checkpoint, bases=bases, parts=frozen_parts_of(checkpoint.step))


def rolled_back() -> Witness:
    store = history()
    apply_rollback(store, plan_rollback(store, TARGET), CLOCK)
    return store


def go_back(store) -> None:
    apply_rollback(store, plan_rollback(store, TARGET), CLOCK)


def undo(store) -> None:
    apply_rollback(store, plan_undo(store), CLOCK)


def unlock(store) -> None:
    shut_out(store, CLOCK)


COMMANDS = {
    "rollback": (history, go_back, NEWEST, TARGET),
    "undo": (rolled_back, undo, TARGET, NEWEST),
    "unlock": (history, unlock, NEWEST, NEWEST),
}


def plans(setup, command) -> list[FaultPlan]:
    faulty = FaultyStore(setup())
    command(faulty)
    failures = (StoreFaultKind.ERROR_ONCE, StoreFaultKind.ERROR_AFTER)
    return [
        *every_crash(faulty.operations),
        *(
            FaultPlan(0, (StoreFault(at, kind),))
            for at in range(faulty.operations)
            for kind in failures
        ),
    ]


def violations(before, store, allowed) -> list[str]:
    found = []
    for key, content in before.items():
        if store.objects.get(key) != content:
            found.append(f"1: {key} was changed")
    for one in committed(store):
        try:
            read(store, one)
        except ResilientError as error:
            found.append(f"2: {one} is listed and not whole: {error}")
    if lineage(store).candidates[0] not in allowed:
        found.append(f"3: resume takes {lineage(store).candidates[0]}")
    if any(store.objects.get(key) != content for key, content in FOREIGN.items()):
        found.append("4: a foreign object was touched")
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_crash_anywhere_leaves_the_old_place_or_the_new_and_again_ends_it(name, count_states):
    setup, command, old, new = COMMANDS[name]
    found, states = [], plans(setup, command)
    for plan in states:
        store = setup()
        before = dict(store.objects)
        with suppress(Crash, ResilientError):
            command(FaultyStore(store, plan))
        found += [(plan, one) for one in violations(before, store, {old, new})]
        # An undo that was made and not answered is not made twice.
        if lineage(store).candidates[0] != new:
            command(store)
        found += [(plan, one) for one in violations(before, store, {new})]
    count_states(len(states), len(found))
    assert len(states) > 20
    assert not found, found[:5]


def test_a_zombie_of_the_older_life_is_fenced_and_never_outranks(count_states):
    """What it saves after the rollback, at any step, does not become what resume takes."""
    found = []
    for step in (3, 5, 6, 7, 8, 9, 10, 11, 12):
        store = rolled_back()
        with pytest.MonkeyPatch.context() as patch:
            # It was past its look at the fence when the rollback came.
            patch.setattr(commit, "check_fence", lambda *_: None)
            save(store, CheckpointId(2, step))
        if lineage(store).candidates[0] != TARGET:
            found.append(step)
        with pytest.raises(Fenced):
            check_fence(store, 2)
        assert max(list_numbers(store)) == 3
    count_states(9, len(found))
    assert not found
