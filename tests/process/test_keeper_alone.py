"""The keeper's process and a rank's side of it, without a trainer."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.distributed.coordination import RankFailure
from resilient.errors import SaveFailed
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import run_ranks
from tests.helpers.keepers import begin, names, resumed_weight, weight

HELD = Path(__file__).parents[1] / "helpers" / "held"


@pytest.mark.smoke
def test_what_was_handed_over_is_committed_and_comes_back(start, tmp_path):
    keeper = start()
    checkpointer = begin(keeper, tmp_path / "run")
    for step in (1, 2, 3):
        checkpointer.save(step, weight(step, 5000 * step), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, step) for step in (3, 2, 1)]
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 3), 3.0)
    assert keeper.close() == 0
    assert list(keeper.shared.iterdir()) == []


@pytest.mark.smoke
def test_two_ranks_commit_together(start, tmp_path):
    keeper = start()

    def rank_main(world, board):
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
        checkpointer.close()
        return checkpointer.committed()

    assert run_ranks(2, rank_main) == [[CheckpointId(1, 1)]] * 2
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 1), 7.0)


def test_two_hosts_commit_over_the_board_of_the_coordinators_keeper(start, tmp_path):
    keepers = [start(folder="host-0"), start(folder="host-1")]

    def rank_main(world, board):
        keeper = keepers[world.rank]
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        for step in (1, 2):
            checkpointer.save(step, weight(step, 300_000), CheckpointInfo())
        checkpointer.close()
        return checkpointer.committed()

    assert run_ranks(2, rank_main) == [[CheckpointId(1, 2), CheckpointId(1, 1)]] * 2
    assert resumed_weight(keepers[1], tmp_path / "run")[:2] == (CheckpointId(1, 2), 2.0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_lost_between_the_copy_and_the_hand_over_is_heard_of_at_once(start, tmp_path, lost):
    keeper = start()

    def rank_main(world, board):
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        persister = checkpointer._persister
        if world.rank == lost:
            persister._connection.send = lost_before_it_hands_over(persister._connection)
        checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
        persister._listener.join()
        assert "ended before all bytes" in persister._listener.outcome.message or world.rank == lost
        # It was only the connection: the ranks live, and persist what lies in their memory.
        checkpointer.wait()
        checkpointer.close()
        return checkpointer.committed()

    assert run_ranks(2, rank_main) == [[CheckpointId(1, 1)]] * 2


def test_a_rank_that_is_dead_is_not_waited_for_like_a_slow_store(start, tmp_path, monkeypatch):
    monkeypatch.setattr("resilient.checkpoint.daemon.client._ANSWER_SECONDS", 0.5)
    keeper, began_seconds = start(), time.monotonic()

    def rank_main(world, board):
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        talk = checkpointer._persister._connection
        if world.rank == 1:
            talk.send = lost_before_it_hands_over(talk)
            checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
            return
        checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
        with pytest.raises(SaveFailed, match="ended before all bytes"):
            checkpointer.close()

    run_ranks(2, rank_main)
    # A slow store would have had a minute.
    assert time.monotonic() - began_seconds < 30
    assert not list((tmp_path / "run").glob("*/manifest.json"))


def lost_before_it_hands_over(talk):
    tell = talk.send

    def told(verb, **message):
        if verb == "save":
            # As the kernel does when the process dies.
            talk.close()
        return tell(verb, **message)

    return told


def test_with_the_keeper_gone_the_trainer_persists_by_itself_and_says_so(start, tmp_path):
    keeper = start()
    checkpointer = begin(keeper, tmp_path / "run")
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.wait()
    keeper.kill()
    checkpointer.save(2, weight(2), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed()[0] == CheckpointId(1, 2)
    assert "DaemonBypassed" in names(checkpointer.seen)


def test_without_a_keeper_from_the_start_all_is_as_without_one(tmp_path):
    gone = type("Gone", (), {"path": tmp_path / "nobody"})
    checkpointer = begin(gone, tmp_path / "run")
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 1)]
    assert "nobody" in checkpointer.seen[-2].reason or "DaemonBypassed" in names(checkpointer.seen)


def test_a_keeper_of_one_rank_alone_serves_nobody(start, tmp_path):
    keeper = start()
    gone = type("Gone", (), {"path": tmp_path / "nobody"})

    def rank_main(world, board):
        mine = (keeper, gone)[world.rank]
        checkpointer = begin(mine, tmp_path / "run", kv_store=board, world=world)
        checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
        checkpointer.close()
        return checkpointer.committed()

    assert run_ranks(2, rank_main) == [[CheckpointId(1, 1)]] * 2


def test_a_keeper_that_dies_after_the_commit_is_no_failed_save(start, tmp_path):
    keeper = start()
    checkpointer = begin(keeper, tmp_path / "run")
    checkpointer.save(1, weight(1), CheckpointInfo())
    while not checkpointer.committed():
        time.sleep(0.01)
    keeper.kill()
    checkpointer.wait()
    checkpointer.close()


def handed_over(keeper, gate, url):
    """Hand checkpoint-1 over and lose the trainer; the store does not take it yet."""
    checkpointer = begin(keeper, url)
    checkpointer.save(1, weight(1), CheckpointInfo())
    while not list(gate.glob("held-*")):
        time.sleep(0.01)
    checkpointer._persister._connection.close()
    checkpointer._persister._fallback.close()


def test_a_keeper_that_is_told_to_leave_lets_the_save_in_flight_land(start, gate, tmp_path):
    keeper = start()
    handed_over(keeper, gate, tmp_path / "run")
    keeper.process.stdin.close()
    time.sleep(0.3)
    assert keeper.process.poll() is None
    (gate / "go").touch()
    assert keeper.process.wait(20) == 0
    keeper.process.stdout.close()
    assert list(keeper.shared.iterdir()) == []
    assert resumed_weight(start(folder="other"), tmp_path / "run")[0] == CheckpointId(1, 1)


def test_a_hosts_keeper_killed_in_mid_save_is_heard_of_by_the_other_host_at_once(
    start, gate, tmp_path
):
    keepers = [start(folder="host-0"), start(folder="host-1")]

    def rank_main(world, board):
        checkpointer = begin(keepers[world.rank], tmp_path / "run", kv_store=board, world=world)
        checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
        if world.rank == 1:
            while len(list(gate.glob("held-*"))) < 2:
                time.sleep(0.01)
            keepers[1].kill()
            (gate / "go").touch()
        checkpointer._persister._listener.join()
        assert isinstance(checkpointer._persister._listener.outcome, RankFailure)
        # The same way for all: the trainers persist by themselves, this save and the next.
        checkpointer.wait()
        checkpointer.save(2, weight(8, 300_000), CheckpointInfo())
        checkpointer.close()
        bypassed = names(checkpointer.seen).count("DaemonBypassed")
        assert bypassed == (2 if world.is_coordinator else 0)
        return checkpointer.committed()

    assert run_ranks(2, rank_main) == [[CheckpointId(1, 2), CheckpointId(1, 1)]] * 2


@pytest.mark.parametrize("whose", ["its own", "another"])
def test_a_new_life_waits_for_what_an_older_one_handed_over(start, gate, tmp_path, whose):
    keeper = start()
    handed_over(keeper, gate, tmp_path / "run")
    if whose == "another":
        keeper = start("--shared", str(keeper.shared), folder="other")
    opener = threading.Timer(1, (gate / "go").touch)
    opener.start()
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 1), 1.0)
    opener.join()


HOSTILE = [
    b"",
    b"\n",
    b"{",
    b"not json\n",
    b"[1]\n",
    b"null\n",
    b'{"verb": "save"}\n',
    b'{"verb": "nothing"}\n',
    b'{"verb": ["x"]}\n',
    b'{"verb": "hello", "version": 99}\n',
    b'{"verb": "hello", "version": 1, "world": 7}\n',
    b'{"verb": "reserve", "name": "../../x", "size_bytes": -5}\n',
    b'{"verb": "reserve", "name": "x", "size_bytes": 1e400}\n',
    b'{"verb": "join", "board": {"host": "127.0.0.1", "port": 1, "token": ""}}\n',
    b'{"verb": "begin"}\n{"verb": "wait"}\n{"verb": "recall"}\n{"verb": "settle"}\n',
    b"[" * 100_000 + b"\n",
    bytes(range(256)) + b"\n",
]


def test_torn_and_hostile_messages_are_refused_and_hurt_nobody(start, tmp_path):
    keeper = start()
    for message in HOSTILE:
        connection = keeper.talk()
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        while more := connection.recv(1 << 16):
            heard += more
        connection.close()
        for line in heard.splitlines():
            assert isinstance(json.loads(line), dict)
    checkpointer = begin(keeper, tmp_path / "run")
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 1)]
    assert keeper.close() == 0


def test_the_signals_of_the_job_do_not_end_the_keeper(start, tmp_path):
    keeper = start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        keeper.process.send_signal(number)
    checkpointer = begin(keeper, tmp_path / "run")
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.close()
    assert keeper.close() == 0


def test_a_frozen_keeper_hangs_nobody(start, tmp_path, monkeypatch):
    monkeypatch.setattr("resilient.checkpoint.daemon.connection.SILENCE_SECONDS", 1.0)
    keeper = start()
    checkpointer = begin(keeper, tmp_path / "run")
    keeper.process.send_signal(signal.SIGSTOP)
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 1)]


def test_threads_of_the_board_end_with_it():
    from resilient.distributed.kv_store import KVStoreServer, SocketKVStore

    server = KVStoreServer()
    clients = [SocketKVStore(server.address) for _ in range(3)]
    clients[0].post("a", b"\x00\xff")
    assert clients[1].wait(["a"], 5) == [b"\x00\xff"]
    server.close()
    assert not [one for one in threading.enumerate() if one.name == "board" and one.is_alive()]
    for client in clients:
        client.close()
