"""Workers of a later life are forked from a process that has imported what the first one did."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.agent_harness import is_alive, wait_until
from tests.process import forked

# Life 1 imports, and waits for the word; what each test looks at comes after it.
WAITS = """
import numpy

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

say("ready")
wait_for(f"go{life}")
"""
TELL = """
import json, subprocess, threading
names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGUSR1")
say("start", json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "spec": getattr(__spec__, "name", None),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "flags": repr(sys.flags),
    "env": dict(os.environ),
    "child": subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines(),
    "cwd": os.getcwd(),
    "umask": os.umask(0o22),
    "signals": [str(signal.getsignal(getattr(signal, name))) for name in names],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leads": [os.getpid() == os.getsid(0) == os.getpgrp(), os.getppid()],
    # Not those of libraries: they end before a fork, and come back with the first sum.
    "threads": [threading.current_thread().name, threading.active_count()],
    "streams": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)],
    "buffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding],
    "comm": open("/proc/self/comm").read(),
    "open": len(os.listdir("/proc/self/fd")),
}))
print("out of life", life)
print("err of life", life, file=sys.stderr)
"""
# These name the life, and are meant to differ.
OF_A_LIFE = ("MASTER_PORT", "RESILIENT_ATTEMPT", "RESILIENT_CAUSE", "TORCHELASTIC_RESTART_COUNT")
OF_A_LIFE += ("TORCHELASTIC_ERROR_FILE",)
EVENTS = ("--events", "events")


@pytest.fixture(autouse=True)
def first_workers_are_cold(monkeypatch):
    """Start the first workers afresh: the fork server learns from what they import."""
    monkeypatch.setattr(forked, "PLAIN", True)


def lives(agent):
    """Return of each life whether its workers were warm."""
    text = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8")
    facts = [json.loads(line) for line in text.splitlines()]
    return [one["is_warm"] for one in facts if one["event"] == "WorkerGroupStarted"]


def nursery_of(agent):
    """Return the process that workers can be forked from, once there is one."""
    pids = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()
    warm = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "resilient-warm\n"]
    return int(warm[0]) if warm else 0


def wait_until_warm(agent):
    wait_until(lambda: nursery_of(agent), "workers can be forked", agent)
    return nursery_of(agent)


def go(agent, life):
    (agent.folder / f"go{life}").touch()


@pytest.mark.parametrize("module", [(), ("-m",)])
def test_a_warm_worker_finds_what_a_cold_one_finds(train, module):
    fails = TELL + "if life == 1:\n    sys.exit(1)\n"
    agent = train(WAITS + fails, *EVENTS, *module, arguments=("--x", "y z", ""))
    wait_until_warm(agent)
    go(agent, 1)
    go(agent, 2)
    assert agent.end() == 0, agent.err
    assert lives(agent) == [False, True]
    cold, warm = map(json.loads, agent.said("start"))
    for one in (cold, warm):
        one["child"] = sorted(line for line in one["child"] if not line.startswith(OF_A_LIFE))
        one["env"] = {name: one["env"][name] for name in one["env"] if name not in OF_A_LIFE}
    assert warm == cold
    assert agent.out.count("out of life") == 2
    assert agent.err.count("err of life") == 2


def test_random_numbers_differ_between_ranks_as_in_cold_workers(train):
    draws = "import random\nsay('drawn', [random.random(), float(numpy.random.rand())])\n"
    # NumPy loads its generators when they are first asked for: here the nursery has them.
    script = "import numpy.random\n" + WAITS + draws + "if life == 1:\n    sys.exit(1)\n"
    agent = train(script, *EVENTS, "--nproc-per-node", "2")
    wait_until_warm(agent)
    go(agent, 1)
    go(agent, 2)
    assert agent.end() == 0, agent.err
    assert lives(agent) == [False, True]
    draws = [json.loads(line) for line in agent.said("drawn")]
    assert len({one for one, _ in draws}) == len(draws) == len({other for _, other in draws})


@pytest.mark.parametrize(("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_warm_workers_end_is_told_as_it_was(train, how, code):
    script = WAITS + f"if life == 1:\n    sys.exit(1)\n{how}\n"
    agent = train(script, *EVENTS, "--max-restarts", "1")
    wait_until_warm(agent)
    go(agent, 1)
    go(agent, 2)
    assert agent.end() == code, agent.err
    assert lives(agent) == [False, True]


def test_a_dead_nursery_means_a_cold_start_and_is_replaced(train):
    agent = train(
        WAITS + "sys.exit(1 if life < 4 else 0)\n",
        *EVENTS,
        *("--nproc-per-node", "2", "--max-restarts", "3", "--max-no-progress", "0"),
    )
    first = wait_until_warm(agent)
    # Stopped, it does not answer, and the agent ends it.
    os.kill(first, signal.SIGSTOP)
    go(agent, 1)
    agent.wait_for("ready", 4)
    assert lives(agent) == [False, False]
    assert "workers are started without the fork server" in agent.err
    second = wait_until_warm(agent)
    assert second != first
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: nursery_of(agent) not in (0, second), "a third", agent)
    for life in (2, 3, 4):
        go(agent, life)
    assert agent.end() == 0, agent.err
    # A process that does not answer within 2 s, as on a busy machine, costs one more cold start.
    assert lives(agent)[:2] == [False, False]
    assert True in lives(agent)[2:], agent.err
    assert len(agent.said("pid")) == 8


def test_variables_that_the_program_sets_before_it_imports_have_their_effect(train):
    script = """
os.environ["OMP_NUM_THREADS"] = {1: "2", 2: "2", 3: "1"}[life]
say("began", life)
import torch
say("threads", f"{life} {torch.get_num_threads()}")
say("ready")
while not os.path.exists(f"go{life}"):
    time.sleep(0.01)
sys.exit(1 if life < 3 else 0)
"""
    agent = train(script, *EVENTS, environ={"OMP_NUM_THREADS": "1"})
    wait_until_warm(agent)
    for life in (1, 2, 3):
        go(agent, life)
    assert agent.end() == 0, agent.err
    assert agent.said("threads") == ["1 2", "2 2", "3 1"]
    assert lives(agent) == [False, True, True]
    # The last one found out at its import, and began again without what was imported for it.
    assert agent.said("began") == ["1", "2", "3", "3"]
    assert len(set(agent.said("pid"))) == 3


def test_a_killed_agent_leaves_no_warm_worker_and_no_nursery(train):
    agent = train(
        WAITS + "if life == 1:\n    sys.exit(1)\ntime.sleep(600)\n",
        *EVENTS,
        *("--nproc-per-node", "2"),
    )
    nursery = wait_until_warm(agent)
    go(agent, 1)
    agent.wait_for("ready", 4)
    assert lives(agent) == [False, True]
    workers = [int(line) for line in agent.said("pid")][-2:]
    agent.process.kill()
    agent.process.wait()
    gone = [*workers, nursery]
    wait_until(lambda: not any(map(is_alive, gone)), "all to die", seconds=5)


def test_nothing_is_imported_ahead_when_told_not_to(train):
    agent = train(WAITS + "sys.exit(1 if life == 1 else 0)\n", *EVENTS, "--no-warm")
    agent.wait_for("ready", 1)
    go(agent, 1)
    go(agent, 2)
    assert agent.end() == 0, agent.err
    assert lives(agent) == [False, False]
