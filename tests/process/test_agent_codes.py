"""Exit codes of `resilient train`, with real agents and real workers."""

import json
import re
import time

import pytest

from tests.helpers.agent_harness import is_alive

SIGKILLED = "os.kill(os.getpid(), signal.SIGKILL)"
FAIL_AT_ONCE = "raise ValueError('boom')"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(7)", 7),
        (FAIL_AT_ONCE, 1),
        (SIGKILLED, 137),
    ],
)
def test_without_restarts_the_workers_own_end_is_the_exit_code(train, script, code):
    agent = train(script, "--max-restarts", "0")
    assert agent.end() == code, agent.err
    assert len(agent.said("pid")) == 1


@pytest.mark.smoke
@pytest.mark.parametrize("code", [75, 78])
def test_a_code_that_a_restart_cannot_help_is_passed_on_at_once(train, code):
    agent = train(f"sys.exit({code})", "--max-restarts", "3")
    assert agent.end() == code, agent.err
    assert len(agent.said("pid")) == 1


@pytest.mark.smoke
def test_an_error_of_the_library_ends_with_its_own_code_and_hint(train):
    agent = train(
        "from resilient.errors import StoreFull\n"
        "raise StoreFull('cannot write `x`: no space left', hint='df -h')",
    )
    assert agent.end() == 73
    assert len(agent.said("pid")) == 1
    assert "hint    df -h" in agent.err


def test_a_preempted_exception_is_no_failure(train):
    agent = train("from resilient.errors import Preempted\nraise Preempted('saved at step 5')")
    assert agent.end() == 75
    assert "saved at step 5" in agent.err
    assert "Traceback" not in agent.err
    assert "failed first" not in agent.err


def test_the_first_75_gives_the_other_ranks_time_to_end(train):
    agent = train(
        "if rank == 0:\n    time.sleep(3)\n    say('saved')\nsys.exit(75)", "--nproc-per-node", "2"
    )
    assert agent.end() == 75, agent.err
    assert agent.said("saved") == [""]


def test_the_first_75_hides_no_failure_of_another_rank(train):
    agent = train(
        "if rank == 0:\n    say('left')\n    sys.exit(75)\n"
        "while not os.path.exists('left.0'):\n    time.sleep(0.01)\n"
        "time.sleep(0.5)\nraise ValueError('rank 1 lost its part')",
        *("--nproc-per-node", "2", "--max-restarts", "0"),
    )
    assert agent.end() == 1, agent.err
    assert "rank 1 failed first in attempt 1: ValueError: rank 1 lost its part" in agent.err


def test_a_rank_that_stays_after_the_first_75_is_killed_and_that_is_the_code(train):
    agent = train(
        "if rank == 0:\n    sys.exit(75)\ntime.sleep(600)",
        *("--nproc-per-node", "2", "--grace", "1"),
    )
    assert agent.end() == 137, agent.err
    assert "had to be killed before they had saved" in agent.err


@pytest.mark.smoke
def test_a_failed_group_is_restarted_until_it_succeeds(train):
    agent = train(f"if life < 3:\n    {FAIL_AT_ONCE}", "--max-restarts", "3")
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 3
    assert "restart as attempt 2, 2 restarts left" in agent.err
    # The second in a row that got nowhere has the next one wait.
    assert re.search(r"restart as attempt 3 in \d\.\d s, 1 restarts left", agent.err)


def test_restarts_are_used_up_and_then_the_code_is_passed_on(train):
    agent = train("sys.exit(9)", "--max-restarts", "1")
    assert agent.end() == 9
    assert len(agent.said("pid")) == 2


@pytest.mark.smoke
def test_lives_without_a_new_checkpoint_end_with_70(train, tmp_path):
    commit = (
        "folder = f'repo/checkpoint-{life}-g1'\n"
        "if life == 2:\n"
        "    os.makedirs(folder)\n"
        "    open(folder + '/manifest.json', 'w').close()\n"
    )
    agent = train(
        "os.makedirs('repo', exist_ok=True)\n" + commit + FAIL_AT_ONCE,
        "--max-restarts",
        "20",
        "--repo",
        "repo",
    )
    assert agent.end() == 70, agent.err
    # Life 1 committed nothing, life 2 did, lives 3 to 5 did not.
    assert len(agent.said("pid")) == 5
    assert "crash loop: 3 attempts in a row" in agent.err
    assert "checkpoint-2-g1 is committed" in agent.err


def test_lives_that_hardly_begin_end_with_70_without_a_repository_too(train):
    agent = train("1 / 0", "--max-restarts", "9")
    assert agent.end() == 70, agent.err
    assert len(agent.said("pid")) == 3
    assert "ZeroDivisionError" in agent.err


def test_without_a_repository_only_the_restarts_limit_lives_that_were_seen_to_train(train):
    agent = train("import resilient\nresilient.heartbeat(1)\nsys.exit(1)", "--max-restarts", "3")
    assert agent.end() == 1, agent.err
    assert len(agent.said("pid")) == 4


@pytest.mark.parametrize(("keeper", "least"), [("auto", 0.2), ("none", 2)])
def test_a_survivor_that_ignores_sigterm_does_not_hold_up_the_restart(train, keeper, least):
    agent = train(
        "if rank == 1 and life == 1:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    say('ready')\n"
        "    time.sleep(600)\n"
        "if life == 1:\n"
        "    while not os.path.exists('ready.1'):\n"
        "        time.sleep(0.01)\n"
        "    say('failed', time.monotonic())\n"
        "    sys.exit(1)\n"
        "say('again', time.monotonic())\n",
        *("--nproc-per-node", "2", "--host-bytes-max", keeper),
    )
    assert agent.end() == 0, agent.err
    took_seconds = float(agent.said("again")[0]) - float(agent.said("failed")[0])
    assert least <= took_seconds < least + 8


def test_a_restart_is_quick_when_the_survivors_obey(train):
    agent = train(
        "if life == 1 and rank == 1:\n    time.sleep(600)\n"
        "if life == 1:\n    say('failed', time.monotonic())\n    sys.exit(1)\n"
        "say('again', time.monotonic())",
        "--nproc-per-node",
        "2",
    )
    assert agent.end() == 0, agent.err
    assert float(agent.said("again")[0]) - float(agent.said("failed")[0]) < 5


def test_what_a_failed_worker_left_behind_is_killed(train):
    agent = train(
        "import subprocess\n"
        "if life == 1:\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    say('pid', child.pid)\n"
        "    say('child', child.pid)\n"
        "    os._exit(1)",
    )
    assert agent.end() == 0, agent.err
    assert not is_alive(int(agent.said("child")[0]))


def test_the_failure_names_the_rank_that_failed_first_and_its_exception(train):
    # Rank 2 fails first and is still on its way out when its peers have ended already.
    agent = train(
        """
if rank == 2:
    import atexit
    atexit.register(lambda: (say("failed"), time.sleep(30)))
    raise ValueError("the first one")
while not os.path.exists("failed.2"):
    time.sleep(0.01)
raise ConnectionError("an echo")
""",
        *("--nproc-per-node", "3", "--max-restarts", "0"),
    )
    assert agent.end() == 1, agent.err
    blocks = [line for line in agent.err.splitlines() if "failed first" in line]
    assert len(blocks) == 1
    assert "rank 2 failed first in attempt 1: ValueError: the first one" in blocks[0]
    assert "    ValueError: the first one" in agent.err
    assert "failed after it" in agent.err


def test_a_killed_rank_is_named_although_its_peer_speaks_up_at_once(train):
    agent = train(
        """
if rank == 0:
    import socket
    server = socket.create_server(("127.0.0.1", 0))
    say("port", server.getsockname()[1])
    server.accept()
    os.kill(os.getpid(), signal.SIGKILL)
import socket
while not os.path.exists("port.0") or not open("port.0").read().endswith("\\n"):
    time.sleep(0.01)
peer = socket.create_connection(("127.0.0.1", int(open("port.0").read())))
peer.recv(1)
raise ConnectionError("the peer is gone")
""",
        *("--nproc-per-node", "2", "--max-restarts", "0"),
    )
    assert agent.end() == 137, agent.err
    assert "rank 0 failed first in attempt 1: SIGKILL" in agent.err
    assert "out-of-memory" in agent.err


def test_events_are_written_as_json_lines(train):
    agent = train("if life == 1:\n    raise ValueError('boom')", "--events", "events")
    assert agent.end() == 0
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["event"] for record in records] == [
        "AgentStarted",
        "WorkerGroupStarted",
        "AttemptEnded",
        "RestartDecisionMade",
        "WorkerFailed",
        "GroupRestarted",
        "WorkerGroupStarted",
        "AttemptEnded",
        "RestartDecisionMade",
        "RunEnded",
    ]
    assert records[3]["action"] == "Restart"
    assert records[4]["error"] == "ValueError: boom"
    assert len({record["run"] for record in records[1:]}) == 1
    assert len({record["agent"] for record in records}) == 1
    assert [records[nth]["attempt"] for nth in (1, 6)] == [
        records[nth]["attempt"] for nth in (2, 7)
    ]
    assert records[1]["attempt"] != records[6]["attempt"]


def test_leftovers_of_a_run_are_removed(train, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    started = time.monotonic()
    agent = train("sys.exit(1)", "--max-restarts", "1", environ={"TMPDIR": str(temporary)})
    assert agent.end() == 1
    assert time.monotonic() - started < 60
    assert list(temporary.iterdir()) == []
