"""What a killed process did and did not sync is made durable before anybody builds upon it."""

from __future__ import annotations

from random import Random

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.retention import Retention
from resilient.errors import StoreError
from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixFileSystem
from resilient.storage.retry import RetryingStore
from resilient.testing.disk_model import Disk, FileOpKind, FileOpLog, RecordingFileSystem
from resilient.testing.fault_store import Crash
from tests.crash.histories import PLACE, machine, visible
from tests.crash.invariants import proof_of, shown
from tests.crash.little import Life, Setup, TickingClock

ALL = Setup(Retention(keep_last=3))


def recorded(folder):
    files = RecordingFileSystem(PosixFileSystem(), folder, FileOpLog())
    return files, LocalStore(folder.joinpath(*PLACE), files)


def states(record):
    """Return every disk that a power loss may leave, at any moment of a record."""
    disk = Disk()
    for op in record.steps:
        disk.apply(op)
        for state in disk.states(Random(1), 500):
            yield shown(visible(state.tree))


def half_deleted(folder):
    """Save twice; then a process takes the older manifest's name away and is killed."""
    files, store = recorded(folder)
    life = Life(store, ALL, TickingClock())
    life.begin()
    life.save()
    life.save()
    files.unlink(folder.joinpath(*PLACE, "checkpoint-1-g1", "manifest.json"))
    return files, life


def test_a_prune_after_a_kill_leaves_no_manifest_without_its_files():
    with machine({}) as folder:
        files, life = half_deleted(folder)
        life.house = LocalStore(folder.joinpath(*PLACE), files)
        life.setup = Setup(Retention(keep_last=1))
        life.prune()
        assert committed(life.house) == [CheckpointId(1, 2)]
        for store in states(files.record):
            assert not [one for one in committed(store) if proof_of(store, one)]


def saved_once(folder, dies_after=None):
    """Save once, or be killed after so many operations; the commit is the last link."""
    files, store = recorded(folder)
    files.dies_after = dies_after
    life = Life(store, ALL, TickingClock())
    life.begin()
    life.save()
    acts = [step.act for step in files.record.steps]
    return len(acts) - acts[::-1].index(FileOpKind.LINK)


def test_what_a_new_life_resumes_from_cannot_be_lost_any_more():
    with machine({}) as folder:
        after_commit = saved_once(folder)
    with machine({}) as folder:
        with pytest.raises(Crash):
            saved_once(folder, after_commit)
        files, store = recorded(folder)
        resumed = Life(RetryingStore(store, TickingClock()), ALL, TickingClock()).begin()
        assert resumed == CheckpointId(1, 1)
        first = next(step for step in files.record.steps if step.act is not FileOpKind.SYNC_FOLDER)
        settled = {op.path for op in files.record.steps[: files.record.steps.index(first)]}
        assert (*PLACE, "checkpoint-1-g1") in settled, "before the claim that names it"
        assert PLACE in settled


@pytest.mark.parametrize("failing", range(3))
def test_what_cannot_be_settled_is_no_ground_for_a_life(failing, tmp_path):
    class Bad(PosixFileSystem):
        left = failing

        def sync_folder(self, path):
            Bad.left -= 1
            if Bad.left == -1:
                raise OSError(5, "Input/output error")
            super().sync_folder(path)

    life = Life(LocalStore(tmp_path / "run"), ALL, TickingClock())
    life.begin()
    life.save()
    with pytest.raises(StoreError):
        Life(LocalStore(tmp_path / "run", Bad()), ALL, TickingClock()).begin()
    assert list_numbers(LocalStore(tmp_path / "run")) == [1], "nothing was claimed"


def test_a_store_settles_once():
    with machine({}) as folder:
        files, store = recorded(folder)
        store.put("a/b", b"x")
        store.settle()
        before = files.record.operations
        store.settle()
        assert files.record.operations == before
