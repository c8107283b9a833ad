"""Checkpoints to damage, and their repair."""

from __future__ import annotations

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.commit import commit, copy_manifest, gather_receipts
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.save.persist import write
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.format.manifest import PartEntry
from resilient.format.safetensors_file import StagedFile
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, empty_manifest, save

CHECKPOINT = CheckpointId(1, 7)


MODEL = CHECKPOINT.key("model.r00000.safetensors")


PARITY = CHECKPOINT.key("parity-0-0.r00000.parity")


def save_repository(parity: int, ranks: int = 1) -> MemoryStore:
    store = MemoryStore()
    begin(store)
    save(store, CHECKPOINT, ranks=ranks, parity=parity)
    return store


def keys_of(store) -> list[str]:
    """Return the keys of everything that repair answers for, the manifest and its copy left out."""
    return [CHECKPOINT.key(entry.name) for entry in read_manifest(store, CHECKPOINT).files]


def repair(store, *stores, **options):
    """Repair, and take away what it kept of damaged files, once that is what they were."""
    before = dict(store.objects)
    plan = plan_repair(store, CHECKPOINT, stores, **options)
    copies = apply_repair(store, plan, stores)
    replaced_keys = {key for key, data in before.items() if store.objects[key] != data}
    of_files = {CHECKPOINT.key(name): aside for name, aside in copies.items() if plan.manifest}
    assert set(of_files) == replaced_keys
    for key, aside in of_files.items():
        assert store.objects.pop(aside) == before[key]
    return plan


def put_object(store, key, data) -> None:
    if data is None:
        store.delete(key)
    else:
        store.objects[key] = data


def large(parity: int) -> MemoryStore:
    """Return a checkpoint of three files, the longest of three chunks."""
    store = MemoryStore()
    begin(store)
    sizes = {"a.json": 2 * CHUNK_BYTES + 5, "b.json": CHUNK_BYTES + 9, "c.json": 11}
    files = [
        StagedFile(name, bytes([at + 1]) * size) for at, (name, size) in enumerate(sizes.items())
    ]
    parts = [PartEntry("state", "replicated", "a.json")]
    receipt = write(store, CHECKPOINT, 0, files, parts, parity)
    commit(store, gather_receipts(empty_manifest(CHECKPOINT), [receipt]))
    if parity:
        copy_manifest(store, CHECKPOINT)
    return store


def flip(store, key, position) -> None:
    data = bytearray(store.objects[key])
    data[position] ^= 64
    store.objects[key] = bytes(data)
