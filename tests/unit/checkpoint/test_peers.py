"""The near repository of another host, as it is served: what can be read, and what cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon.messages import SessionInfo, SessionTiers
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.tiers import peer_store
from resilient.checkpoint.tiers.peer_store import PIECE_BYTES_MAX, PeerServer, PeerStore
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import (
    Address,
    InMemoryKVStore,
    JsonLineSocket,
    address_toward,
    greeted,
    listen_for,
)
from resilient.distributed.launch_env import World
from resilient.errors import KeyNotFound, StoreDenied, StoreError, StoreUnavailable
from resilient.events import Emitter
from resilient.storage.store import ObjectInfo
from resilient.storage.transfer import ScatterBuffer
from resilient.testing.memory_store import MemoryStore

KEY = "checkpoint-1-g1/model.r00000.safetensors"
LIFE = "generations/g000001.json"


@pytest.fixture
def disk():
    near = MemoryStore("test://near")
    near.objects = {KEY: bytes(range(256)) * 8, LIFE: b"life", "tags/a.json": b"secret"}
    return near


@pytest.fixture
def server(disk):
    server = PeerServer(disk, "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def peer(server):
    peer = PeerStore(server.address, "host b")
    yield peer
    peer.close()


def test_what_another_host_holds_of_checkpoints_can_be_read(peer, disk):
    assert peer.get(KEY) == disk.objects[KEY]
    assert peer.get_range(KEY, 10, 20) == disk.objects[KEY][10:30]
    assert peer.get_range(KEY, 2040, 20) == disk.objects[KEY][2040:]
    assert peer.stat(KEY) == ObjectInfo(KEY, 2048)
    assert [one.key for one in peer.list("checkpoint-")] == [KEY]
    assert peer.get(LIFE) == b"life"


def test_a_large_object_comes_in_pieces_and_each_is_told(peer, disk):
    disk.objects[KEY] = bytes(PIECE_BYTES_MAX) + b"end"
    view, pieces = memoryview(bytearray(PIECE_BYTES_MAX + 3)), []
    came = peer.fill(
        KEY, 0, ScatterBuffer([view]), lambda begin, stop: pieces.append((begin, stop))
    )
    assert came == len(view)
    assert pieces == [(0, PIECE_BYTES_MAX), (PIECE_BYTES_MAX, PIECE_BYTES_MAX + 3)]
    assert view == disk.objects[KEY]


@pytest.mark.parametrize("key", ["tags/a.json", "checkpoint-9-g9/a.json", "../etc/passwd", ""])
def test_what_is_no_checkpoints_is_not_there(key, peer):
    with pytest.raises(KeyNotFound):
        peer.get(key)


def test_a_listing_names_nothing_but_checkpoints_and_lives(peer):
    assert [one.key for one in peer.list("tags/")] == []
    with pytest.raises(KeyNotFound):
        peer.list("../")


def test_it_cannot_be_written(peer, disk):
    before = dict(disk.objects)
    for write in (peer.put, peer.put_new):
        with pytest.raises(StoreDenied):
            write(KEY, b"")
    with pytest.raises(StoreDenied):
        peer.delete(KEY)
    assert disk.objects == before


@pytest.mark.parametrize(
    "asked",
    [
        {"verb": "read", "key": KEY, "start": 0, "length": PIECE_BYTES_MAX + 1},
        {"verb": "read", "key": KEY, "start": -1, "length": 1},
        {"verb": "read", "key": KEY},
        {"verb": "drop", "key": KEY, "start": 0, "length": 1},
        {"key": KEY},
    ],
)
def test_who_asks_nonsense_is_cut_off_and_nobody_else(asked, server, peer):
    with greeted(server.address) as connection:
        lines = JsonLineSocket(connection)
        lines.send(asked)
        assert lines.receive() is None
    assert peer.stat(KEY).size_bytes == 2048


def test_a_stranger_without_the_token_is_told_nothing(server):
    stranger = Address(server.address.host, server.address.port, "guess")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        PeerStore(stranger, "host b").get(KEY)


def test_a_host_that_is_gone_is_no_missing_key(server, peer):
    server.close()
    with pytest.raises(StoreUnavailable, match="host b does not answer at 127"):
        peer.stat(KEY)
    with pytest.raises(StoreUnavailable):
        PeerStore(server.address, "host b").connect_now()


class OwnClock(SystemClock):
    """Time passes when the test says so."""

    at_seconds = 100.0

    def monotonic_seconds(self) -> float:
        return self.at_seconds


@pytest.fixture
def line(monkeypatch):
    """The line to other hosts, and when somebody tried it."""
    clock = OwnClock()
    line = SimpleNamespace(clock=clock, is_cut=False, tried=[])

    def connect(address):
        line.tried.append(clock.at_seconds - OwnClock.at_seconds)
        if line.is_cut:
            raise ConnectionRefusedError("nobody there")
        return greeted(address)

    monkeypatch.setattr(peer_store, "greeted", connect)
    return line


def test_a_host_that_is_gone_is_asked_ever_more_seldom_and_found_when_it_is_back(server, line):
    peer = PeerStore(server.address, "host b", line.clock)
    line.is_cut = True
    for _ in range(200):
        with pytest.raises(StoreUnavailable, match="host b does not answer"):
            peer.stat(KEY)
        line.clock.at_seconds += 0.5
    assert line.tried == [0, 1, 3, 7, 15, 31, 61, 91]
    line.is_cut = False
    line.clock.at_seconds += 30
    assert peer.stat(KEY).size_bytes == 2048
    peer.close()
    assert peer.stat(KEY).size_bytes == 2048, "who answered is asked again at once"


def test_the_keeper_uses_a_host_that_did_not_answer_when_it_was_named(server, disk, line):
    comms = ControlGroup(InMemoryKVStore(), World(0, 2), "0")
    durable = MemoryStore("test://durable")
    desk = CheckpointContext(
        durable, comms, CheckpointOptions(), line.clock, Emitter(line.clock, ())
    )
    guest = SessionInfo(
        "", durable, None, TieringOptions(), World(0, 2), "0", desk.limits, "", desk.signing
    )
    onwards = SessionTiers(guest, MemoryStore("test://near"))
    named = {"groups": [[0], [1]], "peers": [["host b", server.address.to_json()]]}
    line.is_cut = True
    store = onwards.context_for(desk, named, 1, None).store
    durable.objects[LIFE] = disk.objects[LIFE]
    with pytest.raises(StoreUnavailable, match="host b does not answer"):
        store.get(KEY)
    line.is_cut = False
    line.clock.at_seconds += 1
    assert store.get(KEY) == disk.objects[KEY]
    onwards.close()


def test_a_disk_that_fails_there_is_a_store_that_fails(server, peer, disk, monkeypatch):
    def fail(_key):
        raise StoreError("input/output error")

    monkeypatch.setattr(disk, "stat", fail)
    with pytest.raises(StoreUnavailable, match="host b: input/output error"):
        peer.stat(KEY)


def test_on_one_machine_nobody_else_is_listened_to():
    assert listen_for("localhost") == listen_for("127.0.1.1") == "127.0.0.1"
    assert listen_for("::1") == "::1"
    assert listen_for("node-3") == ""
    assert address_toward("127.0.0.1", 9).startswith("127.")
