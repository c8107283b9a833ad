"""Signatures: what the key has not signed is refused where that is asked for, and said so."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.commit import commit
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.garbage_collection import collect_garbage, discard_uncommitted
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.signing import (
    Signature,
    check_signature,
    put_signature,
    signature_problem,
)
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import LaunchEnv, World, write_launch
from resilient.errors import (
    ConfigError,
    KeyExists,
    NoIntactCheckpoint,
    SignatureRefused,
    StoreUnavailable,
)
from resilient.events import Emitter
from resilient.format.keys import CheckpointId, signature_name
from resilient.format.signature import SigningPolicy
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import Crash, FaultPlan, FaultyStore, StoreFault, StoreFaultKind
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, begin, save
from tests.helpers.mutations import reseal
from tests.helpers.tiny import CHECKPOINT, OTHER, SECRET, SIGNING, tiny_repository

CLOCK = SystemClock()


def open_one(store, signing, told=None, retention=None):
    sinks = () if told is None else (lambda record, event: told.append(str(record)),)
    comms = ControlGroup(InMemoryKVStore(), World(), "life")
    limits = CheckpointOptions(retention or Retention())
    return CheckpointEngine(
        CheckpointContext(store, comms, limits, CLOCK, Emitter(CLOCK, sinks), signing)
    )


def live(store, signing, steps=(), told=None, **options):
    """Resume, save ``steps``; return what was resumed from."""
    checkpointer = open_one(store, signing, told)
    parts = {"model": Part(Values(word="x"))}
    try:
        resumed = checkpointer.resume(parts, **options)
        for step in steps:
            checkpointer.save(step, parts, CheckpointInfo())
        return resumed.checkpoint if resumed else None
    finally:
        checkpointer.close()


def signatures(store):
    return [key for key in store.objects if "/signature-" in key]


def test_with_a_key_every_save_is_signed_and_without_one_none_is():
    store = MemoryStore()
    live(store, SigningPolicy(SIGNING.key), (1, 2))
    assert len(signatures(store)) == 2
    assert live(store, SIGNING) == CheckpointId(1, 2)
    live(store, SigningPolicy(), (3,))
    assert len(signatures(store)) == 2


def test_an_unsigned_one_is_skipped_with_its_reason_and_the_signed_one_before_is_taken():
    store, told = MemoryStore(), []
    live(store, SigningPolicy(SIGNING.key), (1,))
    live(store, SigningPolicy(), (2,))
    assert live(store, SIGNING, (3,), told) == CheckpointId(1, 1)
    said = next(one for one in told if "checkpoint-2-g2" in one)
    assert "is not signed" in said
    assert "resilient ckpt sign checkpoint-2-g2 test://memory" in said
    assert live(store, SIGNING) == CheckpointId(3, 3)


def test_what_is_not_required_is_not_asked_for():
    store = MemoryStore()
    live(store, SigningPolicy(), (1,))
    assert live(store, SigningPolicy(SIGNING.key)) == CheckpointId(1, 1)


def test_with_nothing_signed_it_refuses_to_start_over():
    store = MemoryStore()
    live(store, SigningPolicy(), (1,))
    with pytest.raises(NoIntactCheckpoint, match="not signed"):
        live(store, SIGNING)
    with pytest.raises(NoIntactCheckpoint, match="not signed"):
        live(store, SIGNING, ref="checkpoint-1-g1")


def test_another_key_is_called_so_and_not_damage():
    store = tiny_repository()
    with pytest.raises(SignatureRefused, match="signed with another key") as caught:
        read(store, CHECKPOINT, signing=OTHER)
    assert SIGNING.key.key_id in caught.value.message
    assert OTHER.key.key_id in caught.value.message
    assert caught.value.exit_code == 77
    (finding,) = verify(store, CHECKPOINT, "quick", OTHER)
    assert "another key" in finding.problem


def forged(store):
    """Change a weight as somebody would who can write to the store and has no key."""
    import torch

    from resilient.checkpoint.commit import gather_receipts
    from resilient.checkpoint.save.persist import write
    from resilient.state_dict.snapshot import capture
    from resilient.state_dict.staging import StagingBuffers, stage

    manifest = read_manifest(store, CHECKPOINT)
    [signature] = [store.objects[key] for key in signatures(store)]
    for key in [key for key in store.objects if key.startswith(CHECKPOINT.folder)]:
        store.delete(key)
    staged = stage(
        capture(7, {"model": Part(Values(weight=torch.zeros(4)))}, 0), World(), StagingBuffers()
    )
    receipt = write(store, CHECKPOINT, 0, staged.files, staged.parts)
    commit(store, gather_receipts(replace(manifest, files=(), tensors=(), parts=()), [receipt]))
    return read_manifest(store, CHECKPOINT).root, signature


def test_a_checkpoint_that_was_forged_is_whole_and_refused():
    store = tiny_repository()
    root, signature = forged(store)
    assert verify(store, CHECKPOINT, "deep") == []
    with pytest.raises(SignatureRefused, match="not signed"):
        read(store, CHECKPOINT, signing=SIGNING)
    key = CHECKPOINT.key(signature_name(root))
    store.put(key, signature)
    with pytest.raises(SignatureRefused, match="to another manifest"):
        read(store, CHECKPOINT, signing=SIGNING)
    store.put(key, reseal({**json.loads(signature), "manifest": root}))
    with pytest.raises(SignatureRefused, match="does not match: its writer"):
        read(store, CHECKPOINT, signing=SIGNING)


@pytest.mark.parametrize("mac", ["", "0" * 64, "\u00e9" * 64, "0" * 63])
def test_any_other_mac_is_refused(mac):
    store = tiny_repository()
    [key] = signatures(store)
    store.objects[key] = reseal({**json.loads(store.objects[key]), "mac": mac})
    with pytest.raises(SignatureRefused):
        read(store, CHECKPOINT, signing=SIGNING)
    assert signature_problem(store, read_manifest(store, CHECKPOINT)) == ""


@pytest.mark.parametrize("stated", [None, "0" * 64])
def test_bytes_that_fit_the_manifest_and_are_not_those_that_were_signed_are_refused(stated):
    """XXH3 can be made to fit; the SHA-256 of what was signed cannot."""
    store = tiny_repository()
    [key] = signatures(store)
    files = json.loads(store.objects[key])["files"]
    assert set(files) == {one.name for one in read_manifest(store, CHECKPOINT).files}
    name = "model.r00001.safetensors"
    files = {**files, name: stated} if stated else {n: d for n, d in files.items() if n != name}
    root = read_manifest(store, CHECKPOINT).root
    put_signature(store, CHECKPOINT, root, Signature(SIGNING.key, files))
    with pytest.raises(SignatureRefused, match="not the signed file"):
        read(store, CHECKPOINT, signing=SIGNING)
    assert [one.file for one in verify(store, CHECKPOINT, "full", SIGNING)] == [name]
    assert read(store, CHECKPOINT, {"trainer_state"}, signing=SIGNING).files
    assert verify(store, CHECKPOINT, "full") == []


def test_what_was_signed_of_the_files_cannot_be_changed():
    store = tiny_repository()
    [key] = signatures(store)
    fields = json.loads(store.objects[key])
    for files in ({}, {**fields["files"], "state.json": "0" * 64}):
        store.objects[key] = reseal({**fields, "files": files})
        with pytest.raises(SignatureRefused, match="does not match"):
            read(store, CHECKPOINT, signing=SIGNING)


def test_a_signed_file_is_read_whole_though_only_a_part_of_it_is_wanted():
    from resilient.format.regions import Region

    store = tiny_repository()
    box = {"model/weight": (Region((0,), (1,)),)}
    proved = read(store, CHECKPOINT, {"model"}, lambda _: box, SIGNING)
    assert len(proved.files["model.r00001.safetensors"]) > 16


def test_a_damaged_signature_is_damage_where_it_is_required_and_else_a_warning():
    store = tiny_repository()
    [key] = signatures(store)
    store.objects[key] = store.objects[key].replace(b"hmac", b"hmbc")
    (finding,) = verify(store, CHECKPOINT, "full", SIGNING)
    assert finding.severity == "damaged"
    (finding,) = verify(store, CHECKPOINT, "full")
    assert (finding.severity, finding.file) == ("warning", key.rpartition("/")[2])
    assert read(store, CHECKPOINT).files


def test_loading_one_part_asks_for_the_signature_too():
    store = MemoryStore()
    live(store, SigningPolicy(), (1,))
    live(store, SigningPolicy(SIGNING.key), (2,))
    checkpointer = open_one(store, SIGNING)
    parts = {"model": Part(Values(word="y"))}
    checkpointer.resume(parts)
    with pytest.raises(SignatureRefused, match="not signed"):
        checkpointer.load_part(CheckpointId(1, 1), "model", parts["model"])
    checkpointer.close()


def committed_with(kind, at):
    """Commit with a key while operation ``at`` goes wrong; return the store, None past the end."""
    store = tiny_repository()
    manifest = replace(read_manifest(store, CHECKPOINT), checkpoint=CheckpointId(1, 8))
    faulty = FaultyStore(store, FaultPlan(0, (StoreFault(at, kind),)))
    try:
        commit(faulty, manifest, Signature(SIGNING.key, {}))
    except (Crash, StoreUnavailable):
        return store
    return store if faulty.operations > at else None


@pytest.mark.parametrize(
    "kind",
    [
        StoreFaultKind.CRASH_BEFORE,
        StoreFaultKind.CRASH_AFTER,
        StoreFaultKind.ERROR_ONCE,
        StoreFaultKind.ERROR_AFTER,
    ],
)
def test_wherever_the_writer_dies_what_is_committed_is_signed(kind):
    states = 0
    while (store := committed_with(kind, states)) is not None:
        states += 1
        if CheckpointId(1, 8) in committed(store):
            check_signature(store, read_manifest(store, CheckpointId(1, 8)), SIGNING)
    assert states >= 3
    assert CheckpointId(1, 8) not in committed(committed_with(StoreFaultKind.CRASH_BEFORE, 0))


def test_a_second_try_at_a_step_leaves_the_first_its_signature():
    """The answer to the first commit was lost, so the same step is tried again."""
    store = tiny_repository()
    first = replace(read_manifest(store, CHECKPOINT), checkpoint=CheckpointId(1, 8))
    commit(store, first, Signature(SIGNING.key, {}))
    second = replace(first, created_at="2027-01-01T00:00:00.000Z")
    with pytest.raises(KeyExists):
        commit(store, second, Signature(SIGNING.key, {}))
    assert read_manifest(store, CheckpointId(1, 8)).created_at == first.created_at
    check_signature(store, read_manifest(store, CheckpointId(1, 8)), SIGNING)


def test_a_signature_goes_with_its_checkpoint():
    store = MemoryStore()
    begin(store)
    for step in (1, 2):
        save(store, CheckpointId(1, step))
        root = read_manifest(store, CheckpointId(1, step)).root
        put_signature(store, CheckpointId(1, step), root, Signature(SIGNING.key, {}))
    collect_garbage(store, Retention(keep_last=1), 1)
    assert [key for key in store.objects if key.startswith("checkpoint-1-")] == []
    store.delete(CheckpointId(1, 2).manifest_key)
    discard_uncommitted(store, CheckpointId(1, 2))
    assert signatures(store) == []


def test_the_key_is_shown_nowhere(caplog):
    caplog.set_level(logging.DEBUG)
    store, told = MemoryStore(), []
    live(store, SIGNING, (1,), told)
    live(store, SigningPolicy(), (2,))
    live(store, SIGNING, (3,), told)
    with pytest.raises(SignatureRefused) as caught:
        read(store, CheckpointId(2, 2), signing=SIGNING)
    everything = [*map(repr, store.objects.items()), *told, repr(SIGNING), str(caught.value)]
    everything += [repr(open_one(store, SIGNING)._context), caplog.text, caught.value.hint]
    everything += [repr(write_launch(LaunchEnv(World(), require_signature=True)))]
    for form in (SECRET, SECRET.encode().hex(), repr(SECRET.encode())):
        assert [one for one in everything if form in one] == []
    assert SIGNING.key.key_id in store.objects[signatures(store)[0]].decode()


def test_a_loop_of_ones_own_asks_for_it_with_one_argument(tmp_path, monkeypatch):
    from resilient import open_checkpointer

    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    parts = {"model": Part(Values(word="x"))}
    first = open_checkpointer(str(tmp_path), require_signature=True)
    first.resume(parts)
    first.save(1, parts, CheckpointInfo())
    first.close()
    [_] = tmp_path.glob("checkpoint-1-g1/signature-*.json")
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", "another key of enough bytes")
    second = open_checkpointer(str(tmp_path), require_signature=True)
    with pytest.raises(NoIntactCheckpoint, match="another key"):
        second.resume(parts)
    second.close()
    monkeypatch.delenv("RESILIENT_SIGNING_KEY")
    with pytest.raises(ConfigError, match="no key"):
        open_checkpointer(str(tmp_path), require_signature=True)


@pytest.mark.parametrize("word", ["1", "true", " YES"])
def test_open_checkpointer_environment_requires_signature(tmp_path, monkeypatch, word):
    from resilient import open_checkpointer

    monkeypatch.setenv("RESILIENT_SIGNING_KEY", "another key of enough bytes")
    parts = {"model": Part(Values(word="x"))}
    first = open_checkpointer(str(tmp_path))
    first.resume(parts)
    first.save(1, parts, CheckpointInfo())
    first.close()
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", word)
    second = open_checkpointer(str(tmp_path))
    with pytest.raises(NoIntactCheckpoint, match="another key"):
        second.resume(parts)
    second.close()
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "2")
    with pytest.raises(ConfigError, match="RESILIENT_REQUIRE_SIGNATURE"):
        open_checkpointer(str(tmp_path))


def test_what_every_rank_wrote_is_signed_and_every_rank_holds_it_against_that():
    from resilient.testing.memory_store import run_ranks

    store = MemoryStore()

    def rank_main(world, board, step):
        comms = ControlGroup(board.another(), world, f"life/{step}")
        desk = CheckpointContext(
            store, comms, CheckpointOptions(within_seconds=10.0), CLOCK, Emitter(CLOCK), SIGNING
        )
        checkpointer = CheckpointEngine(desk)
        parts = {"rng_state": Part(Values(rank=world.rank), "rank")}
        try:
            resumed = checkpointer.resume(parts)
            checkpointer.save(step, parts, CheckpointInfo())
        finally:
            checkpointer.close()
        return resumed.step if resumed else None

    assert run_ranks(2, lambda world, board: rank_main(world, board, 1)) == [None, None]
    assert run_ranks(2, lambda world, board: rank_main(world, board, 2)) == [1, 1]
    for checkpoint in committed(store):
        signed = check_signature(store, read_manifest(store, checkpoint), SIGNING)
        assert {"rng_state_0.safetensors", "rng_state_1.safetensors"} <= set(signed)
