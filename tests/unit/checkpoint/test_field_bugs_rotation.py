"""Pains of the field with rotation, each by the number of the report; group B of the list.

TF is huggingface/transformers, AC huggingface/accelerate, PL Lightning-AI/pytorch-lightning.
Those that need a trainer are in ``tests/unit/train/test_field_bugs_best.py``.
"""

from __future__ import annotations

import threading
import uuid

import pytest
import torch

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.refs import create_tag, resolve
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import BestOf, Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import ConfigError, KeyNotFound, SaveFailed, StoreFull
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.storage.fsspec_store import FsspecStore
from resilient.storage.local import LocalStore
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, begin, save


class Watched(MemoryStore):
    """Counts what is committed after every change, and lists the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.changes: list[tuple[str, str]] = []

    def put_new(self, key, data):
        super().put_new(key, data)
        self._look("put_new", key)

    def delete(self, key):
        super().delete(key)
        self._look("delete", key)

    def _look(self, verb, key):
        self.changes.append((verb, key))
        self.counts.append(len(committed(self)))


def open_one(store, retention):
    comms = ControlGroup(InMemoryKVStore(), World(), uuid.uuid4().hex)
    desk = CheckpointContext(
        store, comms, CheckpointOptions(retention), SystemClock(), Emitter(SystemClock())
    )
    return CheckpointEngine(desk)


def part(value):
    return {"model": Part(Values(weight=torch.full((4,), float(value))))}


def train(store, retention, steps, **options):
    """Resume, save ``steps``, close; return what was resumed."""
    checkpointer = open_one(store, retention)
    resumed = checkpointer.resume(part(0), **options)
    for step in steps:
        checkpointer.save(step, part(step), CheckpointInfo())
    checkpointer.close()
    return resumed


def test_tf_25129_a_limit_of_one_never_leaves_nothing():
    store = Watched()
    train(store, Retention(keep_last=1), range(1, 6))
    first = store.counts.index(1)
    assert min(store.counts[first:]) >= 1
    assert committed(store) == [CheckpointId(1, 5)]


@pytest.mark.parametrize("steps", [(99_999, 100_000, 200_000, 1_000_000), (9, 10, 99, 100)])
def test_tf_11769_order_is_by_number_at_any_step(steps):
    store = MemoryStore()
    train(store, Retention(keep_last=2), steps)
    assert [one.step for one in committed(store)] == sorted(steps)[-2:][::-1]


def test_tf_20988_two_that_rotate_one_folder_at_once_do_not_hurt_each_other(tmp_path):
    first = LocalStore(tmp_path)
    begin(first)
    for step in range(1, 9):
        save(first, CheckpointId(1, step))
    stores = [LocalStore(tmp_path) for _ in range(4)]
    gate, failed = threading.Barrier(len(stores)), []

    def work(store):
        gate.wait()
        try:
            collect_garbage(store, Retention(keep_last=2), 1)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must show it
            failed.append(error)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [one.step for one in committed(first)] == [8, 7]
    assert all(verify(first, one) == [] for one in committed(first))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        "checkpoint-7-g1",
        "checkpoint-8-g1",
    }


def test_ac_1163_deleting_comes_after_saving_and_the_oldest_goes():
    store = Watched()
    train(store, Retention(keep_last=2), range(1, 5))
    manifests = [(verb, key) for verb, key in store.changes if key.endswith("manifest.json")]
    assert manifests == [
        ("put_new", "checkpoint-1-g1/manifest.json"),
        ("put_new", "checkpoint-2-g1/manifest.json"),
        ("put_new", "checkpoint-3-g1/manifest.json"),
        ("delete", "checkpoint-1-g1/manifest.json"),
        ("put_new", "checkpoint-4-g1/manifest.json"),
        ("delete", "checkpoint-2-g1/manifest.json"),
    ]


def test_ac_3306_a_life_that_resumed_overwrites_nothing_and_meets_nothing_in_its_way():
    store = MemoryStore()
    train(store, Retention(), (1, 2, 3))
    old = dict(store.objects)
    assert train(store, Retention(), (2, 3, 4), ref="step:1").step == 1
    assert {key: store.objects[key] for key in old} == old
    assert committed(store)[0] == CheckpointId(2, 4)
    assert resolve(store, "step:3") == CheckpointId(2, 3)


@pytest.mark.parametrize("dies_at", ["model", "manifest"])
def test_pl_21813_what_a_life_resumed_from_outlives_the_first_save_that_fails(dies_at):
    """On a bucket, with a limit of one and a step that was saved before."""
    store = FsspecStore(f"memory://{uuid.uuid4().hex}")
    train(store, Retention(keep_last=1), (1, 2))

    class Full(FaultyStore):
        def put(self, key, data):
            if dies_at in key:
                raise StoreFull(f"no room for {key}", key=key)
            super().put(key, data)

        def put_new(self, key, data):
            if dies_at in key:
                raise StoreFull(f"no room for {key}", key=key)
            super().put_new(key, data)

    with pytest.raises(SaveFailed):
        train(Full(store), Retention(keep_last=1), (3,))
    assert committed(store) == [CheckpointId(1, 2)]
    assert train(store, Retention(keep_last=1), (3,)).checkpoint == CheckpointId(1, 2)
    assert committed(store) == [CheckpointId(3, 3)], "a commit of its own lets the parent go"


def test_pl_21110_last_and_best_are_answers_and_not_files(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = open_one(store, Retention(keep_best=(BestOf("loss"),)))
    checkpointer.resume({})
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        checkpointer.save(step, part(step), CheckpointInfo(metrics={"loss": loss}))
    checkpointer.close()
    assert resolve(store, "latest").step == 3
    assert resolve(store, "best:loss").step == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-2-g1", "checkpoint-3-g1", "generations"}


def test_simpletuner_2989_exactly_the_limit_stays_after_every_save():
    store = Watched()
    checkpointer = open_one(store, Retention(keep_last=2))
    checkpointer.resume({})
    for step in range(1, 6):
        checkpointer.save(step, part(step), CheckpointInfo())
        checkpointer.wait()
        assert len(committed(store)) == min(step, 2)
    checkpointer.close()


def test_simpletuner_2989_after_a_rollback_the_abandoned_higher_step_owns_no_slot():
    store = MemoryStore()
    train(store, Retention(), (10, 20, 30))
    train(store, Retention(keep_last=2), (15,), ref="step:10")
    assert committed(store) == [CheckpointId(2, 15), CheckpointId(1, 10)]
    train(store, Retention(keep_last=2), (20,))
    assert committed(store) == [CheckpointId(3, 20), CheckpointId(2, 15)]
    assert lineage(store).abandoned == ()


@pytest.mark.parametrize("limit", [0, -1])
def test_simpletuner_2989_a_limit_of_zero_is_refused_and_deletes_nothing(limit):
    with pytest.raises(ConfigError, match="keep at least 1"):
        Retention(keep_last=limit)


def test_neptune_1888_a_reader_is_told_that_it_was_rotated_away_and_not_that_it_is_damaged():
    store = MemoryStore()
    train(store, Retention(), (1, 2))

    class Rotating(FaultyStore):
        """Between the manifest and the files of step 1, the run rotates."""

        def get(self, key):
            content = super().get(key)
            if key == "checkpoint-1-g1/manifest.json":
                collect_garbage(store, Retention(keep_last=1), 1)
            return content

    with pytest.raises(KeyNotFound, match=r"checkpoint-1-g1/manifest\.json"):
        read(Rotating(store), CheckpointId(1, 1))


def test_neptune_1888_an_upload_holds_its_checkpoint_by_a_tag():
    store = MemoryStore()
    train(store, Retention(keep_last=1), (1,))
    create_tag(store, "uploading", CheckpointId(1, 1), SystemClock())
    train(store, Retention(keep_last=1), (2, 3))
    assert committed(store) == [CheckpointId(2, 3), CheckpointId(1, 1)]
    assert read(store, resolve(store, "uploading")).files
