"""What parity does not give back: manifests from their copies, files from other repositories."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.repair import apply_repair, plan_repair, replace_damaged_file
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.persist import write
from resilient.checkpoint.verify import verify
from resilient.errors import NothingToResume
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId, aside_name, is_file_name, parse_checkpoint
from resilient.format.manifest import PartEntry
from resilient.format.safetensors_file import StagedFile
from resilient.testing.memory_store import MemoryStore
from tests.helpers.damaging import (
    CHECKPOINT,
    MODEL,
    PARITY,
    flip,
    keys_of,
    large,
    put_object,
    repair,
    save_repository,
)
from tests.helpers.manifests import begin, empty_manifest, save


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_the_copy_of_the_manifest_is_put_anew(damage):
    store = save_repository(1)
    whole = dict(store.objects)
    put_object(store, CHECKPOINT.copy_key, damage)
    (finding,) = verify(store, CHECKPOINT)
    assert (finding.file, finding.severity) == ("manifest.copy.json", "warning")
    assert repair(store).is_whole
    assert store.objects == whole


def test_a_damaged_manifest_is_taken_from_its_copy_with_whatever_else_is_lost():
    store = save_repository(1)
    whole = dict(store.objects)
    flip(store, CHECKPOINT.manifest_key, 50)
    store.delete(MODEL)
    (finding,) = verify(store, CHECKPOINT)
    assert finding.fix == f"resilient ckpt repair checkpoint-7-g1 {store.url}"
    plan = repair(store)
    assert [one.file for one in plan.fixes] == ["model.r00000.safetensors", "manifest.json"]
    assert store.objects == whole


def test_a_manifest_without_a_whole_copy_is_lost_and_nothing_is_changed():
    store = save_repository(1)
    flip(store, CHECKPOINT.manifest_key, 50)
    flip(store, CHECKPOINT.copy_key, 50)
    before = dict(store.objects)
    plan = repair(store)
    assert (plan.manifest, plan.is_whole) == (None, False)
    assert store.objects == before


def test_what_was_let_go_stays_gone_unless_it_is_asked_for():
    store = save_repository(1)
    whole = dict(store.objects)
    store.delete(CHECKPOINT.manifest_key)
    before = dict(store.objects)
    with pytest.raises(NothingToResume, match="does not restore deleted checkpoints") as caught:
        repair(store)
    assert store.objects == before
    assert committed(store) == []
    assert caught.value.hint.endswith("--undelete")
    store.delete(MODEL)
    assert repair(store, undelete=True).is_whole
    assert store.objects == whole
    assert committed(store) == [CHECKPOINT]


def test_what_was_let_go_and_is_not_all_there_does_not_come_back():
    store = save_repository(1)
    for key in (CHECKPOINT.manifest_key, MODEL, PARITY):
        store.delete(key)
    before = dict(store.objects)
    assert not repair(store, undelete=True).is_whole
    assert store.objects == before
    store.delete(CHECKPOINT.copy_key)
    with pytest.raises(NothingToResume):
        repair(store, undelete=True)


def twin(store) -> MemoryStore:
    other = MemoryStore()
    other.objects = dict(store.objects)
    other.url = "memory://copy"
    return other


def test_another_repository_gives_what_is_lost():
    store = save_repository(0, ranks=2)
    whole, other = dict(store.objects), twin(store)
    for key in keys_of(store):
        store.delete(key)
    plan = repair(store, other)
    assert {one.source for one in plan.fixes} == {"memory://copy"}
    assert store.objects == whole
    assert other.objects == whole


def test_two_damaged_copies_and_parity_together_are_enough():
    store = large(1)
    whole, other = dict(store.objects), twin(store)
    for place, position in ((store, 0), (store, CHUNK_BYTES), (other, CHUNK_BYTES)):
        flip(place, CHECKPOINT.key("a.json"), position)
    store.delete(CHECKPOINT.key("b.json"))
    plan = repair(store, other)
    assert {one.file: one.source for one in plan.fixes} == {
        "a.json": "parity and memory://copy",
        "b.json": "memory://copy",
    }
    assert store.objects == whole


def test_what_another_repository_holds_under_the_name_is_not_believed():
    store = save_repository(0)
    other = MemoryStore()
    begin(other)
    save(other, CHECKPOINT)
    other.objects[MODEL] = other.objects[MODEL][:-1] + b"\x7f"
    store.delete(MODEL)
    flip(store, CHECKPOINT.key("rng_state_0.safetensors"), -1)
    before = dict(store.objects)
    plan = repair(store, other)
    assert [one.file for one in plan.losses] == ["model.r00000.safetensors"]
    assert {key for key in before if store.objects[key] != before[key]} == {
        CHECKPOINT.key("rng_state_0.safetensors")
    }, "equal bytes are equal, wherever they come from"


@pytest.mark.parametrize("state", ["damaged", "gone"])
def test_a_manifest_is_taken_from_elsewhere_only_if_the_life_is_the_same(state):
    store = save_repository(0)
    whole, same = dict(store.objects), twin(store)
    fork = MemoryStore()
    begin(fork)
    save(fork, CHECKPOINT)
    if state == "gone":
        store.delete(CHECKPOINT.manifest_key)
    else:
        flip(store, CHECKPOINT.manifest_key, 50)
    before = dict(store.objects)
    options = {"undelete": state == "gone"}
    if state == "gone":
        with pytest.raises(NothingToResume):
            repair(store, fork, **options)
    else:
        assert repair(store, fork).manifest is None
    assert store.objects == before
    assert repair(store, same, **options).is_whole
    assert store.objects == whole


def test_what_was_damaged_is_kept_and_goes_with_its_checkpoint():
    store = save_repository(1)
    whole = dict(store.objects)
    flip(store, MODEL, 900)
    damaged = store.objects[MODEL]
    kept = apply_repair(store, plan_repair(store, CHECKPOINT))
    flip(store, MODEL, 900)
    assert apply_repair(store, plan_repair(store, CHECKPOINT)) == kept, "once is enough"
    flip(store, MODEL, 901)
    assert apply_repair(store, plan_repair(store, CHECKPOINT)) != kept, "it is other damage"
    (aside,) = kept.values()
    assert (kept.keys(), aside.split("/")[0]) == ({"model.r00000.safetensors"}, CHECKPOINT.folder)
    assert store.objects[aside] == damaged
    assert verify(store, CHECKPOINT) == []
    assert whole.items() <= store.objects.items()
    newer = save(store, CheckpointId(1, 8))
    collect_garbage(store, Retention(keep_last=1), 1, written=newer)
    assert not any(key.startswith(CHECKPOINT.folder) for key in store.objects)


def test_of_a_file_of_an_older_checkpoint_the_copy_is_kept_in_the_repaired_one():
    store = MemoryStore()
    key = CheckpointId(1, 3).key("a.json")
    store.objects[key] = b"damaged"
    aside = replace_damaged_file(store, CHECKPOINT, key, b"whole")
    assert parse_checkpoint(aside.split("/")[0]) == CHECKPOINT
    assert store.objects == {key: b"whole", aside: b"damaged"}
    assert replace_damaged_file(store, CHECKPOINT, key, b"whole") == ""
    assert is_file_name(aside_name("x" * 180 + ".safetensors", "0" * 32))


def test_a_checkpoint_that_is_let_go_meanwhile_is_not_brought_back():
    store = save_repository(1)
    flip(store, MODEL, 1)
    plan = plan_repair(store, CHECKPOINT)
    store.delete(CHECKPOINT.manifest_key)
    before = dict(store.objects)
    with pytest.raises(NothingToResume, match="was deleted while it was repaired"):
        apply_repair(store, plan)
    assert store.objects == before


def test_another_step_gives_back_what_did_not_change():
    store = MemoryStore()
    begin(store)
    for step, number in ((6, 1), (7, 2)):
        files = [StagedFile("a.json", b"x" * CHUNK_BYTES + bytes([number]) * 9)]
        parts = [PartEntry("state", "replicated", "a.json")]
        checkpoint = CheckpointId(1, step)
        receipt = write(store, checkpoint, 0, files, parts, 0)
        commit(store, gather_receipts(empty_manifest(checkpoint), [receipt]))
    whole = dict(store.objects)
    flip(store, CHECKPOINT.key("a.json"), 5)
    plan = repair(store)
    assert [(one.file, one.source) for one in plan.fixes] == [("a.json", "checkpoint-6-g1")]
    assert store.objects == whole
    flip(store, CHECKPOINT.key("a.json"), CHUNK_BYTES + 3)
    assert not repair(store).is_whole, "its last bytes are this step's own"


def test_a_longer_file_is_promised_whole_only_if_its_first_bytes_are():
    store = save_repository(0)
    whole = dict(store.objects)
    store.objects[MODEL] = whole[MODEL] + b"more"
    assert repair(store).is_whole
    assert store.objects == whole
    store.objects[MODEL] = b"more" + whole[MODEL]
    plan = repair(store)
    assert [one.file for one in plan.losses] == ["model.r00000.safetensors"]
    assert not plan.fixes
