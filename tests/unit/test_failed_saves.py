"""What a failed save, or a failed step after a commit, leaves to the saves that follow it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.messages import decode_job, encode_job
from resilient.checkpoint.events import PostCommitCleanupFailed
from resilient.checkpoint.generations import check_mark
from resilient.checkpoint.save.executor import ThreadSaveExecutor
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.save.persist import persist
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup, RankFailure
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.engine_factory import open_engine
from resilient.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerFailed,
    SaveFailed,
    StoreFull,
    StoreUnavailable,
)
from resilient.events import CheckpointCommitted, Emitter, RetentionFailed
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values
from tests.helpers.one_rank import open_one
from tests.helpers.tiered import checkpointer_of, save


class Unmarkable(MemoryStore):
    """Refuses to put the first mark of a life."""

    def __init__(self, url="test://unmarkable") -> None:
        super().__init__(url)
        self.refused = 0

    def put(self, key, data) -> None:
        if key.endswith(".committed.json") and not self.refused:
            self.refused += 1
            raise StoreUnavailable("the line is cut", key=key)
        super().put(key, data)


def test_a_mark_that_failed_is_put_after_the_next_save():
    store = Unmarkable()
    checkpointer = open_one(store)
    checkpointer.resume({})
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert store.refused == 1
    check_mark(store, 1)


@pytest.mark.parametrize("unmarkable", ["near", "durable"])
def test_a_mark_that_failed_in_a_tier_is_put_after_the_next_that_it_takes(unmarkable):
    stores = {name: MemoryStore(f"test://{name}") for name in ("near", "durable")}
    stores[unmarkable] = Unmarkable()
    checkpointer = checkpointer_of(stores["near"], stores["durable"])
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert stores[unmarkable].refused == 1
    check_mark(stores["near"], 1)
    check_mark(stores["durable"], 1)


def test_a_sink_that_raises_makes_no_failure_of_what_is_committed(tmp_path, capsys):
    def dashboard(_record, event):
        if type(event) is CheckpointCommitted:
            raise RuntimeError("the dashboard is down")

    emit = Emitter(SystemClock(), (dashboard,))
    checkpointer = open_engine(str(tmp_path), emit=emit, keep_last=1)
    checkpointer.resume({})
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 2)]
    check_mark(LocalStore(tmp_path), 1)
    assert capsys.readouterr().err.count("the dashboard is down") == 1


class Strange(Unmarkable):
    """Raises what is no error of a store, once, where the first mark is put."""

    def put(self, key, data) -> None:
        try:
            super().put(key, data)
        except StoreUnavailable as error:
            raise RuntimeError("a client's own error") from error


def test_a_foreign_error_after_the_commit_makes_no_failure_of_it():
    store = Strange()
    checkpointer = open_one(store)
    checkpointer.resume({})
    save(checkpointer, 1)
    assert store.refused == 1
    save(checkpointer, 2)
    checkpointer.close()
    check_mark(store, 1)


def test_a_foreign_error_after_the_commit_is_not_told_as_a_deletion_that_failed():
    told = []
    desk = open_one(Strange())._context
    emit = Emitter(SystemClock(), (lambda _, event: told.append(event),))
    checkpointer = CheckpointEngine(replace(desk, emit=emit))
    checkpointer.resume({})
    save(checkpointer, 1)
    checkpointer.close()
    assert not [one for one in told if isinstance(one, RetentionFailed)]
    (event,) = [one for one in told if isinstance(one, PostCommitCleanupFailed)]
    assert event.reason.startswith("RuntimeError: a client's own error (in put, test_failed_saves")
    assert "checkpoint-1-g1 is saved, but garbage collection failed on a defect" in event.message()


class Refusing(ThreadSaveExecutor):
    """Cannot take the jobs of some calls."""

    def __init__(self, *refused) -> None:
        super().__init__()
        self.calls, self.refused = 0, refused

    def submit(self, desk, job) -> None:
        self.calls += 1
        if self.calls in self.refused:
            raise DeadlineExceeded("rank 1 was silent", hint="look at rank 1")
        super().submit(desk, job)


@pytest.mark.parametrize("refused", [1, 2])
def test_a_save_that_nobody_took_is_told_as_failed_and_never_counted_as_saved(refused):
    store = MemoryStore()
    checkpointer = CheckpointEngine(open_one(store)._context, Refusing(refused))
    checkpointer.resume({})
    for step in (1, 2, 3):
        if step == refused:
            with pytest.raises(SaveFailed, match="rank 1 was silent; older") as caught:
                save(checkpointer, step)
            assert caught.value.hint == "look at rank 1"
        else:
            save(checkpointer, step)
    checkpointer.close()
    assert [one.step for one in checkpointer.committed()] == sorted({1, 2, 3} - {refused})[::-1]
    check_mark(store, 1)


def test_the_save_after_one_that_nobody_took_refers_to_the_one_before():
    store = MemoryStore()
    desk = open_one(store, save_unchanged="refer")._context
    checkpointer = CheckpointEngine(desk, Refusing(2))
    checkpointer.resume({})
    checkpointer.save(1, weight(2), CheckpointInfo())
    with pytest.raises(SaveFailed):
        checkpointer.save(2, weight(2), CheckpointInfo())
    assert checkpointer.in_flight is None
    checkpointer.save(3, weight(2), CheckpointInfo())
    checkpointer.close()
    manifest = read_manifest(store, CheckpointId(1, 3))
    assert {one.name for one in manifest.files if "model" in one.name} == {
        "checkpoint-1-g1/model.r00000.safetensors"
    }


def test_a_step_that_nobody_took_may_be_saved_again():
    checkpointer = CheckpointEngine(open_one(MemoryStore())._context, Refusing(1))
    checkpointer.resume({})
    with pytest.raises(SaveFailed):
        save(checkpointer, 5)
    save(checkpointer, 5)
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 5)]


class Doubtful(MemoryStore):
    """The answer to the put of one manifest is lost, and nobody can ask what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.doubted, self.is_cut = "", False

    def put_new(self, key, data) -> None:
        super().put_new(key, data)
        if key == self.doubted:
            self.is_cut = True
            raise StoreUnavailable("cut after the put", key=key)

    def get(self, key):
        if self.is_cut:
            raise StoreUnavailable("cut", key=key)
        return super().get(key)


def weight(value):
    return {"model": Part(Values(weight=torch.full((5000,), float(value))))}


def test_a_step_whose_commit_is_in_doubt_is_not_written_over():
    store = Doubtful()
    checkpointer = open_one(store)
    checkpointer.resume({})
    store.doubted = CheckpointId(1, 2).manifest_key
    checkpointer.save(2, weight(2), CheckpointInfo())
    with pytest.raises(SaveFailed, match="cut"):
        checkpointer.wait()
    store.is_cut = False
    with pytest.raises(ConfigError, match="may still be committed"):
        checkpointer.save(2, weight(99), CheckpointInfo())
    save(checkpointer, 3)
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 3), CheckpointId(1, 2)]
    assert verify(store, CheckpointId(1, 2)) == []


def test_the_next_save_refers_to_one_that_was_committed_all_the_same():
    store = Doubtful()
    checkpointer = open_one(store, save_unchanged="refer")
    checkpointer.resume({})
    save(checkpointer, 1)
    store.doubted = CheckpointId(1, 2).manifest_key
    checkpointer.save(2, weight(2), CheckpointInfo())
    with pytest.raises(SaveFailed, match="cut"):
        checkpointer.wait()
    store.is_cut = False
    checkpointer.save(3, weight(2), CheckpointInfo())
    checkpointer.close()
    manifest = read_manifest(store, CheckpointId(1, 3))
    assert {one.name for one in manifest.files if "model" in one.name} == {
        "checkpoint-2-g1/model.r00000.safetensors"
    }
    assert verify(store, CheckpointId(1, 3)) == []


def jobs_of(checkpointer, step):
    """Return the job of a save that nobody persisted."""
    taken = []
    checkpointer._persister.submit = lambda desk, job: taken.append((desk, job))
    checkpointer.resume({})
    checkpointer.save(step, weight(step), CheckpointInfo())
    return taken[0]


class Full(MemoryStore):
    """Has no room for manifests."""

    def put_new(self, key, data) -> None:
        if key.endswith("manifest.json"):
            raise StoreFull("no space", key=key)
        super().put_new(key, data)


@pytest.mark.parametrize("has_rival", [True, False])
def test_a_failed_save_deletes_only_what_nobody_else_can_be_writing(has_rival):
    store = Full()
    desk, job = jobs_of(open_one(store), 2)
    with pytest.raises(SaveFailed):
        persist(desk, replace(job, has_rival=has_rival))
    assert bool(list(store.list("checkpoint-2-g1/"))) == has_rival


class Torn(MemoryStore):
    """Another process deletes a file after it was put."""

    def put_new(self, key, data) -> None:
        if not key.endswith(".safetensors"):
            super().put_new(key, data)


def test_with_a_rival_nothing_is_committed_whose_files_are_gone():
    store = Torn()
    desk, job = jobs_of(open_one(store), 2)
    with pytest.raises(SaveFailed, match="no longer exists"):
        persist(desk, replace(job, has_rival=True))
    assert CheckpointId(1, 2).manifest_key not in store.objects


def test_the_same_manifest_put_by_another_process_is_a_commit():
    store = MemoryStore()
    desk, job = jobs_of(open_one(store), 2)
    persist(desk, job)
    persist(desk, replace(job, topic="save/1/here", has_rival=True))
    assert verify(store, CheckpointId(1, 2)) == []


def test_the_keeper_and_who_saves_in_its_place_are_each_others_rivals():
    desk, job = jobs_of(open_one(MemoryStore()), 2)
    kept, _ = decode_job(
        encode_job(job, 0, {}), lambda _, size_bytes: memoryview(bytearray(size_bytes)), 0, 1.0
    )
    fallback = Refusing()
    submitted = []
    fallback.submit = lambda _, job: submitted.append(job)
    gone = RankFailure(PeerFailed.code, "it sleeps")
    DaemonSaveExecutor(None, fallback)._persist_here(desk, job, gone)
    assert kept.has_rival
    assert [one.has_rival for one in submitted] == [True]
    assert not job.has_rival


class Deserted(InMemoryKVStore):
    """The others have had their verdict, and left; the keeper commits while nobody answers."""

    def __init__(self, commit) -> None:
        super().__init__()
        self._commit = commit

    def wait(self, keys, within_seconds):
        self._commit()


@pytest.mark.parametrize("lands", [True, False])
def test_a_keeper_that_was_only_slow_has_saved_after_all(lands):
    desk, job = jobs_of(open_one(MemoryStore()), 2)
    commit = partial(persist, desk, job) if lands else list
    alone = replace(desk, comms=ControlGroup(Deserted(commit), World(0, 2), "life"))
    persister = DaemonSaveExecutor(None, Refusing())
    gone = RankFailure(
        PeerFailed.code,
        "it did not answer",
        cause=PeerFailed("it did not answer"),
    )
    if lands:
        assert persister._persist_here(alone, job, gone)
        return
    with pytest.raises(PeerFailed, match="did not answer"):
        persister._persist_here(alone, job, gone)
