"""Crash before and after every operation of either tier; then what must hold, and a next life."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.errors import ResilientError
from resilient.testing.fault_store import (
    FaultPlan,
    FaultyStore,
    StoreFault,
    StoreFaultKind,
    every_crash,
)
from resilient.testing.memory_store import MemoryStore
from tests.crash.lives import Witness
from tests.helpers.tiered import STEPS, Shelf, run_until_crash, train


def shelves(store):
    return Shelf(store, "near"), Shelf(store, "durable")


def expected():
    return train(*shelves(MemoryStore())).final


def operations(objects) -> int:
    faulty = FaultyStore(store_of(objects))
    train(*shelves(faulty))
    return faulty.operations


def store_of(objects) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(objects)
    return store


def violations(store, acknowledged) -> list[str]:
    """Return which invariants do not hold, before any repair."""
    near, durable = shelves(store)
    found = []
    for tier in (near, durable):
        for one in committed(tier):
            try:
                read(tier, one)
            except ResilientError as error:
                found.append(f"1: {one} is listed in {tier.url} and not whole there: {error}")
    both = set(committed(near)) & set(committed(durable))
    found += [
        f"1: {one} differs between the tiers"
        for one in both
        if near.get(one.manifest_key) != durable.get(one.manifest_key)
    ]
    newest = max(acknowledged, default=None)
    candidates = lineage(TieredStore(near, durable, lambda _: None)).candidates
    if newest and (not candidates or candidates[0] < newest):
        found.append(f"2: {newest} was acknowledged and is gone; left are {candidates}")
    return found


def check_ends(store, final) -> list[str]:
    """Return how a next life ends that is not as it must, on this host and on a new one."""
    found = []
    for host in ("the same", "a new"):
        copy = store_of(store.objects)
        if host == "a new":
            gone = [key for key in copy.objects if key.startswith("near/")]
            for key in gone:
                del copy.objects[key]
        near, durable = shelves(copy)
        life = train(near, durable)
        if life.final != final:
            found.append(f"5: on {host} host it ended in {life.final}")
        if committed(durable)[0].step != STEPS:
            found.append(f"5: on {host} host the durable tier has not got the end")
    return found


def sweep(plans, before, final, count_states) -> None:
    found = []
    for plan in plans:
        store = store_of(before)
        life = run_until_crash(*shelves(FaultyStore(store, plan)))
        broken = violations(store, life.acknowledged) + check_ends(store, final)
        found += [(plan, one) for one in broken]
    count_states(len(plans), len(found))
    assert not found, found[:5]


@pytest.mark.parametrize("done", [0, 2], ids=["the first life", "a life that resumes"])
def test_a_crash_anywhere_leaves_both_tiers_whole_and_the_next_life_ends_alike(
    done, count_states, thinned
):
    before = MemoryStore()
    if done:
        train(*shelves(before), until=done)
    plans = thinned(every_crash(operations(before.objects)))
    sweep(plans, before.objects, expected(), count_states)


@pytest.mark.parametrize(
    "kind", [StoreFaultKind.ERROR_ONCE, StoreFaultKind.ERROR_AFTER, StoreFaultKind.FULL]
)
def test_one_failing_operation_of_either_tier_breaks_neither(kind, count_states, thinned):
    places = thinned(range(operations({})))
    plans = [FaultPlan(0, (StoreFault(at, kind),)) for at in places]
    sweep(plans, {}, expected(), count_states)


def test_both_tiers_rotate_in_the_sweep():
    store = Witness({})
    near, durable = shelves(store)
    train(near, durable)
    assert [one.step for one in committed(near)] == [4, 3]
    assert [one.step for one in committed(durable)] == [4, 2]
