"""Every bit of every byte of every object is flipped, every length is cut, every object deleted.

Not a sample: all of them. ``verify`` must report each, and whoever resumes must refuse to read
it, but for what resume does not read: a tag, and the content of a mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.fencing import recorded
from resilient.checkpoint.generations import read_generation
from resilient.checkpoint.refs import read_tag
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.verify import verify, verify_records
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.keys import ABILITIES, committed_key, generation_key, tag_key
from tests.helpers.tiny import CHECKPOINT, SIGNING, tiny_repository

if TYPE_CHECKING:
    from resilient.testing.memory_store import MemoryStore

KEYS = sorted(tiny_repository().objects)
OWN = [key for key in KEYS if key.startswith(CHECKPOINT.folder)]
BITS_MIN = 20_000


def is_refused(read_it) -> bool:
    """Say whether a reader refused; anything but our own error is a crash and fails the test."""
    try:
        read_it()
    except (IntegrityError, KeyNotFound):
        return True
    return False


def is_reported(store: MemoryStore, key: str) -> bool:
    """Say whether ``ckpt verify`` names what is wrong."""
    if key.startswith(CHECKPOINT.folder):
        return bool(verify(store, CHECKPOINT, "full", SIGNING))
    return [one.file for one in verify_records(store, "full")] == [key]


READERS = {
    generation_key(1): lambda store: read_generation(store, 1),
    tag_key("release"): lambda store: read_tag(store, "release"),
}


def is_noticed(store: MemoryStore, key: str) -> bool:
    """Say whether whoever needs the object notices; resume does not need all of them."""
    if key in OWN:
        return is_refused(lambda: read(store, CHECKPOINT, signing=SIGNING))
    if key == ABILITIES:
        return recorded(store) is None
    # The mark counts by being there, whatever it says.
    return key == committed_key(1) or is_refused(lambda: READERS[key](store))


def test_the_tiny_repository_has_every_kind_of_object():
    assert len(OWN) == 7
    assert any("signature-" in key for key in OWN)
    assert sorted(set(KEYS) - set(OWN)) == sorted([committed_key(1), ABILITIES, *READERS])
    store = tiny_repository()
    assert verify(store, CHECKPOINT, "deep", SIGNING) == []
    assert verify_records(store, "deep") == []
    assert read(store, CHECKPOINT, signing=SIGNING).files


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_every_flipped_bit_is_found(key, record_property):
    store = tiny_repository()
    whole = store.objects[key]
    missed = []
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            store.objects[key] = bytes(damaged)
            if not (is_reported(store, key) and is_noticed(store, key)):
                missed.append((position, bit))
    record_property("bits_flipped", 8 * len(whole))
    record_property("bits_missed", len(missed))
    assert missed == []


UNSIGNED = [key for key in OWN if "signature-" not in key]


@pytest.mark.slow
@pytest.mark.parametrize("key", UNSIGNED)
def test_every_flipped_bit_is_found_without_a_signature(key):
    """Else a signature's SHA-256 could hide that a digest of ours is not held against anything."""
    store = tiny_repository(is_signed=False)
    whole = store.objects[key]
    missed = []
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            store.objects[key] = bytes(damaged)
            is_seen = bool(verify(store, CHECKPOINT, "full"))
            if not (is_seen and is_refused(lambda: read(store, CHECKPOINT))):
                missed.append((position, bit))
    assert missed == []


def test_the_flips_are_many_enough_to_mean_something():
    assert 8 * sum(map(len, tiny_repository().objects.values())) >= BITS_MIN


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_every_length_but_the_right_one_is_found(key):
    store = tiny_repository()
    whole = store.objects[key]
    for length in range(len(whole)):
        store.objects[key] = whole[:length]
        assert is_reported(store, key), length
        assert is_noticed(store, key), length
    for more in (b"\0", b"\n", b" ", whole):
        store.objects[key] = whole + more
        assert is_reported(store, key), more
        assert is_noticed(store, key), more


@pytest.mark.parametrize("key", OWN)
def test_every_deleted_file_is_found(key):
    store = tiny_repository()
    store.delete(key)
    if key == CHECKPOINT.manifest_key:
        assert lineage(store).lost
        assert is_refused(lambda: verify(store, CHECKPOINT))
    else:
        assert is_reported(store, key)
    assert is_noticed(store, key)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (generation_key(1), [generation_key(1)]),
        (committed_key(1), [committed_key(1)]),
        # A tag that is gone was taken away; a verdict that is gone is asked for again.
        (tag_key("release"), []),
        (ABILITIES, []),
    ],
)
def test_of_what_lies_beside_a_checkpoint_only_records_and_marks_must_be_there(key, found):
    store = tiny_repository()
    store.delete(key)
    assert [one.file for one in verify_records(store, "deep")] == found
    assert lineage(store).candidates == (CHECKPOINT,)
