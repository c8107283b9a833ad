"""Crash at every operation of what puts in the trash, brings back and frees; and two at once.

Checkpoints refer to files of older ones here. At any moment every committed checkpoint reads back
whole, and so does every one in the trash once it is brought back.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest

from resilient.checkpoint.catalog import committed, folders_of, lineage, trash_of
from resilient.checkpoint.garbage_collection import apply_plan, collect_garbage, scan_and_plan
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.trash import TrashPolicy, restore_from_trash
from resilient.errors import KeyNotFound, NothingToResume, ResilientError
from resilient.format.keys import CheckpointId
from resilient.testing.fault_store import (
    Crash,
    FaultPlan,
    FaultyStore,
    StoreFault,
    StoreFaultKind,
    every_crash,
)
from resilient.testing.memory_store import MemoryStore
from tests.crash.test_reference_races import Interrupted
from tests.helpers.manifests import begin, frozen_parts_of, save

NEWEST = CheckpointId(1, 6)
LAST = Retention(keep_last=2)


class Clock:
    """A clock that stands still."""

    def __init__(self, hour: int) -> None:
        self.hour = hour

    def monotonic_seconds(self) -> float:
        return 0.0

    def now_iso(self) -> str:
        return f"2026-01-02T{self.hour:02d}:00:00.000Z"

    def sleep(self, seconds: float) -> None: ...


def prune(store) -> None:
    apply_plan(
        store, scan_and_plan(store, LAST, in_full=True, grace=TrashPolicy(Clock(0), 3600.0)), 1
    )


def back(store) -> None:
    with suppress(NothingToResume):
        restore_from_trash(store)


def rotation(store) -> None:
    collect_garbage(store, Retention(keep_last=1), 1, written=NEWEST, grace=TrashPolicy(Clock(0)))


def free(store) -> None:
    collect_garbage(store, LAST, 1, written=NEWEST, grace=TrashPolicy(Clock(5)))


def delete(store) -> None:
    apply_plan(store, scan_and_plan(store, LAST, grace=TrashPolicy(Clock(0), empties=True)), 1)


COMMANDS = {"prune": prune, "back": back, "rotation": rotation, "free": free, "delete": delete}


@cache
def history(name: str) -> dict[str, bytes]:
    store = MemoryStore()
    begin(store)
    for step in range(1, 7):
        bases = committed(store)[:1]
        save(store, CheckpointId(1, step), bases=bases, parts=frozen_parts_of(step))
    if name != "all":
        prune(store)
    return dict(store.objects)


def copied(objects) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(objects)
    return store


def state(store):
    return committed(store), set(trash_of(folders_of(store)))


def violations(store) -> list[str]:
    found = []
    if lineage(store).candidates[:1] != (NEWEST,):
        found.append("the newest is not what resume takes")
    probe = copied(store.objects)
    left: dict[CheckpointId, str] = {}
    while trash_of(folders_of(probe)).keys() - left.keys():
        left |= restore_from_trash(probe).left
        if left:
            break
    found += [f"{one} cannot come back: {why}" for one, why in left.items()]
    for place, which in ((store, "is"), (probe, "came back, and is")):
        for one in committed(place):
            try:
                read(place, one)
            except ResilientError as error:
                found.append(f"{one} {which} not whole: {error}")
    return found


SITUATIONS = [
    ("all", "prune"),
    ("pruned", "prune"),
    ("pruned", "back"),
    ("pruned", "rotation"),
    ("pruned", "free"),
    ("all", "delete"),
    ("pruned", "delete"),
]


@pytest.mark.parametrize(("before", "name"), SITUATIONS)
def test_a_crash_anywhere_loses_nothing_and_the_command_again_ends_it(
    before, name, count_states, thinned
):
    command, objects = COMMANDS[name], history(before)
    faulty = FaultyStore(copied(objects))
    command(faulty)
    whole = copied(objects)
    command(whole)
    plans = list(every_crash(faulty.operations))
    plans += [
        FaultPlan(0, (StoreFault(at, kind),))
        for at in range(faulty.operations)
        for kind in (StoreFaultKind.ERROR_ONCE, StoreFaultKind.ERROR_AFTER)
    ]
    plans = thinned(plans)
    found = []
    for plan in plans:
        store = copied(objects)
        with suppress(Crash, ResilientError):
            command(FaultyStore(store, plan))
        found += [(plan, one) for one in violations(store)]
        command(store)
        found += [(plan, one) for one in violations(store)]
        if state(store) != state(whole):
            found.append((plan, f"ended with {state(store)}"))
    count_states(len(plans), len(found))
    assert not found, found[:5]


@pytest.mark.parametrize("before", ["all", "pruned"])
@pytest.mark.parametrize("first", COMMANDS)
@pytest.mark.parametrize("second", COMMANDS)
def test_two_at_once_leave_whole_what_is_listed(before, first, second, count_states):
    objects = history(before)
    counting = FaultyStore(copied(objects))
    COMMANDS[first](counting)
    found = []
    for at in range(counting.operations):
        store = copied(objects)
        turns = {at: lambda store=store: COMMANDS[second](store)}
        with suppress(KeyNotFound):
            COMMANDS[first](Interrupted(store, turns))
        found += [(at, one) for one in violations(store) if "cannot come back" not in one]
    count_states(counting.operations, len(found))
    assert not found, found[:5]


@pytest.mark.parametrize("is_doubled", [False, True])
def test_what_is_brought_back_while_it_is_freed_is_whole_or_gone(is_doubled, count_states):
    """A rotation that has looked already acts at any point of it, and once more at any later."""
    objects = history("pruned")
    counting = FaultyStore(copied(objects))
    back(counting)
    found, states = [], 0
    for at in range(counting.operations):
        for later in range(at + 1, counting.operations if is_doubled else at + 2):
            store = copied(objects)
            seen = scan_and_plan(store, LAST, grace=TrashPolicy(Clock(5)))
            turns = {at: lambda store=store, seen=seen: apply_plan(store, seen, 1)}
            if is_doubled:
                turns[later] = lambda store=store: back(store)
            back(Interrupted(store, turns))
            states += 1
            found += [(at, later, one) for one in violations(store) if "cannot" not in one]
    count_states(states, len(found))
    assert not found, found[:5]
