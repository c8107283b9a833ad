"""Names for checkpoints."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient.checkpoint.refs import (
    create_tag,
    list_tags,
    read_tag,
    read_tags,
    remove_tag,
    resolve,
)
from resilient.clock import SystemClock
from resilient.errors import IntegrityError, NothingToResume, UsageError
from resilient.format.keys import CheckpointId, parse_tag, tag_key
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, save

CLOCK = SystemClock()
ONE, TWO = CheckpointId(1, 1), CheckpointId(1, 2)


@pytest.fixture
def store():
    store = MemoryStore()
    begin(store)
    save(store, ONE, metrics={"eval_loss": 0.1})
    save(store, TWO, metrics={"eval_loss": 0.2})
    return store


def test_a_tag_is_read_back_and_names_its_checkpoint_everywhere(store):
    tag = create_tag(store, "release-1.0", ONE, CLOCK)
    assert read_tags(store) == [tag]
    assert resolve(store, "release-1.0") == ONE
    assert remove_tag(store, "release-1.0") == ONE
    assert list_tags(store) == ()


def test_best_names_the_best_that_was_measured(store):
    assert resolve(store, "best:loss") == ONE
    assert resolve(store, "best:loss:1:max") == TWO
    with pytest.raises(NothingToResume, match="no checkpoint `best:accuracy`"):
        resolve(store, "best:accuracy")


def test_a_tag_that_looks_like_a_digest_is_a_tag(store):
    create_tag(store, "beef", ONE, CLOCK)
    assert resolve(store, "beef") == ONE


def test_the_same_tag_again_changes_nothing_and_another_checkpoint_is_refused(store):
    tag = create_tag(store, "a", ONE, CLOCK)
    before = dict(store.objects)
    assert create_tag(store, "a", ONE, CLOCK) == tag
    with pytest.raises(UsageError, match="tag `a` already names checkpoint-1-g1") as raised:
        create_tag(store, "a", TWO, CLOCK)
    assert raised.value.hint.startswith("resilient ckpt untag a")
    assert store.objects == before


def test_of_many_that_create_a_tag_at_once_one_wins(store):
    def create(number):
        try:
            return create_tag(store, "a", (ONE, TWO)[number % 2], CLOCK).checkpoint
        except UsageError:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = set(pool.map(create, range(16))) - {None}
    assert won == {read_tag(store, "a").checkpoint}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "latest",
        "auto",
        "never",
        "12",
        "checkpoint-1-g1",
        "../x",
        "a/b",
        ".a",
        "a b",
        "\xe9",
        "x" * 101,
    ],
)
def test_a_name_that_means_something_else_is_refused(store, name):
    with pytest.raises(UsageError, match="cannot be a tag") as told:
        create_tag(store, name, ONE, CLOCK)
    assert list_tags(store) == ()
    # What it says to type instead is taken.
    create_tag(store, shlex.split(told.value.hint)[4], ONE, CLOCK)


def test_what_is_not_committed_cannot_be_tagged(store):
    with pytest.raises(UsageError, match="not committed"):
        create_tag(store, "a", CheckpointId(1, 9), CLOCK)
    assert list_tags(store) == ()


def test_a_checkpoint_that_goes_while_it_is_tagged_leaves_no_tag(store):
    class Rotating(FaultyStore):
        def put_new(self, key, data):
            super().put_new(key, data)
            store.delete(ONE.manifest_key)

    with pytest.raises(UsageError, match="was deleted"):
        create_tag(Rotating(store), "a", ONE, CLOCK)
    assert list_tags(store) == ()


def test_a_tag_of_what_is_gone_says_so(store):
    create_tag(store, "a", ONE, CLOCK)
    store.delete(ONE.manifest_key)
    with pytest.raises(UsageError, match="names checkpoint-1-g1, which no longer exists"):
        resolve(store, "a")


def test_a_tag_that_is_not_there_cannot_be_removed(store):
    with pytest.raises(UsageError, match="no tag `a`"):
        remove_tag(store, "a")


def test_any_flipped_bit_of_a_tag_is_found_and_it_can_still_be_removed(store):
    create_tag(store, "a", ONE, CLOCK)
    data = store.objects[tag_key("a")]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        store.objects[tag_key("a")] = bytes(damaged)
        with pytest.raises(IntegrityError):
            read_tag(store, "a")
    assert remove_tag(store, "a") is None
    assert list_tags(store) == ()


def test_a_tag_under_another_name_is_no_tag(store):
    create_tag(store, "a", ONE, CLOCK)
    store.objects[tag_key("b")] = store.objects[tag_key("a")]
    with pytest.raises(IntegrityError):
        read_tag(store, "b")


def test_foreign_files_beside_the_tags_are_not_tags(store):
    store.put("tags/notes.txt", b"a person's")
    store.put("tags/deeper/a.json", b"a person's")
    store.put("tags/7.json", b"a person's")
    assert list_tags(store) == ()
    assert parse_tag("tags/7.json") is None
