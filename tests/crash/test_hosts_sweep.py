"""Hosts with a near tier each: crash before and after operations of any; then the next life."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.errors import NoIntactCheckpoint, ResilientError
from resilient.testing.fault_store import FaultPlan, FaultyStore, every_crash
from resilient.testing.memory_store import MemoryStore
from tests.helpers.hosts import live
from tests.helpers.tiered import Shelf

STEPS = 3
STRIDE = 2
HOSTS = ("near-a", "near-b")
# A server's thread of a process that is dead dies as well.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def shelves(store, hosts=HOSTS):
    return [Shelf(store, host) for host in hosts], Shelf(store, "durable")


def store_of(objects) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(objects)
    return store


def life_on(store, hosts=HOSTS, attempt="1", **how):
    nears, durable = shelves(store, hosts)
    return live(nears, durable, until=STEPS, attempt=attempt, **how)


def seen_by(store, at) -> TieredStore:
    """Return the repository as a rank on one of the hosts sees it."""
    nears, durable = shelves(store)
    tiers = TieredStore(nears[at], durable, lambda _key, _where: None)
    tiers.peers = (nears[1 - at],)
    return tiers


def violations(store, acknowledged) -> list[str]:
    """Return which invariants do not hold, before any repair."""
    nears, durable = shelves(store)
    found = [problem for one in committed(durable) if (problem := unreadable(durable, one))]
    places = [*nears, durable]
    for one in {one for place in places for one in committed(place)}:
        manifests = {place.get(one.manifest_key) for place in places if one in committed(place)}
        if len(manifests) > 1:
            found.append(f"1: {one} differs between the places")
    newest = max(acknowledged, default=None)
    for tiers in (seen_by(store, 0), seen_by(store, 1)):
        candidates = lineage(tiers).candidates
        if newest and (not candidates or candidates[0] < newest):
            found.append(f"2: {newest} was acknowledged and is gone; left are {candidates}")
        found += [problem for one in candidates[:1] if (problem := unreadable(tiers, one))]
    return found


def unreadable(store, checkpoint) -> str:
    try:
        read(store, checkpoint)
    except ResilientError as error:
        return f"1: {checkpoint} is listed and cannot be read at {store.url}: {error}"
    return ""


def next_lives(store, final, which) -> list[str]:
    """Return how a next life ends that is not as it must."""
    hosts = (HOSTS, HOSTS[::-1], ("near-a", "near-new"))[which]
    copy = store_of(store.objects)
    run = life_on(copy, hosts)
    durable = Shelf(copy, "durable")
    if "near-new" in hosts and isinstance(run.error, NoIntactCheckpoint):
        # The first checkpoint was lost before its promotion: the run reports it and stops.
        return [] if not committed(durable) else [f"5: on {hosts}: {run.error}"]
    found = [f"5: on {hosts} it ended in {run.finals}: {run.error}"] if run.finals != final else []
    if not found and committed(durable)[0].step != STEPS:
        found.append(f"5: on {hosts} the durable tier has not got the end")
    return found


@pytest.mark.parametrize("done", [0, 1], ids=["the first life", "a life that resumes"])
def test_all_hosts_die_anywhere_and_the_next_life_ends_alike(done, count_states, thinned):
    before = MemoryStore()
    if done:
        nears, durable = shelves(before)
        live(nears, durable, until=done, attempt="0")
    counted = FaultyStore(store_of(before.objects))
    final = life_on(counted).finals
    plans = thinned(every_crash(counted.operations))[::STRIDE]
    found = []
    for number, plan in enumerate(plans):
        store = store_of(before.objects)
        run = life_on(FaultyStore(store, plan))
        broken = violations(store, run.acknowledged) + next_lives(store, final, number % 3)
        found += [(plan, one) for one in broken]
    count_states(len(plans), len(found))
    assert not found, found[:5]


def test_one_host_dies_anywhere_and_the_next_life_ends_alike(count_states, thinned):
    final = life_on(MemoryStore()).finals

    def one_dies(plan: FaultPlan):
        store = MemoryStore()
        nears, durable = shelves(store)
        faulty = FaultyStore(store, plan)
        (_, doomed), view = shelves(faulty)
        run = live([nears[0], doomed], [durable, view], until=STEPS, attempt="0")
        return store, faulty, run

    _, counted, _ = one_dies(FaultPlan())
    plans = thinned(every_crash(counted.operations))[::STRIDE]
    found = []
    for number, plan in enumerate(plans):
        store, _, run = one_dies(plan)
        broken = violations(store, run.acknowledged) + next_lives(store, final, number % 3)
        found += [(plan, one) for one in broken]
    count_states(len(plans), len(found))
    assert not found, found[:5]
