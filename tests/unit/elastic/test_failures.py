"""Which of several failed workers is named first."""

import json

import pytest

from resilient.elastic.outcome import Cause
from resilient.elastic.worker_errors import WorkerError, find_failures, read_error
from resilient.elastic.workers.group import WorkerCommand, WorkerExit

NOW = 100.0


@pytest.fixture
def worker(tmp_path):
    def make(rank, status, *, seen=NOW, alive=NOW - 0.1, is_killed=False, **error):
        path = tmp_path / f"{rank}.json"
        if error:
            record = {"message": {"message": "E: e", "extraInfo": {}}, **error}
            path.write_text(json.dumps(record), encoding="utf-8")
        command = WorkerCommand(rank, rank, ("x",), {}, path)
        return WorkerExit(command, 1000 + rank, status, seen, alive, is_killed)

    return make


def ranks(exits, before=NOW):
    return [failure.exit.command.rank for failure in find_failures(exits, before)]


def test_the_time_in_the_error_file_decides(worker):
    exits = [worker(0, 1, monotonic_seconds=99.9), worker(1, 1, monotonic_seconds=99.8)]
    assert ranks(exits) == [1, 0]


def test_a_killed_rank_comes_before_the_peer_that_reports_its_loss(worker):
    exits = [worker(0, 1, monotonic_seconds=99.95), worker(1, -9)]
    assert ranks(exits) == [1, 0]


def test_an_abort_is_not_dated_back_because_libraries_abort_on_a_loss(worker):
    exits = [worker(0, -6), worker(1, 1, monotonic_seconds=99.95)]
    assert ranks(exits) == [1, 0]


@pytest.mark.parametrize("code", ["RES-PEER", "RES-DEADLINE", "RES-SAVE-PEER"])
def test_an_echo_comes_last_whenever_it_was_written(worker, code):
    exits = [worker(0, 69, code=code, monotonic_seconds=1.0), worker(1, 1, monotonic_seconds=2.0)]
    failures = find_failures(exits, NOW)
    assert [failure.error.is_echo for failure in failures] == [False, True]


RESET = {
    "message": "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:11660: Connection reset by peer. Check the logs of the remote worker",
    "extraInfo": {},
}


@pytest.mark.parametrize("status", [78, -6])
def test_who_lost_the_connection_to_a_rank_comes_after_it(worker, status):
    exits = [worker(0, 1, message=RESET, monotonic_seconds=98.0), worker(1, status)]
    first, second = find_failures(exits, NOW)
    assert (first.exit.command.rank, first.cause is Cause.PEER) == (1, False)
    assert (second.error.is_echo, second.cause) == (True, Cause.PEER)


def test_of_those_seen_in_one_look_an_abort_comes_last(worker):
    assert ranks([worker(0, -6), worker(1, 78)]) == [1, 0]


def test_good_ends_and_survivors_that_we_stopped_did_not_fail(worker):
    exits = [
        worker(0, 0),
        worker(1, 75),
        worker(2, -15, seen=NOW + 1),
        worker(3, -9, seen=NOW + 2, is_killed=True),
        worker(4, 1, monotonic_seconds=NOW + 1),
        worker(5, 7),
    ]
    assert ranks(exits) == [5]


def test_a_worker_killed_on_its_way_out_still_failed_by_itself(worker):
    exits = [
        worker(0, 69, code="RES-PEER", monotonic_seconds=99.0),
        worker(1, -9, seen=NOW + 2, is_killed=True, monotonic_seconds=98.0, exit_code=78),
    ]
    first = find_failures(exits, NOW)[0]
    assert first.exit.command.rank == 1
    assert first.status == 78


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', '{"message": {}}'])
def test_a_torn_error_file_says_nothing(tmp_path, text):
    path = tmp_path / "error.json"
    path.write_text(text, encoding="utf-8")
    assert read_error(path) == WorkerError()


def test_a_missing_error_file_says_nothing(tmp_path):
    assert read_error(tmp_path / "none") == WorkerError()


def test_an_error_file_of_torch_itself_is_understood(tmp_path):
    path = tmp_path / "error.json"
    text = '{"message": {"message": "V: b", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}'
    path.write_text(text, encoding="utf-8")
    assert read_error(path) == WorkerError(message="V: b", traceback="T")
