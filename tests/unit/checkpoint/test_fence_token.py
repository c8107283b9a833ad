"""A repository is restored from a backup while a process that claimed a number still runs."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest
import torch

from resilient.checkpoint import garbage_collection
from resilient.checkpoint.commit import commit
from resilient.checkpoint.fenced_put import EXCLUSIVE_BYTES_MAX, put_fenced
from resilient.checkpoint.garbage_collection import (
    FENCE_SECONDS,
    apply_plan,
    collect_garbage,
    discard_uncommitted,
    scan_and_plan,
)
from resilient.checkpoint.generations import check_fence, newest_claim, read_generation
from resilient.checkpoint.promotion import promote
from resilient.checkpoint.replicate import plan_copy, replicate
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.checkpoint.trash import TrashPolicy, put_in_trash
from resilient.clock import SystemClock
from resilient.errors import Fenced, KeyExists
from resilient.format.document import seal
from resilient.format.keys import CheckpointId, generation_key, segment_key, trash_name
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import MemoryStore
from resilient.testing.object_server import ObjectClient, ObjectServer
from resilient_cli.commands import prune
from resilient_cli.output import Output
from tests.helpers.clocks import OwnClock
from tests.helpers.manifests import Values, begin, empty_manifest, save
from tests.helpers.one_rank import open_one

OLD = "0" * 32
"""A token that no claim in the store has."""
NAME = trash_name("2026-01-02T03:04:05.678Z", "2026-01-03T03:04:05.678Z")


class Folder:
    """A repository in a folder, and its backup."""

    def __init__(self, folder):
        self.folder, self.copy = folder / "repo", folder / "backup"
        self.folder.mkdir()

    def open(self):
        return LocalStore(self.folder)

    def back_up(self):
        shutil.copytree(self.folder, self.copy)

    def restore(self):
        shutil.rmtree(self.folder)
        shutil.copytree(self.copy, self.folder)

    def content(self):
        files = [one for one in self.folder.rglob("*") if one.is_file()]
        return {str(one.relative_to(self.folder)): one.read_bytes() for one in files}


class Bucket:
    """A repository in a bucket, and its backup."""

    def __init__(self, _):
        self.server = ObjectServer()

    def open(self):
        return ObjectClient(self.server, part_bytes=4 << 20, page=1000)

    def back_up(self):
        self.copy = dict(self.server.objects)

    def restore(self):
        self.server.objects.clear()
        self.server.objects.update(self.copy)

    def content(self):
        return dict(self.server.objects)


@pytest.fixture(params=[Folder, Bucket])
def place(request, tmp_path):
    one = request.param(tmp_path)
    one.opened = []
    yield one
    for checkpointer in one.opened:
        # The processes that were fenced raise it once more.
        with suppress(Fenced):
            checkpointer.close()


def weight(value, size=1000):
    return {"model": Part(Values(weight=torch.full((size,), float(value))))}


def save_one(checkpointer, step, value, size=1000):
    checkpointer.save(step, weight(value, size), CheckpointInfo())
    checkpointer.wait()


def resumed(place, **limits):
    checkpointer = open_one(place.open(), **limits)
    place.opened.append(checkpointer)
    checkpointer.resume({"model": Part(Values())})
    return checkpointer


def sleeping(place):
    """Return a checkpointer of generation 2 whose repository was restored meanwhile."""
    first = resumed(place)
    save_one(first, 1, 1)
    first.close()
    place.back_up()
    old = resumed(place)
    place.restore()
    return old


def require_fenced(place, old, step, value=9, size=1000):
    """Save as the old process; return what the repository lost or got by it."""
    before = place.content()
    with pytest.raises(Fenced) as caught:
        save_one(old, step, value, size)
    assert caught.value.exit_code == 80
    after = place.content()
    assert {key: after.get(key) for key in before} == before
    return after.keys() - before.keys()


def read_weight(place, step):
    target = Values()
    reader = open_one(place.open())
    reader.load_part(CheckpointId(2, step), "model", Part(target))
    reader.close()
    return float(target.state["weight"][0])


@pytest.mark.parametrize("size", [1000, EXCLUSIVE_BYTES_MAX // 4 + 1])
def test_fence_same_number_same_step_changes_no_byte(place, size):
    old = sleeping(place)
    new = resumed(place)
    assert old.generation == new.generation == 2
    save_one(new, 2, 5, size)
    assert not require_fenced(place, old, 2, 9, size)
    assert read_weight(place, 2) == 5
    save_one(new, 3, 6, size)
    assert read_weight(place, 3) == 6


def test_fence_same_number_later_step_commits_nothing(place):
    old = sleeping(place)
    new = resumed(place)
    save_one(new, 2, 5)
    left = require_fenced(place, old, 3)
    assert "checkpoint-3-g2/manifest.json" not in left
    save_one(new, 3, 6)
    assert read_weight(place, 3) == 6


def test_fence_rotation_of_old_claim_deletes_nothing(place):
    old = sleeping(place)
    new = resumed(place)
    for step in (2, 3):
        save_one(new, step, step)
    before = place.content()
    with pytest.raises(Fenced, match="belongs to another process"):
        collect_garbage(place.open(), Retention(1), 2, token=old._generation.token)
    assert place.content() == before


def test_prune_planned_before_restore_deletes_nothing(place, monkeypatch):
    old = resumed(place)
    place.back_up()
    for step in (1, 2, 3):
        save_one(old, step, step)

    def planned(*given, **named):
        found = scan_and_plan(*given, **named)
        place.restore()
        shutil.rmtree(place.folder) if isinstance(place, Folder) else place.server.objects.clear()
        new = resumed(place)
        assert new.generation == 1
        for step in (1, 2, 3):
            save_one(new, step, step + 10)
        before.update(place.content())
        return found

    before = {}
    monkeypatch.setattr(prune, "scan_and_plan", planned)
    output, time = Output(agrees=True), TrashPolicy(SystemClock())
    with pytest.raises(Fenced, match="belongs to another process"):
        prune._apply_retention(place.open(), Retention(1), time, output, asks=False, dry_run=False)
    assert place.content() == before


def test_prune_of_damaged_claim_compares_number():
    store = MemoryStore()
    assert newest_claim(store) == (0, "")
    begin(store)
    assert newest_claim(store) == (1, read_generation(store, 1).token)
    store.put(generation_key(1), b"{}")
    assert newest_claim(store) == (1, "")


def test_fence_record_gone_after_restore_refuses_save(place):
    old = sleeping(place)
    with pytest.raises(Fenced, match="was deleted"):
        save_one(old, 2, 9)
    assert "checkpoint-2-g2/manifest.json" not in place.content()


def test_fence_damaged_record_stops_no_run(place):
    old = resumed(place)
    place.open().put(generation_key(1), b"{}")
    save_one(old, 2, 9)
    assert "checkpoint-2-g1/manifest.json" in place.content()


def test_check_fence_without_token_compares_number():
    store = MemoryStore()
    begin(store)
    check_fence(store, 1)
    check_fence(store, 1, read_generation(store, 1).token)
    with pytest.raises(Fenced, match="belongs to another process"):
        check_fence(store, 1, OLD)


@pytest.mark.parametrize("key", ["checkpoint-1-g1/a", segment_key(CheckpointId(1, 1))])
def test_put_fenced_replaces_only_uncommitted_files(key):
    store = MemoryStore()
    begin(store)
    looks = []
    put_fenced(store, key, b"first", lambda: looks.append(1))
    assert not looks
    put_fenced(store, key, b"second", lambda: looks.append(1))
    assert (store.objects[key], looks) == (b"second", [1])
    commit(store, empty_manifest(CheckpointId(1, 1)))
    put_fenced(store, key, b"second", lambda: None)
    for other in (b"third", b"thirds"):
        with pytest.raises(KeyExists):
            put_fenced(store, key, other, lambda: None)
    assert store.objects[key] == b"second"


def test_put_fenced_without_exclusive_create_looks_first():
    store = MemoryStore()
    store.exclusive = False

    def refuse():
        raise Fenced("another claim")

    with pytest.raises(Fenced):
        put_fenced(store, "checkpoint-1-g1/a", b"x", refuse)
    assert not store.objects


class Restored(MemoryStore):
    """Restored from a backup, and claimed again, at the first delete of a kind of file."""

    def __init__(self, ending, slept=lambda: None) -> None:
        super().__init__()
        self.ending, self.slept = ending, slept
        self.backup: dict[str, bytes] = {}

    def delete(self, key):
        if self.backup and key.endswith(self.ending):
            self.slept()
            claimed = {**read_generation(self, 1).to_json(), "token": OLD}
            self.objects = dict(self.backup) | {generation_key(1): seal(claimed)}
            self.backup = {}
            self.before = dict(self.objects)
        super().delete(key)

    @property
    def lost(self) -> set[str]:
        return self.before.keys() - self.objects.keys()


def four_saved(store):
    begin(store)
    for step in (1, 2, 3, 4):
        save(store, CheckpointId(1, step))
    store.backup = dict(store.objects)
    return read_generation(store, 1).token


def test_retention_short_sleep_deletes_one_folder():
    store = Restored(".safetensors")
    token = four_saved(store)
    with pytest.raises(Fenced, match="belongs to another process"):
        collect_garbage(store, Retention(1), 1, token=token)
    assert {key.partition("/")[0] for key in store.lost} == {"checkpoint-1-g1"}
    assert len(store.lost) > 1


def test_retention_long_sleep_deletes_one_file():
    clock = OwnClock()
    store = Restored(".safetensors", lambda: clock.sleep(FENCE_SECONDS + 1))
    token = four_saved(store)
    found = scan_and_plan(store, Retention(1))
    with pytest.raises(Fenced, match="belongs to another process"):
        apply_plan(store, found, 1, token, clock)
    assert len(store.lost) == 1


def test_retention_checks_fence_once_per_folder(monkeypatch):
    looks = []
    monkeypatch.setattr(garbage_collection, "check_fence", lambda *_: looks.append(1))
    store = Restored("none")
    four_saved(store)
    found = scan_and_plan(store, Retention(1))
    apply_plan(store, found, 1, "", OwnClock())
    assert len(looks) == 3 + 3  # Three manifests, then three folders.


def test_empty_trash_short_sleep_deletes_one_manifest():
    store = Restored(NAME)
    token = four_saved(store)
    for step in (1, 2, 3):
        one = CheckpointId(1, step)
        put_in_trash(store, one, NAME)
        store.delete(one.manifest_key)
    store.backup = dict(store.objects)
    grace = TrashPolicy(SystemClock(), empties=True)
    with pytest.raises(Fenced, match="belongs to another process"):
        collect_garbage(store, Retention(1), 1, token=token, grace=grace)
    assert store.lost == {f"checkpoint-1-g1/{NAME}"}


def test_discard_of_old_claim_deletes_nothing():
    store = MemoryStore()
    begin(store)
    store.put("checkpoint-1-g1/model.r00000.safetensors", b"in flight")
    with pytest.raises(Fenced):
        discard_uncommitted(store, CheckpointId(1, 1), OLD)
    assert "checkpoint-1-g1/model.r00000.safetensors" in store.objects
    discard_uncommitted(store, CheckpointId(1, 1), read_generation(store, 1).token)
    assert "checkpoint-1-g1/model.r00000.safetensors" not in store.objects


def test_promotion_of_old_claim_puts_nothing():
    near, durable = MemoryStore("test://near"), MemoryStore("test://durable")
    begin(durable)
    near.objects.update(durable.objects)
    newest = save(near, CheckpointId(1, 3))
    before = dict(durable.objects)
    tiers = TieredStore(near, durable, print)
    with pytest.raises(Fenced):
        promote(tiers, newest, 1, None, OLD)
    assert durable.objects == before
    assert promote(tiers, newest, 1, None, read_generation(durable, 1).token)


def test_copy_into_repository_of_another_claim_is_refused():
    source, target = MemoryStore("test://a"), MemoryStore("test://b")
    begin(source)
    newest = save(source, CheckpointId(1, 3))
    first = read_generation(source, 1)
    shipment = plan_copy(source, target, newest)
    other = {**first.to_json(), "token": OLD}
    target.put(generation_key(1), seal(other))
    before = dict(target.objects)
    with pytest.raises(Fenced):
        replicate(source, target, shipment, SystemClock(), lambda *_: None)
    assert {key: target.objects[key] for key in before} == before
    assert not [key for key in target.objects if key.startswith("checkpoint")]
