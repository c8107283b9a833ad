"""Level deep: what was written whole and wrong, and what contradicts itself in a repository."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.generations import mark_committed
from resilient.checkpoint.refs import create_tag
from resilient.checkpoint.verify import verify, verify_records
from resilient.clock import SystemClock
from resilient.format.digest import digest_file
from resilient.format.keys import CheckpointId, committed_key, generation_key, tag_key
from resilient.format.manifest import encode
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, save
from tests.helpers.mutations import reseal
from tests.helpers.tiny import CHECKPOINT, tiny_repository


def rewritten(store, name, change):
    """Change a file as a writer with a defect would have: digests and manifest fit again."""
    manifest = read_manifest(store, CHECKPOINT)
    data = change(store.objects[CHECKPOINT.key(name)])
    proof = digest_file(data)
    files = tuple(
        replace(one, size_bytes=proof.size_bytes, digest=proof.digest, chunks=proof.chunks)
        if one.name == name
        else one
        for one in manifest.files
    )
    store.put(CHECKPOINT.key(name), data)
    store.put(CHECKPOINT.manifest_key, encode(replace(manifest, files=files)))
    store.objects = {key: one for key, one in store.objects.items() if "signature-" not in key}


def last_byte_flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("model.r00001.safetensors", last_byte_flipped, "differs from what was staged"),
        (
            "model.r00001.safetensors",
            lambda data: data.replace(b"[4]", b"[5]"),
            "its header and the manifest disagree",
        ),
        (
            "model.r00001.safetensors",
            lambda data: data.replace(b'"F32"', b'"F3\xff"'),
            "its header cannot be read",
        ),
        ("state.json", lambda data: data.replace(b"{", b"[", 1), "cannot be read"),
        ("state.json", lambda data: data.replace(b'"model"', b'"other"', 1), "no `model` in it"),
        (
            "state.json",
            lambda data: data.replace(b"model/weight", b"model/absent"),
            "names a tensor that does not exist",
        ),
        ("state.json", lambda data: data.replace(b"$tensor", b"$nosuch"), "unknown tag"),
        ("trainer_state.json", lambda data: data[:-3], "cannot be read"),
        (
            "rng_state_1.safetensors",
            lambda data: data.replace(b"rng_state_1/words", b"rng_state_1/lords"),
            "names a tensor that does not exist",
        ),
    ],
)
def test_bytes_that_fit_their_digests_and_not_each_other_are_found(name, change, problem):
    store = tiny_repository()
    before = store.objects[CHECKPOINT.key(name)]
    rewritten(store, name, change)
    assert store.objects[CHECKPOINT.key(name)] != before
    assert verify(store, CHECKPOINT, "full") == []
    findings = verify(store, CHECKPOINT, "deep")
    assert {one.file for one in findings} == {name}
    assert any(problem in one.problem for one in findings), findings


def usual():
    store = MemoryStore()
    begin(store)
    save(store, CheckpointId(1, 1))
    mark_committed(store, 1)
    begin(store, CheckpointId(1, 1))
    save(store, CheckpointId(2, 2), parent=CheckpointId(1, 1))
    mark_committed(store, 2)
    create_tag(store, "kept", CheckpointId(1, 1), SystemClock())
    return store


def found(store, level="deep"):
    return {one.file: (one.severity, one.problem) for one in verify_records(store, level)}


def test_a_sound_repository_has_no_contradiction():
    assert found(usual()) == {}


def test_a_record_that_is_gone_while_its_checkpoints_are_there():
    store = usual()
    store.delete(generation_key(2))
    assert found(store)[generation_key(2)][0] == "damaged"
    assert found(store, "full") == {}


def test_a_record_that_says_another_parent_than_its_checkpoints():
    store = usual()
    fields = json.loads(store.objects[generation_key(2)])
    store.objects[generation_key(2)] = reseal({**fields, "parent": None})
    assert "started from scratch, but checkpoint-2-g2 states checkpoint-1-g1" in str(found(store))


def test_a_mark_that_is_gone_is_a_warning():
    store = usual()
    store.delete(committed_key(1))
    assert found(store)[committed_key(1)][0] == "warning"


def test_a_mark_of_another_life_is_damage():
    store = usual()
    store.objects[committed_key(1)] = store.objects[committed_key(2)]
    assert found(store, "full")[committed_key(1)][0] == "damaged"


def test_a_tag_that_names_what_is_gone_is_a_warning():
    store = usual()
    store.delete(CheckpointId(1, 1).manifest_key)
    assert found(store)[tag_key("kept")][0] == "warning"
    fixes = [one.fix for one in verify_records(store, "deep")]
    assert f"resilient ckpt untag kept {store.url}" in fixes


def test_a_loss_is_told():
    store = usual()
    for one in (CheckpointId(1, 1), CheckpointId(2, 2)):
        store.delete(one.manifest_key)
    assert "checkpoint-1-g1, which no longer exists" in found(store)["generations/"][1]


def test_quick_looks_at_no_record():
    store = usual()
    store.objects[generation_key(1)] = b"x"
    assert found(store, "quick") == {}
    assert found(store, "full")[generation_key(1)][0] == "damaged"
