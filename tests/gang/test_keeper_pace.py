"""The saver daemon pauses beside training, and saves at full speed while a rank waits."""

from __future__ import annotations

import math
import threading
import time

import pytest

from resilient.checkpoint.daemon.memory import MemoryQuota, SharedMemoryPool
from resilient.checkpoint.daemon.server import SaverDaemon
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.distributed.kv_store import InMemoryKVStore, KVStoreServer
from resilient.distributed.launch_env import World
from resilient.storage.shared_memory import SharedFolder
from resilient.storage.transfer import map_parallel
from tests.helpers.keepers import open_one, weight
from tests.helpers.paces import resting, wait_until

SIZE = 6 << 20
BYTES = 4 * SIZE
REST_SECONDS = 40.0


class Host:
    """A keeper in this process, and one rank that saves to ``url`` by way of it."""

    def __init__(self, folder) -> None:
        self.url = folder / "run"
        self.path = folder / "keeper"
        self.shared = SharedFolder(folder)
        self.keeper = SaverDaemon(
            self.path, SharedMemoryPool(self.shared, MemoryQuota()), KVStoreServer(), SystemClock()
        )
        self.left = math.inf
        self.rank = open_one(self, self.url)
        self.rank.resume({})
        (self.seat,) = self.keeper._sessions
        self.seat.pacer.pacing = resting(BYTES, REST_SECONDS)

    def left_seconds(self) -> float:
        return self.left

    def save(self) -> None:
        """Begin a save, and return when the keeper rests."""
        self.rank.save(1, weight(1, SIZE), CheckpointInfo())
        pacer = self.seat.pacer
        wait_until(lambda: pacer.pace and pacer.pace._done_bytes)
        time.sleep(0.2)
        assert self.seat.is_busy
        assert self.rank.committed() == []


@pytest.fixture
def host(tmp_path):
    one = Host(tmp_path)
    yield one
    one.rank.close()
    wait_until(lambda: not one.seat.is_busy)
    one.keeper.close()
    one.shared.close()


def waits(host) -> None:
    host.rank.wait()


def saves_again(host) -> None:
    host.rank.save(2, weight(2, SIZE), CheckpointInfo())


def is_gone(host) -> None:
    host.rank._persister._connection.close()


def next_life_comes(host) -> None:
    later = open_one(host, host.url, scope="next")
    later.resume({})
    later.close()


def keeper_is_to_end(host) -> None:
    assert host.keeper.settle(REST_SECONDS)


def process_is_to_end(host) -> None:
    host.left = 30.0


@pytest.mark.parametrize(
    "hurried",
    [waits, saves_again, is_gone, next_life_comes, keeper_is_to_end, process_is_to_end],
)
def test_the_keeper_rests_until_somebody_waits(host, hurried):
    host.save()
    began = time.monotonic()
    hurried(host)
    wait_until(lambda: any(one.step == 1 for one in host.rank.committed()))
    assert time.monotonic() - began < REST_SECONDS / 2


def test_who_waits_before_the_save_has_begun_is_not_forgotten(host):
    begin, heard = host.seat.pacer.begin, threading.Event()
    hurry = host.seat.pacer.hurry

    def begin_late(*about):
        assert heard.wait(20)
        time.sleep(0.1)
        return begin(*about)

    def hurried():
        hurry()
        heard.set()

    host.seat.pacer.begin, host.seat.pacer.hurry = begin_late, hurried
    began = time.monotonic()
    host.rank.save(1, weight(1, SIZE), CheckpointInfo())
    host.rank.wait()
    assert time.monotonic() - began < REST_SECONDS / 2


def test_every_rank_hears_how_long_the_save_of_any_rested(host, tmp_path):
    board, url = InMemoryKVStore(), tmp_path / "together"
    rested, rests = [], threading.Event()

    def main(rank):
        world, bound = World(rank, 2, rank), {"pace_seconds_max": rank * 60.0}
        one = open_one(host, url, kv_store=board, world=world, scope="both", **bound)
        one.resume({})
        if rank == 1:
            (seat,) = [seat for seat in host.keeper._sessions if seat._info.world.rank == 1]
            seat.pacer.pacing = resting(BYTES, REST_SECONDS)
        one.save(1, weight(1, SIZE), CheckpointInfo())
        if rank == 1:
            wait_until(lambda: seat.pacer.pace and seat.pacer.pace._done_bytes)
            time.sleep(0.3)
            rests.set()
        assert rests.wait(20)
        one.wait()
        rested.append(one._persister.rested_seconds)
        one.close()

    map_parallel(main, range(2), 2)
    assert rested[0] == rested[1]
    assert 0.1 < rested[0] < REST_SECONDS / 2


def test_a_rank_hears_how_long_its_save_rested(host):
    host.save()
    host.rank.wait()
    persister = host.rank._persister
    assert 0.1 < persister.rested_seconds < persister.took_seconds < REST_SECONDS / 2


def test_a_save_of_who_is_gone_never_rests(host):
    host.seat.leave()
    pace = host.seat.pacer.begin(BYTES, time.monotonic(), REST_SECONDS)
    assert pace._hurry.is_set()
