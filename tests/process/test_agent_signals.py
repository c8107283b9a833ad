"""Signals to `resilient train`, its death, and what becomes of its workers."""

import signal
import time

import pytest

from tests.helpers.agent_harness import catches, is_alive, wait_until

SAVES = """
def stop(number, frame):
    say("signal", number)
    time.sleep(0.5)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
say("ready")
while True:
    time.sleep(0.05)
"""
IGNORES = """
signal.signal(signal.SIGTERM, lambda number, frame: say("signal", number))
say("ready")
while True:
    time.sleep(0.05)
"""
OBLIVIOUS = """
say("ready")
time.sleep(600)
"""
TWO = ("--nproc-per-node", "2")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.smoke), signal.SIGINT, signal.SIGHUP],
)
def test_a_stop_is_passed_on_once_and_ends_with_75(train, number):
    agent = train(SAVES, *TWO)
    agent.wait_for("ready", 2)
    agent.send(number)
    assert agent.end() == 75, agent.err
    assert agent.said("signal") == [str(int(signal.SIGTERM))] * 2
    assert len(agent.said("pid")) == 2


def test_a_preemption_notice_saves_instead_of_killing_the_agent(train):
    agent = train(SAVES, *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGUSR1)
    assert agent.end() == 75, agent.err
    assert len(agent.said("signal")) == 2


def test_an_order_after_a_notice_leaves_the_workers_their_grace(train):
    agent = train(SAVES.replace("time.sleep(0.5)", "time.sleep(2)"))
    agent.wait_for("ready", 1)
    agent.send(signal.SIGUSR1)
    agent.wait_for("signal", 1)
    time.sleep(0.8)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err
    assert len(agent.said("signal")) == 1


def test_one_order_that_arrives_twice_is_one_order(train):
    agent = train(SAVES)
    agent.wait_for("ready", 1)
    agent.send(signal.SIGTERM)
    time.sleep(0.05)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err
    assert len(agent.said("signal")) == 1


def test_workers_that_finish_when_asked_to_stop_end_with_0(train):
    agent = train(SAVES.replace("sys.exit(75)", "sys.exit(0)"), *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 0, agent.err


def test_workers_with_nothing_to_save_die_of_sigterm_and_end_with_75(train):
    agent = train(OBLIVIOUS, *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err


@pytest.mark.parametrize("wish", ["auto", "never"])
def test_a_loop_of_ones_own_that_sigterm_kills_has_lost_work_and_says_so(train, wish):
    agent = train(
        """
import torch
from resilient import Checkpointer
model = torch.nn.Linear(2, 2)
with Checkpointer("run", model=model) as checkpointer:
    checkpointer.resume()
    checkpointer.save(20)
    checkpointer.wait()
    say("saved")
    time.sleep(600)
""",
        *("--resume", wish),
    )
    agent.wait_for("saved", 1)
    agent.send(signal.SIGTERM)
    assert agent.end() == 143, agent.err
    again = "the same command" + " without --resume never" * (wish == "never")
    assert f"work since checkpoint-20-g1 is lost; it is intact and {again} resumes" in agent.err
    assert ("--resume never holds until" in agent.err) == (wish == "never")


def test_one_rank_that_saved_speaks_for_those_that_sigterm_killed(train):
    agent = train(f"if rank == 1:\n    say('ready')\n    time.sleep(600)\n{SAVES}", *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err
    assert "stopped and saved" in agent.err


def test_a_save_that_fails_while_stopping_ends_with_its_own_code(train):
    agent = train(SAVES.replace("sys.exit(75)", "sys.exit(73)"), *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 73, agent.err
    assert "failed first" in agent.err


@pytest.mark.smoke
def test_a_worker_that_ignores_the_stop_is_killed_at_the_deadline(train):
    agent = train(IGNORES, "--grace", "1.5")
    agent.wait_for("ready", 1)
    asked = time.monotonic()
    agent.send(signal.SIGTERM)
    assert agent.end() == 143
    assert 1.5 <= time.monotonic() - asked < 10
    assert len(agent.said("signal")) == 1
    assert "last durable checkpoint is intact and the same command resumes" in agent.err
    assert not is_alive(int(agent.said("pid")[0]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_order_leaves_at_once(train, number, code):
    agent = train(IGNORES, "--grace", "120")
    agent.wait_for("ready", 1)
    agent.send(number)
    agent.wait_for("signal", 1)
    time.sleep(0.7)
    asked = time.monotonic()
    agent.send(number)
    assert agent.end() == code
    assert time.monotonic() - asked < 10


def test_a_stop_while_the_group_restarts_leaves_the_restart_to_the_requeue(train):
    agent = train(
        """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("ready")
    time.sleep(600)
while not os.path.exists("ready.1"):
    time.sleep(0.01)
say("failing")
sys.exit(1)
""",
        # Without a keeper survivors have two seconds.
        *(*TWO, "--host-bytes-max", "none"),
    )
    agent.wait_for("failing", 1)
    time.sleep(1)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err
    assert len(agent.said("pid")) == 2
    assert "restart as attempt" not in agent.err


@pytest.mark.parametrize("meet", [(), ("--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:29400")])
def test_a_stop_before_anything_was_begun_ends_with_75(train, meet):
    agent = train(OBLIVIOUS, *meet)
    wait_until(lambda: catches(agent.process.pid, signal.SIGTERM), "the agent listens", agent)
    time.sleep(3 if meet else 0)
    asked = time.monotonic()
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err
    assert time.monotonic() - asked < 15
    assert agent.said("pid") == []


def test_a_stop_while_waiting_for_other_nodes_is_obeyed_at_once(train):
    agent = train(OBLIVIOUS, "--nnodes", "2", "--rdzv-endpoint", "localhost:0")
    wait_until(lambda: catches(agent.process.pid, signal.SIGUSR1), "the agent listens", agent)
    time.sleep(0.5)
    agent.send(signal.SIGTERM)
    asked = time.monotonic()
    assert agent.end() == 75, agent.err
    assert time.monotonic() - asked < 10
    assert agent.said("pid") == []


@pytest.mark.smoke
@pytest.mark.parametrize("script", [OBLIVIOUS, IGNORES])
def test_a_killed_agent_leaves_no_worker_behind(train, script):
    agent = train(script, *TWO)
    agent.wait_for("ready", 2)
    workers = [int(line) for line in agent.said("pid")]
    assert all(is_alive(pid) for pid in workers)
    agent.process.kill()
    agent.process.wait()
    wait_until(lambda: not any(map(is_alive, workers)), "the workers to die", seconds=2)


def test_a_data_loader_of_the_worker_outlives_the_request_to_stop(train):
    agent = train(
        """
import multiprocessing

def load(queue):
    while True:
        queue.put(1)
        time.sleep(0.01)

if __name__ == "__main__":
    queue = multiprocessing.get_context("fork").Queue(2)
    child = multiprocessing.get_context("fork").Process(target=load, args=(queue,), daemon=True)
    child.start()

    def stop(number, frame):
        time.sleep(0.5)
        sys.exit(75 if child.is_alive() else 1)

    signal.signal(signal.SIGTERM, stop)
    say("ready")
    while True:
        queue.get()
""",
    )
    agent.wait_for("ready", 1)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err


def test_an_ignored_hangup_stays_ignored(train, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        agent = train("say('ready')\ntime.sleep(1)\nsys.exit(0)")
    finally:
        signal.signal(signal.SIGHUP, before)
    agent.wait_for("ready", 1)
    agent.send(signal.SIGHUP)
    assert agent.end() == 0, agent.err
