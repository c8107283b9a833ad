"""A process of an older life that wakes up late can never publish over, delete or outrank."""

from __future__ import annotations

import threading

import pytest

from resilient.checkpoint import catalog
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.restore.read import read
from resilient.errors import Fenced, ResilientError
from resilient.testing.fault_store import FaultyStore
from tests.crash.lives import STEPS, Witness, live


class Paused(FaultyStore):
    """Sleeps before operation ``at`` until the test lets it continue."""

    def __init__(self, store, at: int) -> None:
        super().__init__(store)
        self.asleep, self.go_on = threading.Event(), threading.Event()
        self._at = at

    def _begin(self, name, key):
        if self.operations == self._at:
            self.asleep.set()
            assert self.go_on.wait(30)
        return super()._begin(name, key)


def run_zombie(store: Paused, caught: list[ResilientError]) -> None:
    try:
        live(store, attempt="zombie")
    except ResilientError as error:
        caught.append(error)


def operations() -> int:
    counting = FaultyStore(Witness())
    live(counting)
    return counting.operations


@pytest.mark.parametrize("newer_saves", [True, False], ids=["newer saved", "newer only claimed"])
def test_a_zombie_asleep_at_any_operation_never_harms_the_newer_life(
    newer_saves, count_states, thinned
):
    expected = live(Witness()).final
    found = []
    places = thinned(range(operations()))
    for at in places:
        store, caught = Witness(), []
        paused = Paused(store, at)
        zombie = threading.Thread(target=run_zombie, args=(paused, caught))
        zombie.start()
        assert paused.asleep.wait(30)
        newer = live(store, until=STEPS if newer_saves else 0, attempt="newer")
        numbers, whole = list_numbers(store), set(catalog.committed(store))
        paused.go_on.set()
        zombie.join(30)
        found += harm(store, numbers, whole, at) + unfenced(caught, at)
        if newer_saves and newer.final != expected:
            found.append((at, "the newer life was disturbed"))
        if live(store, attempt="last").final != expected:
            found.append((at, "a third life ended elsewhere"))
    count_states(len(places), len(found))
    assert not found, found[:5]


def harm(store: Witness, numbers, whole, at: int) -> list[tuple[int, str]]:
    """Return what the zombie did to checkpoints of the newest life."""
    newest = max(list_numbers(store))
    found = []
    for checkpoint in whole:
        if checkpoint.generation == newest:
            try:
                read(store, checkpoint)
            except ResilientError as error:
                found.append((at, f"{checkpoint} of the newest life: {error}"))
    first = next(iter(catalog.lineage(store).candidates), None)
    outranked = first and whole and max(whole).generation == newest and first != max(whole)
    if outranked and max(numbers) == newest:
        found.append((at, f"{first} outranks {max(whole)}"))
    return found


def unfenced(caught: list[ResilientError], at: int) -> list[tuple[int, str]]:
    return [(at, f"died of {error!r}") for error in caught if not isinstance(error, Fenced)]
