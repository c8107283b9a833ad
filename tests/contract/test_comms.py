"""Agreement over every kind of board: threads in memory, and a real TCPStore."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from resilient.distributed.coordination import ControlGroup, agree
from resilient.distributed.kv_store import Address, InMemoryKVStore, KVStoreServer, SocketKVStore
from resilient.distributed.launch_env import (
    LaunchEnv,
    World,
    exited_without_save,
    publish_repository,
    read_launch,
    read_published_repository,
    write_launch,
)
from resilient.distributed.torch_kv_store import TorchKVStore, connect
from resilient.errors import DeadlineExceeded, PeerFailed
from resilient.testing.memory_store import run_ranks
from tests.helpers.boards import PATIENT_SECONDS, Timed


@pytest.fixture(params=["memory", "tcp", "sockets"])
def boards(request):
    """Turn a rank's in-memory board into the kind under test."""
    if request.param == "memory":
        yield lambda world, board: board
    elif request.param == "tcp":
        yield tcp_boards()
    else:
        server, opened = KVStoreServer(), []
        yield lambda _world, _board: Noted(server.address, opened)
        for one in opened:
            one.close()
        server.close()


class Noted(SocketKVStore):
    """A client that the test can close; a TCPStore's closes by itself."""

    def __init__(self, address, opened) -> None:
        super().__init__(address)
        self.opened = opened
        opened.append(self)

    def another(self):
        return Noted(self._address, self.opened)


def tcp_boards():
    ready, served = threading.Event(), []  # served here, so that it outlives its rank

    def tcp(world, _board) -> TorchKVStore:
        if world.is_coordinator:
            board = connect(world, "127.0.0.1", 0, hosted=False)
            served.append(board)
            ready.set()
            return board
        assert ready.wait(20)
        return connect(world, "127.0.0.1", served[0].store.port, hosted=True)

    return tcp


def test_the_coordinator_hears_all_and_all_hear_the_coordinator(boards):
    def rank_main(world, board):
        board = boards(world, board)
        comms = ControlGroup(board.another(), world, "scope")
        return [
            agree(comms, f"round-{number}", {"rank": world.rank}, lambda shown: shown, 20)
            for number in range(5)
        ]

    for heard in run_ranks(3, rank_main):
        assert heard == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 5


def test_two_users_of_one_board_do_not_hear_each_other(boards):
    def rank_main(world, board):
        board = boards(world, board)
        both = []
        for scope in ("life-1", "life-2"):
            comms = ControlGroup(board.another(), world, scope)
            both.append(agree(comms, "same-topic", scope, lambda shown: shown, 20))
        return both

    for both in run_ranks(2, rank_main):
        assert both == [["life-1"] * 2, ["life-2"] * 2]


def test_a_board_posts_peeks_waits_and_removes(boards):
    def rank_main(world, board):
        board = boards(world, board)
        assert board.peek("a") is None
        assert board.wait(["a", "b"], 0.05) is None
        board.post("a", b"1")
        board.another().post("b", b"")
        assert board.wait(["a", "b"], 5) == [b"1", b""]
        board.post("a", b"2")
        assert board.peek("a") == b"2"
        board.remove("a")
        board.remove("never there")
        assert board.peek("a") is None

    run_ranks(1, rank_main)


def test_nothing_that_ranks_have_shown_stays_on_the_board(boards):
    is_over = threading.Barrier(3, timeout=PATIENT_SECONDS)

    def rank_main(world, board):
        board = boards(world, board)
        comms = ControlGroup(board, world, "s")
        agree(comms, "t", world.rank, sum, PATIENT_SECONDS)
        is_over.wait()
        left = [rank for rank in range(3) if board.peek(comms.key("t", rank)) is not None]
        is_over.wait()
        return left

    assert run_ranks(3, rank_main) == [[], [], []]


def test_a_ruling_that_was_heard_holds_though_the_board_is_gone_by_then():
    class Ending(InMemoryKVStore):
        def remove(self, key):
            raise PeerFailed(f"gone before `{key}`")

    board = Ending()
    board.post("s/t/ruling", b"7")
    assert ControlGroup(board, World(1, 2), "s").broadcast("t", None, 5) == 7


def test_a_coordinator_that_does_not_rule_is_noticed(boards):
    def rank_main(world, board):
        board = boards(world, board)
        if world.is_coordinator:
            time.sleep(0.6)
            return
        with pytest.raises(DeadlineExceeded, match="did not decide within") as caught:
            ControlGroup(board, world, "s").broadcast("t", None, 0.2)
        assert "save_within_seconds" in caught.value.hint

    run_ranks(2, rank_main)


@pytest.mark.parametrize("beats", [3, 1])
def test_a_rank_is_not_silent_while_it_is_at_work_and_is_when_it_rests_there(boards, beats):
    timed, is_over = [], threading.Event()
    is_there = threading.Barrier(2, timeout=PATIENT_SECONDS)

    def rank_main(world, board):
        board = boards(world, board)
        if world.is_coordinator:
            timed.append(Timed(board, "s/t/1"))
            is_there.wait()
            try:
                return ControlGroup(timed[0], world, "s").gather("t", 0, 9)
            finally:
                is_over.set()
        is_there.wait()
        comms = ControlGroup(board, world, "s")
        with comms.at_work() as beat:
            for number in range(3):
                if number < beats:
                    beat()
                # A post is not answered; a question after it on the same line is.
                assert board.peek("s/beat/1")
                if number <= beats:
                    timed[0].let_a_deadline_pass(is_last=number == beats)
            if beats < 3:
                assert is_over.wait(PATIENT_SECONDS)
                return None
        timed[0].be_patient()
        return comms.gather("t", 1, 9)

    if beats == 3:
        assert run_ranks(2, rank_main)[0] == [0, 1]
    else:
        with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] did not answer within 9 s"):
            run_ranks(2, rank_main)


def test_a_server_that_is_gone_is_a_peers_failure():
    server = connect(World(0, 1), "127.0.0.1", 0, hosted=False)
    client = connect(World(1, 2), "127.0.0.1", server.store.port, hosted=True)
    server.post("a", b"1")
    # A post is not answered, so another connection may ask before it has arrived.
    assert client.wait(["a"], 10) == [b"1"]
    del server

    def ask_until_it_is_gone():
        for _ in range(100):
            client.post("b", b"2")
            time.sleep(0.02)

    with pytest.raises(PeerFailed, match="rendezvous store is unreachable"):
        ask_until_it_is_gone()


def test_a_port_that_somebody_else_has_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            PeerFailed, match=rf"no rendezvous store at 127\.0\.0\.1:{port}: .*in use"
        ):
            connect(World(0, 1), "127.0.0.1", port, hosted=False)


def test_a_socket_server_that_is_gone_is_a_peers_failure():
    server = KVStoreServer()
    client = SocketKVStore(server.address)
    client.post("a", b"1")
    server.close()
    with pytest.raises(PeerFailed, match=r"daemons at 127\.0\.0\.1:\d+ is unreachable"):
        client.peek("a")
    with pytest.raises(PeerFailed, match="is unreachable"):
        client.another()
    client.close()


def test_a_will_is_posted_when_its_client_is_gone_and_only_then():
    server = KVStoreServer()
    heir, leaving, staying = (SocketKVStore(server.address) for _ in range(3))
    leaving.will("left", b"will")
    leaving.will("kept", b"will")
    leaving.post("kept", b"value")
    staying.will("stays", b"will")
    assert heir.wait(["left"], 0.1) is None
    leaving.close()
    assert heir.wait(["left"], 10) == [b"will"]
    assert heir.peek("kept") == b"value"
    assert heir.peek("stays") is None
    for one in (heir, staying):
        one.close()
    server.close()


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": 5}\n',
        b'{"token": "TOKEN"}\n{"verb": "post"}\n',
        b'{"token": "TOKEN"}\n{"verb": "post", "keys": ["a", "b"], "value": "x"}\n',
        b'{"token": "TOKEN"}\n{"verb": "wait", "keys": ["a"], "within_seconds": "x"}\n',
        b'{"token": "TOKEN"}\n{"verb": "other", "keys": ["a"]}\n',
    ],
)
def test_a_client_that_talks_nonsense_is_cut_off_and_hurts_nobody(line):
    server = KVStoreServer()
    good = SocketKVStore(server.address)
    with socket.create_connection(("127.0.0.1", server.address.port), 10) as bad:
        bad.sendall(line.replace(b"TOKEN", server.address.token.encode()))
        bad.shutdown(socket.SHUT_WR)
        assert bad.recv(100) == b""
    good.post("a", b"1")
    assert good.peek("a") == b"1"
    good.close()
    server.close()


def test_without_the_token_nothing_is_told():
    server = KVStoreServer()
    good = SocketKVStore(server.address)
    good.post("a", b"1")
    stranger = SocketKVStore(Address("127.0.0.1", server.address.port, "guess"))
    with pytest.raises(PeerFailed):
        stranger.peek("a")
    for one in (good, stranger):
        one.close()
    server.close()


def test_a_launch_is_read_as_it_was_written():
    told = (
        "run-2",
        "s3://b/p",
        "never",
        "restart",
        "/e",
        True,
        "/run/keeper",
        {},
        4,
        30.0,
        "/notes",
    )
    launch = LaunchEnv(World(3, 8, 1), "10.0.0.1", 29500, True, *told)
    assert read_launch(write_launch(launch)) == launch
    assert read_launch({}) == LaunchEnv(World())


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("/data/run", "/data/run"),
        ("run", str(Path("run").absolute())),
        ("s3://bucket/run", "s3://bucket/run"),
        ("https://user:secret@host/run", ""),
        ("s3://bucket/run?token=secret", ""),
    ],
)
def test_the_agent_is_told_the_repository_and_no_secret(tmp_path, url, told):
    publish_repository(LaunchEnv(World(), notes=str(tmp_path)), url)
    assert read_published_repository(str(tmp_path)) == told
    assert "secret" not in "".join(one.read_text() for one in tmp_path.iterdir())


@pytest.mark.parametrize("url", ["/data/run", "s3://bucket/run?token=secret"])
def test_the_agent_is_told_who_loses_work_when_it_is_stopped(tmp_path, url):
    assert exited_without_save(str(tmp_path)) == ""
    launch = LaunchEnv(World(), attempt="job-1", notes=str(tmp_path))
    publish_repository(launch, url, saves_when_stopped=True)
    assert exited_without_save(str(tmp_path)) == ""
    publish_repository(launch, url)
    assert exited_without_save(str(tmp_path)) == "job-1"
