"""Every file operation of every store operation, crashed before and after, then a power loss."""

from pathlib import Path
from random import Random

import pytest

from resilient.errors import KeyExists, KeyNotFound, StoreError
from resilient.storage.local import LocalStore
from resilient.testing.fault_store import Crash, StoreFault, StoreFaultKind
from resilient.testing.power_loss import Keep, PowerLossFileSystem

ROOT = Path("/machine/runs/seven")
OLD, NEW = b"the old object, whole" * 3, b"the new one" * 7
OTHER = b"not touched by anyone"
CRASHES = (StoreFaultKind.CRASH_BEFORE, StoreFaultKind.CRASH_AFTER)


def put(store):
    store.put("folder/object", NEW)


def put_in_a_new_folder(store):
    store.put("new/deep/object", NEW)


def put_new(store):
    store.put_new("claims/object", NEW)


def lose_a_put_new(store):
    with pytest.raises(KeyExists):
        store.put_new("folder/object", NEW)


def delete(store):
    store.delete("folder/object")


def delete_the_last(store):
    store.delete("alone/object")


def put_and_delete(store):
    store.put("folder/object", NEW)
    store.delete("folder/object")


def delete_and_put(store):
    store.delete("alone/object")
    store.put("alone/object", NEW)


def two_puts(store):
    store.put("folder/object", b"between" * 5)
    store.put("folder/object", NEW)


# What runs, the object it is about, what a crash in it may leave, what its return promises.
SCENARIOS = [
    (put, "folder/object", {OLD, NEW}, NEW),
    (put_in_a_new_folder, "new/deep/object", {None, NEW}, NEW),
    (put_new, "claims/object", {None, NEW}, NEW),
    (lose_a_put_new, "folder/object", {OLD}, OLD),
    (delete, "folder/object", {OLD, None}, None),
    (delete_the_last, "alone/object", {OLD, None}, None),
    (put_and_delete, "folder/object", {OLD, NEW, None}, None),
    (delete_and_put, "alone/object", {OLD, None, NEW}, NEW),
    (two_puts, "folder/object", {OLD, b"between" * 5, NEW}, NEW),
]
IDS = [scenario[0].__name__ for scenario in SCENARIOS]
START = {"folder/object": OLD, "alone/object": OLD, "other/neighbour": OTHER}


def prepared(fault=None):
    """A machine that has three objects and has been off and on since."""
    before = PowerLossFileSystem()
    store = LocalStore(ROOT, before)
    for key, content in START.items():
        store.put(key, content)
    files = before.lose_power(Keep.NOTHING)
    files._fault = fault
    return files


def found(files, key):
    try:
        return LocalStore(ROOT, files).get(key)
    except KeyNotFound:
        return None


def check_whole(files, key, allowed, why):
    content = found(files, key)
    assert content in allowed, why
    listed = {entry.key: entry.size_bytes for entry in LocalStore(ROOT, files).list()}
    expected = {name: len(kept) for name, kept in START.items()}
    expected[key] = len(content) if content is not None else None
    assert listed == {name: size for name, size in expected.items() if size is not None}, why
    assert found(files, "other/neighbour") == OTHER, why


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize(("run", "key", "_allowed", "promised"), SCENARIOS, ids=IDS)
def test_what_returned_survives_every_power_loss(run, key, _allowed, promised, keep):
    files = prepared()
    run(LocalStore(ROOT, files))
    check_whole(files.lose_power(keep), key, {promised}, f"{run.__name__}, {keep}")


@pytest.mark.smoke
@pytest.mark.parametrize(("run", "key", "allowed", "_promised"), SCENARIOS, ids=IDS)
def test_a_crash_anywhere_leaves_an_object_whole(run, key, allowed, _promised, record_property):
    unbroken = prepared()
    run(LocalStore(ROOT, unbroken))
    states = 0
    for at in range(unbroken.operations):
        for kind in CRASHES:
            fault = StoreFault(at, kind)
            files = prepared(fault)
            with pytest.raises(Crash):
                run(LocalStore(ROOT, files))
            for keep in Keep:
                why = f"{run.__name__}: {fault!r} in {files.trace[-1]}, then {keep}"
                check_whole(files.lose_power(keep), key, allowed, why)
                states += 1
    record_property("crash_states", states)
    assert states == unbroken.operations * len(CRASHES) * len(Keep)
    assert states >= 36


@pytest.mark.parametrize(("run", "key", "_allowed", "promised"), SCENARIOS, ids=IDS)
def test_the_next_life_finishes_what_a_crash_interrupted(run, key, _allowed, promised):
    operations = prepared_operations(run)
    for at in range(operations):
        files = prepared(StoreFault(at, StoreFaultKind.CRASH_AFTER))
        with pytest.raises(Crash):
            run(LocalStore(ROOT, files))
        for keep in Keep:
            after = files.lose_power(keep)
            if run is put_new and found(after, key) is not None:
                continue  # it did happen, and says so
            run(LocalStore(ROOT, after))
            check_whole(after.lose_power(Keep.NOTHING), key, {promised}, f"{at} {keep}")


def prepared_operations(run):
    files = prepared()
    run(LocalStore(ROOT, files))
    return files.operations


@pytest.mark.parametrize("keep", list(Keep))
def test_a_folder_made_by_a_process_that_died_is_made_durable_by_the_next_put(keep):
    files = PowerLossFileSystem()
    for folder in (*reversed(ROOT.parents[:-1]), ROOT, ROOT / "made"):
        files.make_folder(folder)
    LocalStore(ROOT, files).put("made/object", NEW)
    assert found(files.lose_power(keep), "made/object") == NEW


@pytest.mark.parametrize("keep", list(Keep))
def test_a_store_that_was_removed_whole_is_made_durable_again(keep):
    files = PowerLossFileSystem()
    store = LocalStore(ROOT, files)
    store.put("object", OLD)
    files.unlink(ROOT / "object")
    files.remove_folder(ROOT)
    files.sync_folder(ROOT.parent)
    store.put("object", NEW)
    assert found(files.lose_power(keep), "object") == NEW


@pytest.mark.parametrize("keep", list(Keep))
def test_a_delete_that_finds_nothing_makes_the_removal_of_a_dead_process_durable(keep):
    files = prepared()
    files.unlink(ROOT / "folder/object")
    LocalStore(ROOT, files).delete("folder/object")
    assert found(files.lose_power(keep), "folder/object") is None


def test_a_crash_leaves_at_most_one_temporary_file_which_nobody_sees():
    for at in range(prepared_operations(put)):
        files = prepared(StoreFault(at, StoreFaultKind.CRASH_AFTER))
        with pytest.raises(Crash):
            put(LocalStore(ROOT, files))
        after = files.lose_power(Keep.EVERYTHING)
        hidden = [path for path in after.paths() if "/.tmp-" in path]
        assert len(hidden) <= 1
        assert not [entry for entry in LocalStore(ROOT, after).list() if ".tmp" in entry.key]


KEYS = ("a/one", "a/two", "b/deep/three", "four")


def step(store, random, allowed, number):
    """Do one thing to one key; meanwhile both outcomes are allowed, afterwards only one."""
    key, content = random.choice(KEYS), b"content %d " % number * random.randrange(1, 20)
    match random.choice(("put", "put", "put_new", "delete")):
        case "delete":
            allowed[key].add(None)
            store.delete(key)
            allowed[key] = {None}
        case name:
            allowed[key].add(content)
            try:
                getattr(store, name)(key, content)
            except KeyExists:
                # Taken, but whether the taking is durable is not for the loser to know.
                allowed[key] -= {content}
            else:
                allowed[key] = {content}


def live(files, random, allowed, first):
    """One life of a process: some steps, and often a death in one of them."""
    files._fault = StoreFault(files.operations + random.randrange(120), random.choice(CRASHES))
    store = LocalStore(ROOT, files)
    try:
        for number in range(first, first + 8):
            step(store, random, allowed, number)
    except Crash:
        # A kill alone: what was not synced is not durable, and not gone.
        files._dead = False
    files._fault = None


@pytest.mark.parametrize("seed", range(40))
def test_any_history_of_kills_and_power_losses_keeps_what_returned(seed):
    random = Random(seed)
    for history in range(10):
        files, allowed = PowerLossFileSystem(), {key: {None} for key in KEYS}
        for number in range(6):
            live(files, random, allowed, number * 8)
            for key in KEYS:
                assert found(files, key) in allowed[key], f"{seed=} {history=} {key=}"
            if random.random() < 0.5:
                continue
            files = files.lose_power(random.choice(list(Keep)))
            for key in KEYS:
                content = found(files, key)
                assert content in allowed[key], f"{seed=} {history=} {key=} after a power loss"
                allowed[key] = {content}


class BadDisk(PowerLossFileSystem):
    """The n-th sync fails once and what it should have written is gone, as on Linux."""

    def __init__(self, error, failing):
        super().__init__()
        self.error, self.left = error, failing

    def _fail(self):
        self.left -= 1
        if self.left == -1:
            raise self.error

    def sync_folder(self, path):
        self._fail()
        super().sync_folder(path)

    def create(self, path):
        handle = super().create(path)
        sync = handle.sync

        def failing_sync():
            self._fail()
            sync()

        handle.sync = failing_sync
        return handle


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("operation", ["put", "put_new"])
def test_a_sync_that_failed_is_an_error_and_is_not_tried_again(operation, failing):
    files = BadDisk(OSError(5, "Input/output error"), failing)
    store = LocalStore(ROOT, files)
    with pytest.raises(StoreError) as caught:
        getattr(store, operation)("folder/object", NEW)
    assert caught.type is StoreError, "anything else would be tried again, and then trusted"
    assert files.left == -1
    assert "durable" in str(caught.value)
    assert not [path for path in files.paths() if "/.tmp-" in path]


def test_a_stale_handle_in_a_sync_is_not_taken_for_a_store_that_comes_back():
    files = BadDisk(OSError(116, "Stale file handle"), 1)
    with pytest.raises(StoreError) as caught:
        LocalStore(ROOT, files).put_new("folder/object", NEW)
    assert caught.type is StoreError
