"""A server that lies about its exclusive create is found out by a race, once, and refused."""

from __future__ import annotations

import time

import pytest

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.fencing import check_store_capabilities, is_exclusive, recorded
from resilient.checkpoint.verified_read import fetch
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import IntegrityError, KeyExists, NotExclusive, StoreDenied, StoreUnavailable
from resilient.events import Emitter, UploadCleanupFailed, UploadsAborted
from resilient.format.keys import ABILITIES, generation_key
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin

CLOCK = SystemClock()


class Ignores(MemoryStore):
    """Takes no notice of ``If-None-Match``."""

    def put_new(self, key, data):
        self.put(key, data)


class LooksThenWrites(MemoryStore):
    """Polite to whoever asks alone, and lets two winners through who come together."""

    def put_new(self, key, data):
        if key in self.objects:
            raise KeyExists("taken", key=key)
        time.sleep(0.002)
        self.put(key, data)


class TellsEverybodyNo(MemoryStore):
    """Keeps the first, and refuses it too."""

    def put_new(self, key, data):
        self.objects.setdefault(key, bytes(data))
        raise KeyExists("taken", key=key)


@pytest.mark.parametrize("kind", [Ignores, LooksThenWrites, TellsEverybodyNo])
def test_a_server_that_lies_is_found_out_refused_and_remembered(kind):
    store = kind("s3://bucket/run")
    with pytest.raises(NotExclusive) as caught:
        check_store_capabilities(store, CLOCK)
    assert "--single-writer" in caught.value.hint
    assert ABILITIES in caught.value.message
    assert recorded(store) is False
    store.put_new = None
    with pytest.raises(NotExclusive):
        check_store_capabilities(store, CLOCK)


def test_a_server_that_keeps_its_promise_is_raced_once():
    store = MemoryStore("s3://bucket/run")
    check_store_capabilities(store, CLOCK)
    assert list(store.objects) == [ABILITIES], "the race left something behind"
    store.put_new = None
    check_store_capabilities(store, CLOCK)


def test_who_promises_to_write_alone_is_not_asked():
    store = Ignores("s3://bucket/run")
    check_store_capabilities(store, CLOCK, single_writer=True)
    assert store.objects == {}


def test_what_this_machine_decides_is_not_raced():
    store = MemoryStore("file:///run")
    check_store_capabilities(store, CLOCK)
    assert store.objects == {}


@pytest.mark.parametrize("change", ["damaged", "copied from elsewhere", "of another kind"])
def test_a_verdict_that_is_not_about_this_server_is_asked_for_again(change):
    store = MemoryStore("s3://bucket/run")
    elsewhere = Ignores("s3://elsewhere/run")
    with pytest.raises(NotExclusive):
        check_store_capabilities(elsewhere, CLOCK)
    begin(store)
    store.objects[ABILITIES] = {
        "damaged": elsewhere.objects[ABILITIES][:-9],
        "copied from elsewhere": elsewhere.objects[ABILITIES],
        "of another kind": store.objects[generation_key(1)],
    }[change]
    check_store_capabilities(store, CLOCK)
    assert recorded(store) is True


def test_a_server_that_does_not_answer_gets_no_verdict():
    class Silent(MemoryStore):
        def put_new(self, key, data):
            raise StoreUnavailable("silent", key=key)

    store = Silent("s3://bucket/run")
    with pytest.raises(StoreUnavailable):
        check_store_capabilities(store, CLOCK)
    assert recorded(store) is None


def test_one_round_is_enough_for_a_server_that_ignores_the_condition():
    assert not is_exclusive(Ignores("s3://bucket/run"), rounds=1)
    assert is_exclusive(MemoryStore("s3://bucket/run"), rounds=1)


class Flips(MemoryStore):
    """The first reading of each object is not what is stored."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    def get(self, key):
        self.left -= 1
        return b"flipped" if self.left >= 0 else super().get(key)


def proved(data):
    if data != b"whole":
        raise IntegrityError("not what was committed")
    return data


def test_what_does_not_fit_is_read_once_more_and_then_called_damage():
    for times, fits in ((0, True), (1, True), (2, False)):
        store = Flips(times)
        store.put("a", b"whole")
        if fits:
            assert fetch(store, "a", proved, 100) == b"whole"
        else:
            with pytest.raises(IntegrityError):
                fetch(store, "a", proved, 100)


def resume_at(store, told=()):
    emit = Emitter(CLOCK, (lambda record, event: told.append(event),) if told != () else ())
    comms = ControlGroup(InMemoryKVStore(), World(), "life")
    checkpointer = CheckpointEngine(
        CheckpointContext(store, comms, CheckpointOptions(), CLOCK, emit)
    )
    try:
        checkpointer.resume({})
    finally:
        checkpointer.close()


def test_no_life_begins_where_the_server_lies():
    store = Ignores("s3://bucket/run")
    with pytest.raises(NotExclusive):
        resume_at(store)
    assert list(store.objects) == [ABILITIES]


class WithUploads(MemoryStore):
    """Knows of unfinished uploads."""

    uploads = ("checkpoint-9-g1/a.json", "checkpoint-9-g2/a.json", "foreign", "checkpoint-9-g3/b")

    def sweep(self, is_ours, older_than_seconds, clock):
        return tuple(key for key in self.uploads if is_ours(key))


def test_a_life_aborts_the_uploads_of_older_lives_and_no_others():
    store = WithUploads()
    begin(store)
    told = [None]
    resume_at(store, told)
    assert UploadsAborted(1) in told


def test_uploads_that_cannot_be_cleaned_up_stop_nothing():
    class Denied(WithUploads):
        def sweep(self, is_ours, older_than_seconds, clock):
            raise StoreDenied("not allowed to list uploads", hint="a lifecycle rule")

    told = [None]
    resume_at(Denied(), told)
    assert UploadCleanupFailed("not allowed to list uploads", "a lifecycle rule") in told
