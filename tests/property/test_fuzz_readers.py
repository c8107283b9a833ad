"""Whatever bytes a reader is given, it returns or says no: no crash, no escape, bounded memory.

Each target starts from the real bytes of a real checkpoint and spoils them: as bytes, and as
values that are sealed again, so that the seal is no shelter. ``--fuzz-runs`` says how often;
``make fuzz`` takes many.
"""

from __future__ import annotations

import json
import socket
import tempfile
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.daemon.messages import decode_job
from resilient.checkpoint.fencing import recorded
from resilient.checkpoint.generations import check_mark, read_generation
from resilient.checkpoint.refs import read_tag
from resilient.checkpoint.verify import problems_of
from resilient.distributed.kv_store import NONSENSE, JsonLineSocket, KVStoreServer, MalformedMessage
from resilient.errors import IntegrityError, ResilientError
from resilient.format.keys import (
    ABILITIES,
    committed_key,
    generation_key,
    is_file_name,
    segment_key,
    signature_name,
    tag_key,
)
from resilient.format.ledger import decode_segment
from resilient.format.manifest import FileEntry, PartEntry, Receipt, decode
from resilient.format.safetensors_file import read_header
from resilient.format.signature import check_mac, decode_signature
from resilient.state_dict.flatten import unflatten
from resilient.state_dict.resharding import load
from resilient.state_dict.snapshot import Part
from resilient.storage.store import is_key
from resilient.testing.memory_store import MemoryStore
from resilient.train.state import TrainerState
from tests.helpers.ledgers import Run
from tests.helpers.manifests import Values
from tests.helpers.mutations import reseal, spoiled_bytes, spoiled_value
from tests.helpers.tiny import CHECKPOINT, SIGNING, tiny_repository

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = tiny_repository()
MANIFEST = read_manifest(REPOSITORY, CHECKPOINT)
ALL = list(REPOSITORY.objects.values())
PEAK_BYTES_MAX = 48 << 20


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        seeds: real bytes that it reads.
        read: reads any bytes.
        is_sealed: whether a spoiled value must be sealed to get past the door.
        refuses: what it may raise.
    """

    seeds: list[bytes]
    read: Callable[[bytes], object]
    is_sealed: bool = False
    refuses: tuple[type[BaseException], ...] = (ResilientError,)


def golden() -> list[bytes]:
    folder = Path(__file__).parents[1] / "golden/format-1"
    return [path.read_bytes() for path in sorted(folder.glob("checkpoint-*/manifest.json"))]


def from_store(key: str, read: Callable[[MemoryStore], object]) -> Target:
    def reader(data: bytes) -> object:
        store = MemoryStore()
        store.objects[key] = data
        return read(store)

    return Target([REPOSITORY.objects[key]], reader, is_sealed=True)


def read_any_manifest(data: bytes) -> object:
    manifest = decode(data, CHECKPOINT.manifest_key)
    for entry in manifest.files:
        assert is_file_name(entry.name), "a name that would leave the folder"
        assert is_key(manifest.checkpoint.key(entry.name))
    assert sum(one.size_bytes for one in manifest.tensors) <= manifest.size_bytes
    return manifest


def into_parts(document: str) -> Callable[[bytes], object]:
    """Load a checkpoint whose ``document`` has other bytes, as a resume would after proving."""
    files = {one.name: REPOSITORY.objects[CHECKPOINT.key(one.name)] for one in MANIFEST.files}

    def read(data: bytes) -> None:
        parts = {
            "model": Part(Values()),
            "trainer_state": Part(TrainerState(), document="trainer_state.json"),
            "rng_state": Part(Values(), "rank"),
        }
        load(MANIFEST, {**files, document: data}, parts, 0)

    return read


def read_any_tree(data: bytes) -> object:
    with suppress(ValueError, RecursionError):
        return unflatten(json.loads(data), lambda _: torch.arange(3))
    return None


def read_any_shard(data: bytes) -> object:
    entry = next(one for one in MANIFEST.files if one.name.startswith("model"))
    problems = problems_of(MANIFEST, replace(entry, size_bytes=len(data)), data)
    read_header(data, entry.name)
    return problems


def read_any_signature(data: bytes) -> None:
    fields = decode_signature(data, "signature.json", MANIFEST.root)
    check_mac(fields, SIGNING.key)


def read_any_line(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.sendall(data[:60_000])
        theirs.close()
        lines = JsonLineSocket(ours, line_bytes_max=30_000)
        while lines.receive() is not None:
            continue


def as_json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    def reader(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read(value)

    return reader


def read_any_job(value: Any) -> object:
    memory = memoryview(bytearray(4096))
    return decode_job(value, lambda _, size_bytes: memory[: max(size_bytes, 0)], 0, 1.0)


def a_receipt() -> dict[str, Any]:
    mine = tuple(one for one in MANIFEST.files if one.rank == 0)
    return json.loads(json.dumps(Receipt(0, mine, MANIFEST.tensors, MANIFEST.parts).to_json()))


def a_segment() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        run.begin()
        run.train(CHECKPOINT.step)
        assert run.save(commits=False) == CHECKPOINT
        return run.store.get(segment_key(CHECKPOINT))


def read_any_segment(data: bytes) -> object:
    return decode_segment(data, segment_key(CHECKPOINT))


def a_job() -> dict[str, Any]:
    from resilient.format.manifest import encode

    about = replace(MANIFEST, files=(), tensors=(), parts=())
    sizes = [[one.name, one.size_bytes] for one in MANIFEST.files]
    return {
        "checkpoint": CHECKPOINT.folder,
        "about": encode(about).decode(),
        "files": sizes[1:],
        "streamed": sizes[:1],
        "slots": ["slot-0"],
        "receipt": {**a_receipt(), "files": []},
        "keep": [CHECKPOINT.folder],
        "is_first": True,
        "topic": "save/1",
        "began_seconds": 1.5,
        "stall_seconds": 0.1,
        "spoiled": None,
        "bases": [{"checkpoint": CHECKPOINT.folder, "proved": None}],
        "segment": a_segment().decode(),
        "token": "0" * 32,
    }


ASKED = [
    {"verb": "post", "keys": ["a"], "value": "x"},
    {"verb": "peek", "keys": ["a"]},
    {"verb": "will", "keys": ["b"], "value": "y"},
    {"verb": "remove", "keys": ["a"]},
    {"verb": "wait", "keys": [], "within_seconds": 0.0},
]
SERVER = KVStoreServer.__new__(KVStoreServer)


def read_any_request(value: Any) -> object:
    from resilient.distributed.kv_store import InMemoryKVStore

    SERVER._store = InMemoryKVStore()
    # A key that nobody posts would be waited for, which is right and slow.
    if isinstance(value, dict) and value.get("verb") == "wait" and value.get("keys"):
        return None
    return SERVER._answer(value, {})


def lines_of(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def document(name: str) -> list[bytes]:
    return [REPOSITORY.objects[CHECKPOINT.key(name)]]


TARGETS = {
    "manifest": Target([MANIFEST_BYTES := REPOSITORY.objects[CHECKPOINT.manifest_key], *golden()],
                       read_any_manifest, is_sealed=True),
    "record": from_store(generation_key(1), lambda store: read_generation(store, 1)),
    "mark": from_store(committed_key(1), lambda store: check_mark(store, 1)),
    "tag": from_store(tag_key("release"), lambda store: read_tag(store, "release")),
    "abilities": from_store(ABILITIES, recorded),
    "signature": Target(document(signature_name(MANIFEST.root)), read_any_signature,
                        is_sealed=True),
    "state.json": Target(document("state.json"), into_parts("state.json")),
    "trainer_state.json": Target(document("trainer_state.json"),
                                 into_parts("trainer_state.json")),
    "rng file": Target(document("rng_state_0.safetensors"),
                       into_parts("rng_state_0.safetensors")),
    "tree": Target(lines_of({"a": {"$tuple": [1, {"$numpy": ["<f4", {"$tensor": "model/w"}]}]},
                             "b": {"$dict": [[1, {"$float": "nan"}]]}, "c": {"$size": [1, 2]},
                             "d": {"$bytes": "AP8="}, "e": {"$complex": ["1.0", "nan"]}}),
                   read_any_tree),
    "shard": Target(document("model.r00001.safetensors"), read_any_shard),
    "line": Target([b"\n".join(lines_of(*ASKED)) + b"\n"], read_any_line,
                   refuses=(MalformedMessage,)),
    "receipt": Target(lines_of(a_receipt()), as_json(Receipt.from_json)),
    "segment": Target([a_segment()], read_any_segment, is_sealed=True),
    "job": Target(lines_of(a_job()), as_json(read_any_job)),
    "board": Target(lines_of(*ASKED), as_json(read_any_request), refuses=NONSENSE),
}  # fmt: skip


def spoiled(random: Random, target: Target) -> bytes:
    seed = random.choice(target.seeds)
    if random.random() < 0.5:
        return spoiled_bytes(random, seed, ALL)
    try:
        value = spoiled_value(random, json.loads(seed))
    except ValueError:
        return spoiled_bytes(random, seed, ALL)
    with suppress(ValueError, RecursionError, AttributeError):
        return reseal(value) if target.is_sealed else json.dumps(value).encode()
    return json.dumps(None).encode()


@pytest.mark.parametrize("name", TARGETS)
def test_every_reader_takes_its_own_seeds(name):
    for seed in TARGETS[name].seeds:
        if name == "manifest" and seed not in ALL:
            continue
        TARGETS[name].read(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_spoiled_bytes_are_read_or_refused(name, request, record_property):
    target = TARGETS[name]
    runs = request.config.getoption("--fuzz-runs")
    begin = request.config.getoption("--fuzz-seed")
    refused = peak = 0
    tracemalloc.start(1)
    try:
        for number in range(begin, begin + runs):
            data = spoiled(Random(f"{name}/{number}"), target)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                target.read(data)
            except target.refuses:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{name}: --fuzz-seed {number} --fuzz-runs 1") from error
            peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    record_property("fuzz_runs", runs)
    assert peak <= PEAK_BYTES_MAX
    if runs >= 100:
        assert 0 < refused or name == "abilities"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$dict", "$numpy", "$set", "$tuple", "a"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_any_tree_is_read_or_refused(tree):
    with suppress(IntegrityError):
        unflatten(tree, lambda _: torch.arange(3))


FIELDS = sorted(json.loads(MANIFEST_BYTES))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FIELDS), JSON.filter(lambda value: "nan" not in repr(value)))
def test_any_value_of_any_field_of_a_manifest_is_read_or_refused(field, value):
    fields = {**json.loads(MANIFEST_BYTES), field: value}
    with suppress(ResilientError, ValueError):
        data = reseal(fields)
        with suppress(ResilientError):
            read_any_manifest(data)


def test_part_and_file_entries_of_other_fields_are_refused():
    fields = json.loads(MANIFEST_BYTES)
    for name, entry in (("files", FileEntry), ("parts", PartEntry)):
        assert set(fields[name][0]) == set(entry.__slots__)
        with pytest.raises(IntegrityError):
            decode(
                reseal({**fields, name: [{**fields[name][0], "more": 1}]}),
                CHECKPOINT.manifest_key,
            )
