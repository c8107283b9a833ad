"""Crash before and after every store operation of tag, untag and prune, and of a save that rotates
by policies; then what must hold, and the same command again.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.garbage_collection import apply_plan, collect_garbage, scan_and_plan
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.refs import create_tag, list_tags, read_tags, remove_tag
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import BestOf, Retention
from resilient.clock import SystemClock
from resilient.errors import ResilientError, UsageError
from resilient.format.keys import CheckpointId
from resilient.testing.fault_store import (
    Crash,
    FaultPlan,
    FaultyStore,
    StoreFault,
    StoreFaultKind,
    every_crash,
)
from tests.crash.lives import FOREIGN, Witness, unneeded
from tests.helpers.manifests import begin, frozen_parts_of, save

CLOCK = SystemClock()
PINNED = CheckpointId(1, 2)
NEWEST = CheckpointId(2, 5)
POLICIES = Retention(keep_last=1, keep_best=(BestOf("loss"),), keep_every=4)
KEPT = {NEWEST, PINNED, CheckpointId(1, 1), CheckpointId(2, 4)}
"""The newest, the tagged, the best, the multiple."""


def history() -> Witness:
    """Return two lives, the second from the middle of the first; one tag, leftovers."""
    store = Witness()
    begin(store)
    for step in (1, 2, 3, 4):
        grow(store, CheckpointId(1, step), step / 10)
    create_tag(store, "pinned", PINNED, CLOCK)
    store.put("checkpoint-5-g1/model.r00000.safetensors", b"cut short")
    begin(store, CheckpointId(1, 3))
    for step in (4, 5):
        grow(store, CheckpointId(2, step), 0.9, parent=CheckpointId(1, 3))
    return store


def grow(store, checkpoint, loss, parent=None) -> None:
    """Save what refers to the checkpoint before: of its life, or where that began."""
    bases = lineage(store).candidates[:1]
    parts = frozen_parts_of(checkpoint.step)
    metrics = {"eval_loss": loss}
    save(store, checkpoint, parent=parent, bases=bases, parts=parts, metrics=metrics)


BEFORE = dict(history().objects)


def prune(store) -> None:
    mine = max(list_numbers(store))
    apply_plan(store, scan_and_plan(store, POLICIES, in_full=True), mine)


def untag(store) -> None:
    try:
        remove_tag(store, "pinned")
    except UsageError:
        assert "pinned" not in list_tags(store), "only what is gone may be unknown"


COMMANDS = {
    "tag": lambda store: create_tag(store, "new", CheckpointId(1, 3), CLOCK),
    "untag": untag,
    "prune": prune,
    "rotate": partial(collect_garbage, retention=POLICIES, generation=2, written=NEWEST),
}


def expected(name) -> tuple[set[CheckpointId], dict[str, CheckpointId]]:
    """Return what an undisturbed command leaves: checkpoints and tags."""
    everything = set(committed(Witness(BEFORE)))
    return {
        "tag": (everything, {"pinned": PINNED, "new": CheckpointId(1, 3)}),
        "untag": (everything, {}),
        "prune": (KEPT, {"pinned": PINNED}),
        "rotate": (KEPT, {"pinned": PINNED}),
    }[name]


def state(store) -> tuple[set[CheckpointId], dict[str, CheckpointId]]:
    return set(committed(store)), {tag.name: tag.checkpoint for tag in read_tags(store)}


def violations(store, name) -> list[str]:
    """Return which invariants do not hold, before any repair."""
    found = []
    there, tags = state(store)
    for one in there:
        try:
            read(store, one)
        except ResilientError as error:
            found.append(f"1: {one} is listed and not whole: {error}")
    if lineage(store).candidates[:1] != (NEWEST,):
        found.append("2: the newest is not the first that resume would take")
    if not expected(name)[0] <= there:
        found.append(f"3: {expected(name)[0] - there} went although there is a reason to keep it")
    if any(store.objects.get(key) != content for key, content in FOREIGN.items()):
        found.append("4: a foreign object was touched")
    if not set(tags.values()) <= there:
        found.append("6: a tag names what is gone")
    return found


def run(name, plan) -> tuple[Witness, FaultyStore]:
    store = Witness(BEFORE)
    faulty = FaultyStore(store, plan)
    with suppress(Crash, ResilientError):
        COMMANDS[name](faulty)
    return store, faulty


@pytest.mark.parametrize("name", COMMANDS)
def test_a_crash_anywhere_in_a_command_breaks_nothing_and_the_command_again_ends_it(
    name, count_states
):
    _, faulty = run(name, FaultPlan())
    plans = list(every_crash(faulty.operations))
    plans += [
        FaultPlan(0, (StoreFault(at, kind),))
        for at in range(faulty.operations)
        for kind in (StoreFaultKind.ERROR_ONCE, StoreFaultKind.ERROR_AFTER)
    ]
    found = []
    for plan in plans:
        store, _ = run(name, plan)
        found += [(plan, one) for one in violations(store, name)]
        COMMANDS[name](store)
        found += [(plan, one) for one in violations(store, name)]
        if state(store) != expected(name):
            found.append((plan, f"5: ended with {state(store)}"))
        if name in ("prune", "rotate"):
            found += [(plan, one) for one in unneeded(store)]
    count_states(len(plans), len(found))
    assert not found, found[:5]


def every_crash_at_a_write(name, store) -> list[FaultPlan]:
    """Return plans for crashes before each write and after the last: others leave the same."""
    faulty = FaultyStore(Witness(store.objects))
    COMMANDS[name](faulty)
    writes = [at for at, (verb, _) in enumerate(faulty.trace) if verb in ("put", "delete")]
    before = [FaultPlan(0, (StoreFault(at, StoreFaultKind.CRASH_BEFORE),)) for at in writes]
    return [
        *before,
        *(FaultPlan(0, (StoreFault(at, StoreFaultKind.CRASH_AFTER),)) for at in writes[-1:]),
    ]


@pytest.mark.parametrize("name", ["prune", "rotate"])
def test_two_crashes_of_two_commands_end_as_one_that_ran_through(name, count_states):
    found, states = [], 0
    for first in every_crash_at_a_write(name, Witness(BEFORE)):
        middle, _ = run(name, first)
        for second in every_crash_at_a_write(name, middle):
            store = Witness(middle.objects)
            with suppress(Crash):
                COMMANDS[name](FaultyStore(store, second))
            states += 1
            found += [(first, second, one) for one in violations(store, name)]
            COMMANDS[name](store)
            if state(store) != expected(name):
                found.append((first, second, f"5: ended with {state(store)}"))
    count_states(states, len(found))
    assert not found, found[:5]


def test_the_sweep_deletes_what_it_should():
    store, _ = run("prune", FaultPlan())
    assert set(committed(store)) == KEPT
    assert store.ever_committed - KEPT == {CheckpointId(1, 3), CheckpointId(1, 4)}
    assert "checkpoint-5-g1/model.r00000.safetensors" not in store.objects, "a leftover"
    left = [key for key in store.objects if key.startswith(f"{CheckpointId(1, 3)}/")]
    assert left == [CheckpointId(1, 3).key("model.r00000.safetensors")], "the newest needs it"
