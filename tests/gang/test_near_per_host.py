"""Several hosts, a near tier on the disk of each: who holds what, what is read from where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient import events
from resilient.checkpoint import events as checkpoint_events
from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.context import PostCommitPlan
from resilient.checkpoint.promotion import promote
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.tiers.peer_store import NearTierGroups, PeerServer, PeerStore
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import IntegrityError, SaveFailed, StoreUnavailable
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.helpers.hosts import host, live
from tests.helpers.tiered import desk_over

SELDOM = TieringOptions(durable_every=99)


@pytest.fixture
def nears():
    return [host("a"), host("b")]


@pytest.fixture
def durable():
    return MemoryStore("test://durable")


def steps(store) -> list[int]:
    return [one.step for one in committed(store)]


def ranks_of(store, checkpoint) -> set[int]:
    """Return whose files of a checkpoint lie in a repository."""
    manifest = read_manifest(store, checkpoint)
    return {one.rank for one in manifest.files if manifest.key(one.name) in store.objects}


def shared_key(store, checkpoint) -> str:
    """Return the key of a file that rank 1 wrote and that all ranks read."""
    manifest = read_manifest(store, checkpoint)
    mine = [one.name for one in manifest.files if one.rank == 1 and "model" in one.name]
    return manifest.key(mine[0])


def _keys(store, checkpoint) -> set[str]:
    manifest = read_manifest(store, checkpoint)
    return {manifest.key(one.name) for one in manifest.files} | {checkpoint.manifest_key}


def expected(ranks=2, until=4):
    return live([host("x")] * ranks, MemoryStore("test://x"), until).finals


def test_each_host_holds_the_files_of_its_own_ranks_and_the_one_manifest(nears, durable):
    live(nears, durable)
    newest = committed(durable)[0]
    assert [ranks_of(near, newest) for near in nears] == [{0}, {1}]
    manifests = {store.objects[newest.manifest_key] for store in (*nears, durable)}
    assert len(manifests) == 1
    assert ranks_of(durable, newest) == {0, 1}
    assert not verify(durable, newest, "full")


def test_two_ranks_of_a_host_share_its_near_tier(durable):
    a, b = host("a"), host("b")
    live([a, a, b, b], durable)
    newest = committed(durable)[0]
    assert (ranks_of(a, newest), ranks_of(b, newest)) == ({0, 1}, {2, 3})


def test_what_no_promotion_brought_is_resumed_from_the_disks_of_all_hosts(nears, durable):
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    assert steps(durable) == [1]
    run = live(nears, durable, attempt="1")
    assert run.started_at == {0: 3, 1: 3}
    assert run.finals == expected()


def test_hosts_that_changed_places_resume_from_each_other(nears, durable):
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    run = live(nears[::-1], durable, attempt="1")
    assert run.started_at == {0: 3, 1: 3}
    assert run.finals == expected()
    assert not verify(durable, committed(durable)[0], "full")
    assert steps(durable)[0] == 4


def test_a_host_that_lost_its_disk_falls_back_together_with_all(nears, durable):
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    run = live([nears[0], host("new")], durable, attempt="1")
    assert run.started_at == {0: 1, 1: 1}
    assert run.finals == expected()
    fresh = run.said(checkpoint_events.NearTierEmpty)
    assert [list(one.ranks) for one in fresh] == [[1]]
    assert "new or lost its disk" in fresh[0].message()
    skipped = run.said(events.CheckpointSkipped)
    assert [one.checkpoint for one in skipped] == ["checkpoint-3-g1", "checkpoint-2-g1"]
    assert "is missing" in skipped[0].reason


def test_the_coordinators_host_may_be_the_one_that_lost_its_disk(nears, durable):
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    run = live([host("new"), nears[1]], durable, attempt="1")
    assert run.started_at == {0: 1, 1: 1}
    assert run.finals == expected()


def test_a_lost_file_is_read_from_the_durable_tier_and_all_others_near(nears, durable):
    live(nears, durable, durable_every=1)
    newest = committed(durable)[0]
    del nears[1].objects[shared_key(durable, newest)]
    run = live(nears, durable, until=6, attempt="1")
    assert run.started_at == {0: 4, 1: 4}
    assert run.finals == expected(until=6)


def test_a_damaged_near_copy_of_another_host_is_read_from_the_durable_tier_and_told(nears, durable):
    live(nears, durable, durable_every=1)
    key = shared_key(durable, CheckpointId(1, 4))
    data = bytearray(nears[1].objects[key])
    data[-1] ^= 1
    nears[1].objects[key] = bytes(data)
    run = live(nears, durable, until=6, attempt="1")
    assert run.started_at == {0: 4, 1: 4}
    assert run.finals == expected(until=6)
    doubted = run.said(checkpoint_events.NearCopyRejected)
    assert {one.key for one in doubted} == {key}
    assert {one.near for one in doubted} == {"test://near", "the near tier of rank 1's host"}


def test_more_and_fewer_hosts_go_on_from_what_the_old_ones_hold(nears, durable):
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    third = host("c")
    more = live([*nears, third], durable, until=5, tiering=SELDOM, attempt="1", is_cut=True)
    assert set(more.started_at.values()) == {3}
    fewer = live([nears[1]], durable, until=6, attempt="2")
    assert fewer.started_at == {0: 4}, "what lay on the hosts that are gone alone is gone"


def test_each_host_rotates_its_own_disk(nears, durable):
    live(nears, durable, until=6)
    assert [steps(near) for near in nears] == [[6, 5], [6, 5]]
    for near in nears:
        needed = {key for one in committed(near) for key in _keys(near, one)}
        there = {key for key in near.objects if key.startswith("checkpoint-")}
        assert there <= needed


def test_a_manifest_that_a_host_did_not_get_is_brought_by_the_next_life(nears, durable):
    """All died between the commit and the other hosts' copies of the manifest."""
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    newest = CheckpointId(1, 3)
    manifest = nears[1].objects.pop(newest.manifest_key)
    run = live(nears, durable, until=4, attempt="1", tiering=SELDOM, is_cut=True)
    assert run.started_at == {0: 3, 1: 3}
    assert nears[1].objects[newest.manifest_key] == manifest
    assert newest in committed(nears[1])


def test_a_near_disk_of_another_run_is_refused_on_all_hosts(nears, durable):
    live([nears[1]], MemoryStore("test://other"), until=1)
    run = live(nears, durable)
    assert "of a run that test://durable does not know" in str(run.error)
    assert not durable.objects


class Small(MemoryStore):
    """A disk with little room."""

    def __init__(self, room_bytes) -> None:
        super().__init__("test://near")
        self.room_bytes = room_bytes

    def free_bytes(self) -> int:
        return self.room_bytes


def test_the_room_of_each_host_is_asked_for_its_own_ranks(durable):
    """A hundred thousand bytes are enough for one rank's share, and would not be for both."""
    run = live([Small(110_000), Small(110_000)], durable, until=1)
    assert run.error is None
    run = live([Small(1 << 30), Small(1000)], MemoryStore("test://other"), until=1)
    assert "test://near of ranks 1: the save needs" in str(run.error)


def test_a_promotion_lacking_a_hosts_files_is_not_committed(nears, durable):
    live(nears, durable, until=2, tiering=SELDOM, is_cut=True)
    newest = CheckpointId(1, 2)
    tiers = TieredStore(nears[0], durable, lambda _key, _where: None)
    with pytest.raises(IntegrityError, match="missing in every near tier"):
        promote(tiers, newest, 1)
    assert steps(durable) == [1]


def test_a_host_that_does_not_answer_is_no_damage(nears, durable):
    live(nears, durable, until=2, tiering=SELDOM, is_cut=True)
    tiers = TieredStore(nears[0], durable, lambda _key, _where: None)
    server = PeerServer(nears[1], "127.0.0.1")
    peer = PeerStore(server.address, "b")
    tiers.peers = (peer,)
    assert read(tiers, CheckpointId(1, 2)).files
    theirs = min(nears[1].objects.keys() - nears[0].objects.keys() - durable.objects.keys())
    server.close()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        read(tiers, CheckpointId(1, 2))
    with pytest.raises(StoreUnavailable, match="does not answer"):
        tiers.get(theirs)
    peer.close()


def test_a_host_that_lacks_a_manifest_lets_nothing_go(nears, durable):
    """A rotation would take the files of what has no manifest here for leftovers."""
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    del nears[1].objects[CheckpointId(1, 2).manifest_key]
    before = dict(nears[1].objects)
    desk = desk_over(
        nears[1],
        durable,
        tiering=TieringOptions(99, 1),
        world=World(1, 2),
        kv_store=InMemoryKVStore(),
    )
    due = PostCommitPlan((CheckpointId(1, 1),), ())
    for step in (2, 3):
        desk.promoter.committed(desk, CheckpointId(1, step), due)
    desk.promoter.close()
    assert nears[1].objects == before


def test_leaders_of_hosts_do_not_wait_for_one_that_is_gone(nears, durable):
    live(nears, durable, until=2, tiering=SELDOM, is_cut=True)
    desk = desk_over(
        nears[0], durable, tiering=SELDOM, world=World(0, 2), kv_store=InMemoryKVStore()
    )
    desk = replace(desk, places=NearTierGroups(((0,), (1,))))
    server = PeerServer(nears[1], "127.0.0.1")
    peer = PeerStore(server.address, "host b")
    desk.store.peers = (peer,)
    server.close()
    desk.promoter.begin(desk, 1, CheckpointId(1, 2))
    with pytest.raises(SaveFailed, match="host b does not answer"):
        desk.promoter.finish(desk, 0.3)
    desk.promoter.close()
    peer.close()


def test_what_another_host_has_is_not_referred_to(nears, durable):
    live(nears, durable, until=3, tiering=SELDOM, is_cut=True)
    live(nears[::-1], durable, attempt="1")
    for near in nears:
        newest = committed(near)[0]
        ranks = ranks_of(near, newest)
        for one in read_manifest(near, newest).files:
            there = newest.key(one.name) if not one.origin else one.name
            assert one.rank not in ranks or there in near.objects


def test_whoever_closes_does_not_wait_for_a_host_that_is_gone(nears, durable):
    desk = desk_over(nears[0], durable, tiering=SELDOM)
    checkpointer = CheckpointEngine(desk)
    checkpointer.resume({})
    for step in (1, 2):
        checkpointer.save(step, {}, CheckpointInfo())
        checkpointer.wait()
    server = PeerServer(nears[1], "127.0.0.1")
    peer = PeerStore(server.address, "host b")
    desk.store.peers = (peer,)
    server.close()
    with pytest.raises(SaveFailed, match=r"only in the near tier .*: host b does not answer"):
        checkpointer.close()
    peer.close()
