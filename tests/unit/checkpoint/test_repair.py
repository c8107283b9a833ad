"""Damage and loss are mended bit for bit, wherever they are; beyond that, nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.restore.reconstruct import reconstruct_file
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.persist import write
from resilient.checkpoint.verify import verify
from resilient.errors import IntegrityError, StoreUnavailable
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.format.manifest import PartEntry, StoredRegion, TensorEntry
from resilient.format.partial_read import PartialFile
from resilient.format.regions import Region, whole
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from resilient.testing.fault_store import FaultyStore
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


def damages_of(data: bytes):
    """Yield a damaged version of a file for each kind of damage; None is its loss."""
    yield None
    yield b""
    yield data[:-1]
    yield data[: len(data) // 2]
    yield data + b"\0"
    yield bytes(len(data))
    for position in {*range(0, len(data), max(len(data) // 40, 1)), len(data) - 1}:
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        yield bytes(flipped)


@pytest.mark.slow
@pytest.mark.parametrize("parity", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_damage_to_any_one_file_is_repaired_bit_for_bit(parity, ranks):
    store = save_repository(parity, ranks)
    whole = dict(store.objects)
    tried = 0
    for key in keys_of(store):
        for data in damages_of(whole[key]):
            if data == whole[key]:
                continue
            put_object(store, key, data)
            assert verify(store, CHECKPOINT), "the damage is real"
            plan = repair(store)
            assert store.objects == whole, (key, data and len(data))
            assert plan.is_whole
            assert [CHECKPOINT.key(one.file) for one in plan.fixes] == [key]
            tried += 1
    assert tried > 40 * len(keys_of(store)) // 2


def test_any_two_files_of_a_rank_are_mended_with_two_parities():
    store = save_repository(2)
    whole = dict(store.objects)
    for pair in combinations(keys_of(store), 2):
        for key in pair:
            store.delete(key)
        assert repair(store).is_whole
        assert store.objects == whole, pair


def test_each_rank_may_lose_one_at_the_same_time():
    store = save_repository(1, ranks=2)
    whole = dict(store.objects)
    store.delete(CHECKPOINT.key("model.r00000.safetensors"))
    store.delete(CHECKPOINT.key("rng_state_1.safetensors"))
    assert repair(store).is_whole
    assert store.objects == whole


@pytest.mark.parametrize("parity", [0, 1, 2])
def test_one_loss_too_many_changes_nothing_and_says_what_is_lost(parity):
    store = save_repository(parity)
    lost = [key for key in keys_of(store) if key.startswith((MODEL, PARITY))]
    lost += [CHECKPOINT.key(name) for name in ("trainer_state.json", "rng_state_0.safetensors")]
    lost = lost[: parity + 1]
    for key in lost:
        store.delete(key)
    before = dict(store.objects)
    plan = repair(store)
    assert store.objects == before
    assert not plan.is_whole
    assert sorted(CHECKPOINT.key(one.file) for one in plan.losses) == sorted(lost)
    assert plan.lost_tensors[:2] == ("model/bias", "model/weight")
    assert plan.parts["model"] is False


def test_without_parity_it_says_which_tensors_and_parts_are_whole():
    store = save_repository(0)
    manifest = read_manifest(store, CHECKPOINT)
    bias = next(one for one in manifest.tensors if one.name == "model/bias").regions[0]
    data = bytearray(store.objects[MODEL])
    data[bias.start] ^= 1
    store.objects[MODEL] = bytes(data)
    before = dict(store.objects)
    plan = repair(store)
    assert store.objects == before
    (loss,) = plan.losses
    assert (loss.file, loss.tensors) == ("model.r00000.safetensors", ("model/bias",))
    assert plan.lost_tensors == ("model/bias",)
    assert plan.whole_tensors == ("model/weight", "rng_state_0/words")
    assert plan.parts == {"model": False, "rng_state_0": True, "trainer_state": True}


def test_a_lost_document_loses_the_plain_values_of_its_part_alone():
    store = save_repository(0)
    store.delete(CHECKPOINT.key("trainer_state.json"))
    plan = repair(store)
    assert plan.parts == {"model": True, "rng_state_0": True, "trainer_state": False}
    assert plan.lost_tensors == ()


def test_damage_of_every_file_is_repaired_while_it_is_in_different_chunks():
    store = large(1)
    whole = dict(store.objects)
    flip(store, CHECKPOINT.key("a.json"), 0)
    flip(store, CHECKPOINT.key("b.json"), CHUNK_BYTES + 1)
    flip(store, PARITY, 2 * CHUNK_BYTES + 4)
    assert repair(store).is_whole
    assert store.objects == whole


def test_damage_of_two_files_in_the_same_chunk_is_too_much_for_one_parity():
    store = large(1)
    flip(store, CHECKPOINT.key("a.json"), CHUNK_BYTES)
    flip(store, CHECKPOINT.key("b.json"), CHUNK_BYTES + 1)
    flip(store, CHECKPOINT.key("c.json"), 1)
    before = dict(store.objects)
    plan = repair(store)
    assert [one.file for one in plan.losses] == ["a.json", "b.json"]
    assert [one.file for one in plan.fixes] == ["c.json"], "what can be mended is"
    assert {key for key in before if store.objects[key] != before[key]} == {
        CHECKPOINT.key("c.json")
    }


def test_a_file_with_bytes_behind_its_end_needs_no_parity():
    store = large(0)
    whole = dict(store.objects)
    store.objects[CHECKPOINT.key("b.json")] += b"more"
    (finding,) = verify(store, CHECKPOINT, "quick")
    assert finding.fix.startswith("resilient ckpt repair")
    plan = repair(store)
    assert plan.fixes[0].source == "its own first bytes"
    assert store.objects == whole


def test_a_read_mends_in_memory_and_leaves_the_store_alone():
    store = save_repository(1)
    expected = read(store, CHECKPOINT)
    flip(store, MODEL, 900)
    before = dict(store.objects)
    proved = read(store, CHECKPOINT, reconstructs=True)
    assert proved.files == expected.files
    assert proved.reconstructed == ("model.r00000.safetensors",)
    assert store.objects == before
    with pytest.raises(IntegrityError, match="content is not what was committed"):
        read(store, CHECKPOINT)


def test_a_read_of_some_chunks_mends_those_alone():
    store = MemoryStore()
    begin(store)
    rows = CHUNK_BYTES // 4096
    layout = compute_layout([TensorSlot("weight", "F32", (3 * rows, 1024))], {})
    data = layout.head + bytes(range(256)) * ((layout.size_bytes - len(layout.head)) // 256)
    start, name = layout.starts["weight"], "model.r00000.safetensors"
    stored = StoredRegion(whole((3 * rows, 1024)), name, start, len(data) - start)
    tensor = TensorEntry("model/weight", "model", "F32", (3 * rows, 1024), (stored,))
    files = [StagedFile(name, data, (tensor,)), StagedFile("state.json", b"{}" * 3_000_000)]
    parts = [PartEntry("model", "replicated", "state.json")]
    receipt = write(store, CHECKPOINT, 0, files, parts, 1)
    commit(store, gather_receipts(empty_manifest(CHECKPOINT), [receipt]))

    def boxes(_):
        return {"model/weight": (Region((rows, 0), (rows // 2, 1024)),)}

    expected = read(store, CHECKPOINT, None, boxes).files
    assert isinstance(expected[name], PartialFile)
    for chunk in (0, 1, 2):
        flip(store, MODEL, chunk * CHUNK_BYTES + 9999)
    proved = read(store, CHECKPOINT, None, boxes, reconstructs=True)
    assert proved.files == expected
    assert proved.reconstructed == (name,)
    with pytest.raises(IntegrityError, match="content is not what was committed"):
        read(store, CHECKPOINT, None, boxes)


def test_a_read_that_cannot_mend_names_the_damage_and_why():
    store = save_repository(1)
    flip(store, MODEL, 900)
    store.delete(PARITY)
    with pytest.raises(IntegrityError) as caught:
        read(store, CHECKPOINT, reconstructs=True)
    assert "`checkpoint-7-g1/model.r00000.safetensors`: content is not" in caught.value.message
    assert "parity cannot reconstruct it" in caught.value.message
    assert "0 of 1 parity files are intact there" in caught.value.message


def test_a_read_takes_the_copy_of_a_damaged_manifest_only_if_it_mends():
    store = save_repository(1)
    flip(store, CHECKPOINT.manifest_key, 50)
    assert read(store, CHECKPOINT, reconstructs=True).reconstructed == ("manifest.json",)
    with pytest.raises(IntegrityError):
        read(store, CHECKPOINT)


def test_parity_that_is_whole_and_wrong_is_refused():
    """The digest has the last word: here a group names fewer files than its parity was made of."""
    store = large(1)
    expected = store.objects[CHECKPOINT.key("a.json")]
    store.delete(CHECKPOINT.key("a.json"))
    manifest = read_manifest(store, CHECKPOINT)
    entry, (group,) = manifest.file("a.json"), manifest.parity
    wrong = replace(manifest, parity=(replace(group, files=("a.json", "b.json")),))
    with pytest.raises(IntegrityError, match="parity reconstructs other bytes"):
        reconstruct_file([store], wrong, entry)
    assert reconstruct_file([store], manifest, entry) == expected


def test_a_store_that_fails_is_no_damage():
    class Failing(FaultyStore):
        def get_range(self, key, start, length):
            raise StoreUnavailable("down", key=key)

    store = save_repository(1)
    store.delete(MODEL)
    before = dict(store.objects)
    plan = plan_repair(store, CHECKPOINT)
    with pytest.raises(StoreUnavailable):
        apply_repair(Failing(store), plan)
    with pytest.raises(StoreUnavailable):
        read(Failing(store), CHECKPOINT, reconstructs=True)
    assert store.objects == before


def test_lost_parity_is_told_as_a_warning_and_holds_no_rotation():
    store = save_repository(1)
    newer = save(store, CheckpointId(1, 8), parity=1)
    store.delete(newer.key("parity-0-0.r00000.parity"))
    (finding,) = verify(store, newer)
    assert (finding.severity, finding.problem) == ("warning", "missing")
    assert finding.fix == f"resilient ckpt repair checkpoint-8-g1 {store.url}"
    for level in ("quick", "full"):
        retention = Retention(keep_last=1, verify_before_rotate=level)
        assert collect_garbage(store, retention, 1).held == ""
    assert committed(store) == [newer]
    assert not any(key.startswith(CHECKPOINT.folder) for key in store.objects), "its copy too"


def test_verify_says_what_can_be_repaired_and_what_cannot():
    for parity, end in ((0, " --from COPY"), (1, "")):
        store = save_repository(parity)
        store.delete(MODEL)
        for level in ("quick", "full", "deep"):
            (finding,) = verify(store, CHECKPOINT, level)
            assert finding.fix == f"resilient ckpt repair {CHECKPOINT} {store.url}{end}"
