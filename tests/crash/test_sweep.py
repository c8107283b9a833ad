"""Crash before and after every store operation of a save, a rotation and a resume.

After each crash, before any repair, the invariants of ``lives.violations`` must hold; then a
second life must end with the very state of a run that was never killed. A failing case prints
the plan as a constructor call.
"""

from __future__ import annotations

from random import Random

import pytest

from resilient.checkpoint import catalog
from resilient.errors import NoIntactCheckpoint
from resilient.format.keys import CheckpointId
from resilient.testing.fault_store import (
    FaultPlan,
    FaultyStore,
    StoreFault,
    StoreFaultKind,
    every_crash,
)
from tests.crash.lives import KEEP, STEPS, Witness, crashed_life, live, unneeded

CRASHES = (StoreFaultKind.CRASH_BEFORE, StoreFaultKind.CRASH_AFTER)


def unbroken(ranks: int) -> list[list[int]]:
    return live(Witness(), ranks).final


def operations(store: Witness, ranks: int) -> int:
    faulty = FaultyStore(Witness(store.objects))
    live(faulty, ranks)
    return faulty.operations


def check_end(store: Witness, ranks: int, expected, case: object) -> list[str]:
    ended = live(store, ranks, attempt="last")
    if isinstance(ended.error, NoIntactCheckpoint) and not catalog.lineage(store).candidates[1:]:
        return []  # The only commit was torn: refusing to start over silently is right.
    left = unneeded(store) if ended.acknowledged else []  # Only a save rotates.
    return left if ended.final == expected else [f"5: {case} ended in {ended.final}", *left]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.smoke), 2])
def test_one_crash_anywhere_in_the_first_life(ranks, count_states, thinned):
    expected = unbroken(ranks)
    plans = thinned(every_crash(operations(Witness(), ranks)))
    found = []
    for plan in plans:
        store = Witness()
        life, broken = crashed_life(store, plan, ranks, "first")
        assert life.died or life.final == expected, plan
        found += [(plan, one) for one in broken + check_end(store, ranks, expected, plan)]
    count_states(len(plans), len(found))
    assert not found, found[:5]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_crash_anywhere_in_a_life_that_resumes(ranks, count_states, thinned):
    expected = unbroken(ranks)
    before = Witness()
    live(before, ranks, until=STEPS // 2)
    plans = thinned(every_crash(operations(before, ranks)))
    found = []
    for plan in plans:
        store = Witness(before.objects)
        _, broken = crashed_life(store, plan, ranks, "second")
        found += [(plan, one) for one in broken + check_end(store, ranks, expected, plan)]
    count_states(len(plans), len(found))
    assert not found, found[:5]


def test_two_crashes_in_two_lives(count_states, request):
    """Draw pairs: the first life dies at one operation, the next at another."""
    ranks = 1
    expected = unbroken(ranks)
    length = operations(Witness(), ranks)
    draw = Random(20)
    found = []
    states = request.config.getoption("--crash-doubles")
    for _ in range(states):
        store = Witness()
        plans = [
            FaultPlan(0, (StoreFault(draw.randrange(length), draw.choice(CRASHES)),))
            for _ in range(2)
        ]
        for number, plan in enumerate(plans):
            _, broken = crashed_life(store, plan, ranks, f"life-{number}")
            found += [(plans, one) for one in broken]
        found += [(plans, one) for one in check_end(store, ranks, expected, plans)]
    count_states(states, len(found))
    assert not found, found[:5]


@pytest.mark.parametrize(
    "kind",
    [
        StoreFaultKind.ERROR_ONCE,
        StoreFaultKind.ERROR_AFTER,
        StoreFaultKind.BROKEN_AFTER,
        StoreFaultKind.FULL,
        StoreFaultKind.FULL_AFTER,
    ],
)
def test_one_failing_operation_costs_at_most_one_save(kind, count_states, thinned):
    """Without a retry in between; the loop goes on when a save fails."""
    expected = unbroken(1)
    places = thinned(range(operations(Witness(), 1)))
    found = []
    for at in places:
        store, plan = Witness(), FaultPlan(0, (StoreFault(at, kind),))
        life, broken = crashed_life(store, plan, 1, "first")
        if life.failed_saves > 1:
            broken.append(f"{life.failed_saves} saves failed")
        found += [(plan, one) for one in broken + check_end(store, 1, expected, plan)]
    count_states(len(places), len(found))
    assert not found, found[:5]


def test_a_torn_object_is_never_taken_for_a_whole_one(count_states, thinned):
    """A store that breaks its promise of atomic puts: resume finds the damage and goes back."""
    expected = unbroken(1)
    places = thinned(range(operations(Witness(), 1)))
    found = []
    for at in places:
        for seed in range(3):
            plan = FaultPlan(seed, (StoreFault(at, StoreFaultKind.TORN),))
            store = Witness()
            live(FaultyStore(store, plan), attempt="first")
            found += check_end(store, 1, expected, plan)
    count_states(3 * len(places), len(found))
    assert not found, found[:5]


def test_retention_is_at_work_in_the_sweep():
    store = Witness()
    live(store)
    assert len(store.ever_committed) == STEPS
    assert sum(key.endswith("manifest.json") for key in store.objects) == KEEP


def test_references_are_at_work_in_the_sweep():
    """The first checkpoint is long gone, and what is frozen still lies in its folder."""
    store = Witness()
    live(store)
    first, third = (CheckpointId(1, step).key("model.r00000.safetensors") for step in (1, 3))
    newest = catalog.read_manifest(store, catalog.committed(store)[0])
    assert newest.checkpoint.step == STEPS
    assert {first} <= {one.name for one in newest.files}
    assert first in store.objects
    assert third in store.objects, "the one before the newest needs it"
