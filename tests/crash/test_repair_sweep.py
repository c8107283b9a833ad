"""Crash before and after every store operation of a repair; then what must hold, and it again."""

from __future__ import annotations

from contextlib import suppress

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.errors import ResilientError
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
from tests.helpers.manifests import begin, save

OLDER, DAMAGED = CheckpointId(1, 1), CheckpointId(1, 2)


def history() -> Witness:
    store = Witness()
    begin(store)
    for checkpoint in (OLDER, DAMAGED):
        save(store, checkpoint, ranks=2, parity=1)
    return store


WHOLE = dict(history().objects)


def damaged(*, gone: bool) -> dict[str, bytes]:
    """Lose a file of each rank, and the manifest: a bit of it, or all."""
    objects = dict(WHOLE)
    del objects[DAMAGED.key("model.r00000.safetensors")]
    key = DAMAGED.key("parity-0-0.r00001.parity")
    objects[key] = objects[key][:-1]
    manifest = objects.pop(DAMAGED.manifest_key)
    if not gone:
        objects[DAMAGED.manifest_key] = manifest.replace(b"5", b"6", 1)
    return objects


def repair(store, *, gone: bool) -> None:
    apply_repair(store, plan_repair(store, DAMAGED, undelete=gone))


def beside(store, *, asides: bool) -> dict[str, bytes]:
    """Return what a repair has kept of damaged files, or everything else."""
    return {key: data for key, data in store.objects.items() if ("/aside-" in key) == asides}


def violations(store, before) -> list[str]:
    """Return what is worse than before, or neither what it was nor whole."""
    found = [
        f"{key} is neither what it was nor whole"
        for key, data in beside(store, asides=False).items()
        if data not in (before.get(key), WHOLE.get(key))
    ]
    kept = list(beside(store, asides=True).values())
    found += [
        f"{key} was damaged, and is lost"
        for key, data in before.items()
        if store.objects.get(key) != data and data not in kept
    ]
    found += [f"{key} is gone" for key in before if key not in store.objects]
    if any(store.objects.get(key) != content for key, content in FOREIGN.items()):
        found.append("a foreign object was touched")
    if DAMAGED in committed(store) and DAMAGED not in committed(Witness(before)):
        with suppress(ResilientError):
            read(store, DAMAGED)
            return found
        found.append("it came back before it was whole")
    return found


@pytest.mark.parametrize("gone", [False, True])
def test_a_crash_anywhere_in_a_repair_makes_nothing_worse_and_the_repair_again_ends_it(
    gone, count_states
):
    before = damaged(gone=gone)
    counted = FaultyStore(Witness(before))
    repair(counted, gone=gone)
    plans = list(every_crash(counted.operations))
    plans += [
        FaultPlan(0, (StoreFault(at, kind),))
        for at in range(counted.operations)
        for kind in (
            StoreFaultKind.ERROR_ONCE,
            StoreFaultKind.ERROR_AFTER,
            StoreFaultKind.FULL,
            StoreFaultKind.FULL_AFTER,
        )
    ]
    found = []
    for plan in plans:
        store = Witness(before)
        with suppress(Crash, ResilientError):
            repair(FaultyStore(store, plan), gone=gone)
        found += [(plan, one) for one in violations(store, before)]
        repair(store, gone=gone and DAMAGED not in committed(store))
        if beside(store, asides=False) != WHOLE:
            found.append((plan, "the repair again did not end it"))
        kept = beside(store, asides=True)
        if sorted(kept.values()) != sorted(
            data for key, data in before.items() if data not in WHOLE.values()
        ):
            found.append((plan, f"kept is {sorted(kept)}"))
    count_states(len(plans), len(found))
    assert not found, found[:5]
    assert lineage(store).candidates[0] == DAMAGED


NEWER = [CheckpointId(1, step) for step in (3, 4)]


def save_and_rotate(store) -> None:
    for checkpoint in NEWER:
        if checkpoint not in committed(store):
            save(store, checkpoint, parity=1)
        collect_garbage(store, Retention(keep_last=2), 1, written=checkpoint)


def test_a_crash_anywhere_in_saves_with_parity_leaves_whole_checkpoints_and_no_litter(count_states):
    """The second copy of a manifest never keeps alive what a rotation has let go."""
    counted = FaultyStore(Witness(WHOLE))
    save_and_rotate(counted)
    plans, found = list(every_crash(counted.operations)), []
    for plan in plans:
        store = Witness(WHOLE)
        with suppress(Crash):
            save_and_rotate(FaultyStore(store, plan))
        there = committed(store)
        for one in there:
            read(store, one)
        if len(there) < 2 or lineage(store).candidates[0] < DAMAGED:
            found.append((plan, f"left are {there}"))
        save_and_rotate(store)
        folders = {key.partition("/")[0] for key in store.objects if key not in FOREIGN}
        if {"checkpoint-3-g1", "checkpoint-4-g1", "generations"} != folders:
            found.append((plan, f"at the end there is {sorted(folders)}"))
    count_states(len(plans), len(found))
    assert not found, found[:5]
