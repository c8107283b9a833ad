"""A process sleeps while its repository is restored from a backup, and a new life takes its number.

Only the tokens of the two claims differ. Wherever the process sleeps, it changes no byte of the new
life and commits nothing after its next look at the fence.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from resilient.checkpoint import catalog, generations
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.generations import list_numbers, newest_claim
from resilient.checkpoint.retention import Retention
from resilient.errors import Fenced
from resilient.format.keys import GENERATIONS, CheckpointId, generation_key
from resilient.testing.fault_store import FaultyStore
from tests.crash.lives import STEPS, Witness, live
from tests.crash.test_zombie import Paused, run_zombie, unfenced
from tests.helpers.manifests import begin, save

SAVED = 2
"""Steps of the life before the backup."""
NUMBER = 2
"""Generation that both claim."""


class Watched(Paused):
    """Notes the keys of what a process does after its sleep, before it looks at the fence again.

    No store checks a fence within a delete or a put, so a process that slept right after its look
    can still do this (docs/guarantees.md, "Limits").
    """

    def __init__(self, store, at: int) -> None:
        super().__init__(store, at)
        self.unfenced: set[str] = set()
        self.deleted: set[str] = set()
        self._is_unfenced = False

    def _begin(self, name, key):
        sleeps = self.operations == self._at
        begun = super()._begin(name, key)
        self._is_unfenced |= sleeps
        if self._is_unfenced and name == "list" and key.startswith(GENERATIONS):
            self._is_unfenced, self._at = False, -1
        if self._is_unfenced:
            self.unfenced.add(key)
            if name == "delete":
                self.deleted.add(key.partition("/")[0])
        return begun


def backed_up() -> dict[str, bytes]:
    store = Witness()
    live(store, until=SAVED, attempt="first")
    return dict(store.objects)


def operations(backup) -> int:
    counting = FaultyStore(Witness(backup))
    live(counting)
    return counting.operations


def woken(backup, at: int, until: int) -> list[tuple[int, str]] | None:
    """Return the harm of a process that slept before operation ``at``; None before its claim."""
    store, caught = Witness(backup), []
    paused = Watched(store, at)
    zombie = threading.Thread(target=run_zombie, args=(paused, caught))
    zombie.start()
    assert paused.asleep.wait(30)
    has_claimed = NUMBER in list_numbers(store)
    store.objects = dict(backup)
    assert not live(store, until=until, attempt="newer").error
    before, whole = dict(store.objects), set(catalog.committed(store))
    paused.go_on.set()
    zombie.join(30)
    if not has_claimed:
        return None
    changed = {key for key, content in before.items() if store.objects.get(key) != content}
    lost = sorted(changed - paused.unfenced)
    found = [(at, f"{key} of the new life changed") for key in lost]
    more = set(catalog.committed(store)) - whole
    more = {one for one in more if one.manifest_key not in paused.unfenced}
    found += [(at, f"{one} was committed by the process that slept") for one in more]
    found += unfenced(caught, at)
    if len(paused.deleted) > 1:
        found.append((at, f"files went from {sorted(paused.deleted)} without a check"))
    last = live(store, attempt="last")
    if not changed and last.started_at != max(until, SAVED):
        found.append((at, f"the last life began at step {last.started_at}"))
    return found


@pytest.fixture(scope="module")
def backup():
    return backed_up()


@pytest.mark.parametrize(
    ("first", "until"),
    [(0, 0), (1, SAVED + 2), (2, STEPS)],
    ids=["newer claimed", "newer saved 2", "newer saved all"],
)
def test_restored_backup_process_that_slept_changes_nothing(backup, first, until, count_states):
    outcomes = [woken(backup, at, until) for at in range(first, operations(backup), 3)]
    slept = [one for one in outcomes if one is not None]
    found = [harm for one in slept for harm in one]
    count_states(len(slept), len(found))
    assert len(slept) > len(outcomes) // 2
    assert not found, found[:5]


def retained(at: int) -> Watched:
    """Let a process sleep before operation ``at`` of a retention that deletes four checkpoints."""
    store = Witness()
    begin(store)
    for step in (1, 2, 3, 4, 5):
        save(store, CheckpointId(1, step))
    backup, (number, token) = dict(store.objects), newest_claim(store)
    paused = Watched(store, at)

    def run():
        with suppress(Fenced):
            collect_garbage(paused, Retention(1), number, token=token)

    zombie = threading.Thread(target=run)
    zombie.start()
    if paused.asleep.wait(30 if at >= 0 else 0):
        store.objects = {key: one for key, one in backup.items() if key != generation_key(1)}
        begin(store)
        paused.go_on.set()
    zombie.join(30)
    return paused


def test_restored_backup_retention_deletes_in_one_folder(count_states):
    length = retained(-1).operations
    woken = [retained(at) for at in range(length)]
    found = [(at, one.deleted) for at, one in enumerate(woken) if len(one.deleted) > 1]
    count_states(length, len(found))
    assert any(one.deleted for one in woken)
    assert not found, found[:5]


def test_restored_backup_fence_by_number_alone_is_found(backup, monkeypatch):
    monkeypatch.setattr(generations, "_require_own_record", lambda *_: None)
    outcomes = [woken(backup, at, SAVED + 2) for at in range(60, operations(backup), 5)]
    said = [what for one in outcomes for _, what in one or []]
    assert any("was committed by the process that slept" in one for one in said)
    assert any("of the new life changed" in one for one in said)
