"""Lives that refer to what others wrote, and what is read, damaged or forged of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save.dedup import make_dedup_base
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import ConfigError, IntegrityError, SaveFailed, StoreError
from resilient.events import CheckpointCommitted, Emitter
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.format.manifest import decode, encode
from resilient.format.partial_read import PartialFile
from resilient.format.regions import Region
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, begin, frozen_parts_of
from tests.helpers.referring import MODEL, place, put_step, step, value


@pytest.fixture
def store():
    store = MemoryStore()
    begin(store)
    return store


def open_one(store, sink=None, **limits):
    emit = Emitter(SystemClock(), (sink,) if sink else ())
    comms = ControlGroup(InMemoryKVStore(), World(), "life")
    return CheckpointEngine(
        CheckpointContext(store, comms, CheckpointOptions(**limits), SystemClock(), emit)
    )


def run(store, steps, **limits):
    """Resume and save, and return what was told of each commit."""
    told = []
    checkpointer = open_one(store, lambda _, event: told.append(event), **limits)
    state = frozen_parts_of(0)["model"]
    checkpointer.resume({"model": state})
    for number in steps:
        checkpointer.save(number, {"model": frozen_parts_of(number)["model"]}, CheckpointInfo())
    checkpointer.close()
    return [one for one in told if isinstance(one, CheckpointCommitted)]


def test_a_life_refers_to_what_it_wrote_and_the_next_to_what_it_read():
    store = MemoryStore()
    first, second = run(store, (1, 2))
    assert second.written_bytes < first.written_bytes / 10
    assert second.size_bytes > first.size_bytes
    assert "MiB written)" in second.message()
    assert "written" not in first.message()
    assert len(run(store, (4,))) == 1
    manifest = read_manifest(store, CheckpointId(2, 4))
    assert place(manifest, "model/frozen").file == step(1).key(MODEL)
    assert place(manifest, "model/slow").file == MODEL


def test_a_run_that_wants_every_checkpoint_to_stand_alone_has_it_so():
    store = MemoryStore()
    first, second = run(store, (1, 2), save_unchanged="write")
    assert first.written_bytes == second.written_bytes == second.size_bytes
    with pytest.raises(ConfigError, match="save_unchanged"):
        CheckpointOptions(save_unchanged="never")


def test_a_save_that_failed_and_is_committed_all_the_same_is_what_the_next_compares_with():
    """Else the next could refer to what only the one before has, and that may be let go."""
    values = {1: 1.0, 2: 2.0, 3: 1.0}
    inner = Unsure()
    checkpointer = open_one(inner)
    checkpointer.resume({})

    def save_step(number):
        weight = torch.full((9000,), values[number])
        checkpointer.save(number, {"model": Part(Values(weight=weight))}, CheckpointInfo())
        checkpointer.wait()

    save_step(1)
    with pytest.raises(SaveFailed):
        save_step(2)
    assert step(2).manifest_key in inner.objects
    save_step(3)
    assert place(read_manifest(inner, step(3)), "model/weight").file == MODEL
    with pytest.raises(ConfigError, match="this run already saved it"):
        save_step(2)
    checkpointer.close()


class Unsure(MemoryStore):
    """Answers the put of the second manifest with an error although it happened."""

    def put_new(self, key, data):
        super().put_new(key, data)
        if key == step(2).manifest_key:
            raise StoreError("the answer was lost", key=key)


def test_damage_of_a_shared_file_is_found_in_each_checkpoint_that_needs_it(store):
    put_step(store, 1)
    put_step(store, 2, [step(1)])
    put_step(store, 3, [step(2)])
    key = step(1).key(MODEL)
    one = place(read_manifest(store, step(1)), "model/frozen")
    content = bytearray(store.objects[key])
    content[one.start] ^= 1
    store.objects[key] = bytes(content)
    for number, file in ((1, MODEL), (2, key), (3, key)):
        (finding,) = verify(store, step(number))
        assert (finding.file, finding.tensor) == (file, "model/frozen")
        with pytest.raises(IntegrityError, match="model/frozen"):
            read(store, step(number))


def test_only_the_chunks_that_are_needed_of_a_shared_file_are_read(store):
    """The end of the first file is dead: damage there hurts the first alone."""
    same, odd = torch.ones(1 << 20), torch.ones(2 << 20)
    put_step(store, 1, a_same=same, odd=odd)
    second = put_step(store, 2, [step(1)], a_same=same, odd=odd + 1)
    assert place(second, "model/a_same").file == step(1).key(MODEL)
    key = step(1).key(MODEL)
    content = bytearray(store.objects[key])
    content[-1] ^= 1
    store.objects[key] = bytes(content)
    with pytest.raises(IntegrityError):
        read(store, step(1))
    assert torch.equal(value(store, 2, "model/a_same"), same)


def test_a_box_of_what_is_referred_to_is_read_by_its_chunks_and_proves_no_more(store):
    same = torch.arange(3 << 20, dtype=torch.float32)
    put_step(store, 1, same=same)
    put_step(store, 2, [step(1)], same=same)
    box = Region((0,), (4,))
    proved = read(store, step(2), boxes=lambda _: {"model/same": (box,)})
    content = proved.files[step(1).key(MODEL)]
    assert isinstance(content, PartialFile)
    assert len(content) == CHUNK_BYTES
    third = put_step(store, 3, [make_dedup_base(proved, store)], same=same)
    assert all(one.origin is None for one in third.files)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-2-g1/model.r00000.safetensors",
        "checkpoint-3-g1/model.r00000.safetensors",
        "checkpoint-1-g2/model.r00000.safetensors",
        "checkpoint-1-g1/manifest.json",
        "checkpoint-1-g1/../x.safetensors",
        "../checkpoint-1-g1/model.r00000.safetensors",
        "generations/model.safetensors",
    ],
)
def test_a_manifest_that_names_what_is_not_older_is_refused(store, name):
    put_step(store, 1)
    second = put_step(store, 2, [step(1)])
    old = step(1).key(MODEL)
    listed = tuple(replace(one, name=name) if one.name == old else one for one in second.files)
    tensors = tuple(
        replace(
            one,
            regions=tuple(replace(r, file=name) if r.file == old else r for r in one.regions),
        )
        for one in second.tensors
    )
    data = encode(replace(second, files=listed, tensors=tensors))
    with pytest.raises(IntegrityError, match="file name"):
        decode(data, step(2).manifest_key)
    assert decode(encode(second), step(2).manifest_key).files == second.files
