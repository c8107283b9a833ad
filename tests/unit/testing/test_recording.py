"""Recorded files do the work and write it down; turns make an order that can be repeated."""

import errno
from random import Random

import pytest

from resilient.errors import KeyExists, StoreFull
from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixFileSystem
from resilient.testing.disk_model import (
    Disk,
    FileOp,
    FileOpKind,
    FileOpLog,
    RecordingFileSystem,
    ThreadScheduler,
)
from resilient.testing.fault_store import Crash


def recorded(folder, turns=None):
    files = RecordingFileSystem(PosixFileSystem(), folder.resolve(), FileOpLog(), turns)
    return files, LocalStore(folder / "store", files)


def acts(files):
    return [step.act for step in files.record.steps]


def test_a_put_is_recorded_in_the_order_in_which_it_is_safe(tmp_path):
    files, store = recorded(tmp_path)
    store.put("object", b"x")
    files.record.steps.clear()
    store.put("object", b"content")
    assert acts(files) == [
        FileOpKind.CREATE,
        FileOpKind.WRITE,
        FileOpKind.SYNC,
        FileOpKind.REPLACE,
        FileOpKind.SYNC_FOLDER,
    ]
    assert files.record.steps[1].data == b"content"
    assert files.record.steps[3].target == ("store", "object")


def test_what_failed_is_not_recorded(tmp_path):
    files, store = recorded(tmp_path)
    store.put_new("object", b"x")
    files.record.steps.clear()
    with pytest.raises(KeyExists):
        store.put_new("object", b"y")
    assert acts(files) == [FileOpKind.CREATE, FileOpKind.WRITE, FileOpKind.SYNC, FileOpKind.UNLINK]


def test_a_replayed_record_gives_the_disk_as_it_is(tmp_path):
    files, store = recorded(tmp_path)
    store.put("a/one", b"1")
    store.put("a/two", b"2")
    store.delete("a/one")
    store.put_new("b/three", b"3" * 2000)
    disk = Disk()
    for op in files.record.steps:
        disk.apply(op)
    everything = list(disk.states(Random(1), 1000))[-1].tree
    assert everything == {"store": {"a": {"two": b"2"}, "b": {"three": b"3" * 2000}}}


def test_it_dies_right_after_an_operation_and_stays_dead(tmp_path):
    files, store = recorded(tmp_path)
    store.put("object", b"x")
    files.die_in(4)
    with pytest.raises(Crash):
        store.put("object", b"y")
    assert acts(files)[-1] is FileOpKind.REPLACE
    with pytest.raises(Crash):
        store.get("object")
    files.revive()
    assert store.get("object") == b"y"


def test_a_full_disk_fails_one_write(tmp_path):
    files, store = recorded(tmp_path)
    files.full_in = 1
    store.put("one", b"x")
    with pytest.raises(StoreFull) as caught:
        store.put("two", b"x")
    assert caught.value.__cause__.errno == errno.ENOSPC
    store.put("three", b"x")


def test_what_is_outside_of_the_machine_is_done_and_not_recorded(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    files = RecordingFileSystem(PosixFileSystem(), inside, FileOpLog())
    files.make_folder(tmp_path / "outside")
    assert (tmp_path / "outside").is_dir()
    assert files.record.steps == []


def run(seed, folder):
    folder.mkdir()
    turns = ThreadScheduler(Random(seed))
    files, store = recorded(folder, turns)

    def rank(number):
        for at in range(5):
            store.put(f"{number}/{at}", b"x" * number)

    turns.run([lambda number=number: rank(number) for number in range(3)])
    named = [
        one
        for one in files.record.steps
        if isinstance(one, FileOp) and one.act is FileOpKind.REPLACE
    ]
    return [one.target[-2:] for one in named]


def test_the_same_seed_gives_the_same_interleaving_and_another_another(tmp_path):
    first = run(1, tmp_path / "a")
    assert run(1, tmp_path / "b") == first
    assert any(run(seed, tmp_path / str(seed)) != first for seed in range(2, 6))
    assert len({one[0] for one in first[:6]}) > 1


def test_an_error_of_one_thread_is_raised_and_the_others_end():
    turns, done = ThreadScheduler(Random(3)), []

    def bad():
        raise ValueError("mine")

    def good():
        for _ in range(5):
            with turns.turn():
                done.append(1)

    with pytest.raises(ValueError, match="mine"):
        turns.run([bad, good])
    assert len(done) == 5
