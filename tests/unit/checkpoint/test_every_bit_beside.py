"""Every bit of what only helps: parity, the manifest's second copy, a segment of the ledger.

No resume of a whole checkpoint reads them. Who mends with them, and who proves a run, must refuse
them when they are damaged, and ``ckpt verify`` or ``resilient audit`` must name them before.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from resilient.checkpoint.catalog import read_copy
from resilient.checkpoint.generations import Generation, create_record
from resilient.checkpoint.ledger_audit import audit
from resilient.checkpoint.ledger_segments import put_segment, read_segment
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.verify import copy_problem, verify
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.document import seal
from resilient.format.keys import CheckpointId, generation_key, segment_key
from resilient.format.ledger import LedgerPosition, Segment, step_row
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, save

RUN = "0123456789abcdef"  # as manifests of the helpers say
STEP = CheckpointId(1, 2)
PARITY = STEP.key("parity-0-0.r00000.parity")
SEGMENT = segment_key(STEP)
HELPERS = (PARITY, STEP.copy_key, SEGMENT)


@cache
def whole():
    """Return the objects of one life: its checkpoint with parity, and the ledger of two steps."""
    store = MemoryStore()
    life = Generation(1, RUN, None, "test", "2026-01-02T03:04:05.678Z", "host", "ab" * 16)
    create_record(store, generation_key(1), seal(life.to_json()))
    stop = LedgerPosition(2, 0, 8)
    rows = (step_row(LedgerPosition(), (2, 0, 0, 8, 2, 4, 1, 1, 2), 0.5),)
    segment = Segment(RUN, STEP, "", "", LedgerPosition(), stop, 0, rows).closed()
    put_segment(store, segment)
    data = {"epoch": 0, "samples": 8, "ledger": segment.anchor.to_json()}
    save(store, STEP, parts={"model": Part(Values(weight=torch.ones(4)))}, parity=1, data=data)
    return store.objects


def fresh():
    store = MemoryStore()
    store.objects.update(whole())
    return store


def named(store, key):
    """Return what ``verify``, or ``audit`` of a ledger, says is not what it should be."""
    if key == SEGMENT:
        return {one.key for one in audit(store, [STEP]).flaws}
    return {STEP.key(one.file) for one in verify(store, STEP, "full")}


def mended(store):
    """Resume from a checkpoint of which one file is lost."""
    store.objects.pop(STEP.key("state.json"), None)
    return read(store, STEP, reconstructs=True)


# Whoever needs the object, and what says of its bytes whether they are right.
READERS = {
    PARITY: mended,
    STEP.copy_key: lambda store: read_copy(store, STEP),
    SEGMENT: lambda store: read_segment(store, SEGMENT),
}


def is_refused(store, key):
    try:
        READERS[key](store)
    except (IntegrityError, KeyNotFound):
        return True
    return False


def with_damage(key, content):
    store = fresh()
    store.objects[key] = content
    return store


def is_named(store, key, *, looks=True):
    """Say whether nothing but the damage is named; without a look, whether a copy is refused.

    A look at a manifest's copy reads the whole checkpoint, for each of ten thousand bits.
    """
    return named(store, key) == {key} if looks else bool(copy_problem(store, STEP, "full"))


def test_what_helps_is_there_and_does():
    store = fresh()
    assert {key for key in store.objects if key.startswith(STEP.folder)} > {PARITY, STEP.copy_key}
    assert verify(store, STEP, "deep") == []
    assert audit(store, [STEP]).is_proven
    assert [one.records for one in (audit(store, [STEP]),)] == [1]
    assert mended(store).reconstructed == ("state.json",)
    for key in HELPERS:
        assert not is_refused(fresh(), key)


@pytest.mark.slow
@pytest.mark.parametrize("key", HELPERS)
def test_every_flipped_bit_of_what_helps_is_found(key, record_property):
    content, missed = whole()[key], []
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            looks = key != STEP.copy_key or bit == position % 8
            store = with_damage(key, bytes(damaged))
            if not (is_named(store, key, looks=looks) and is_refused(store, key)):
                missed.append((position, bit))
    record_property("bits_flipped", 8 * len(content))
    record_property("bits_missed", len(missed))
    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("key", HELPERS)
def test_every_length_but_the_right_one_of_what_helps_is_found(key):
    content = whole()[key]
    for length in range(len(content)):
        store = with_damage(key, content[:length])
        assert is_named(store, key), length
        assert is_refused(store, key), length
    for more in (b"\0", b"\n", b" ", content):
        store = with_damage(key, content + more)
        assert is_named(store, key), more
        if key == PARITY:
            # What was committed of it is there and proved, so it mends.
            assert mended(store).files["state.json"] == whole()[STEP.key("state.json")]
        else:
            assert is_refused(store, key), more


@pytest.mark.parametrize("key", HELPERS)
def test_what_helps_and_is_deleted_is_missed(key):
    store = fresh()
    store.delete(key)
    assert named(store, key) == {key}
    assert is_refused(store, key)


def test_a_resume_of_what_is_whole_needs_none_of_it():
    store = fresh()
    for key in HELPERS:
        store.objects[key] = b"x"
    assert read(store, STEP).reconstructed == ()
