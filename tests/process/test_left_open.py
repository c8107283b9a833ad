"""What a script leaves open is closed when it has ended, and who is told if that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resilient.checkpoint.catalog import committed
from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore

TIERED = """
import sys
import torch
from resilient import Checkpointer

model = torch.nn.Linear(2048, 2048)
opened = Checkpointer(sys.argv[1], near_url=sys.argv[2], model=model)
opened.resume()
opened.save(1)
"""
FAILING = """
import sys
from resilient import exit_hooks
from resilient.errors import SaveFailed

def fail():
    raise SaveFailed("checkpoint-9-g1 was not saved", hint="df -h")

exit_hooks.register_exit_hook(lambda: print("closed"))
exit_hooks.register_exit_hook(fail)
"""
POOLED = """
from concurrent.futures import ThreadPoolExecutor
from resilient import exit_hooks

exit_hooks.register_exit_hook(lambda: ThreadPoolExecutor(1).submit(print, "sent").result())
"""
FORKING = """
import multiprocessing, os, sys
from resilient import exit_hooks

def say():
    sys.stdout.write("closed by its own process" if os.getpid() == mine else "by another, ")

mine = os.getpid()
exit_hooks.register_exit_hook(say)
child = multiprocessing.get_context("fork").Process(target=sys.exit)
child.start()
child.join()
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
"""
THREADED = """
import sys, threading
from resilient import exit_hooks

def train():
    exit_hooks.register_exit_hook(lambda: sys.stdout.write("closed"))
    opened.set()
    main.join()
    sys.stdout.write("trained, ")

main, opened = threading.main_thread(), threading.Event()
threading.Thread(target=train).start()
opened.wait()
"""


def run(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_last_save_is_promoted_and_its_tiers_are_rotated(tmp_path):
    done = run(TIERED, tmp_path / "far", tmp_path / "near")
    assert done.returncode == 0, done.stderr
    assert "RetentionFailed" not in done.stderr
    for tier in ("far", "near"):
        assert committed(LocalStore(tmp_path / tier)) == [CheckpointId(1, 1)], done.stderr


def test_pools_still_take_work_then():
    done = run(POOLED)
    assert (done.stdout, done.stderr) == ("sent\n", "")


def test_a_python_without_that_hook_closes_by_atexit():
    without = "import concurrent.futures.thread, threading\ndel threading._register_atexit\n"
    how = "from resilient import exit_hooks\nexit_hooks.register_exit_hook(lambda: print('closed'))"
    assert run(without + how).stdout == "closed\n"


@pytest.mark.parametrize(("how", "code"), [("", 0), ("sys.exit(5)", 5)])
def test_what_fails_then_is_told_and_the_others_are_closed_all_the_same(how, code):
    done = run(FAILING + how)
    # The interpreter has chosen its code by then: docs/guarantees.md says so.
    assert done.returncode == code
    assert done.stdout == "closed\n"
    assert "checkpoint-9-g1 was not saved  [RES-SAVE-FAILED]\n  hint: df -h\n" in done.stderr
    assert "its exit code does not show it" in done.stderr


def test_a_fork_leaves_what_its_parent_opened():
    assert run(FORKING).stdout == "closed by its own process"


def test_what_a_thread_has_opened_that_still_runs_is_closed_after_it():
    assert run(THREADED).stdout == "trained, closed"


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["", "sys.exit()"])
def test_under_the_agent_it_is_how_the_worker_ends(train, how):
    agent = train(FAILING + how, "--max-restarts", "0")
    assert agent.end() == 73, agent.err
    assert "hint    df -h" in agent.err
    assert "its exit code does not show it" not in agent.err


def test_under_the_agent_a_code_of_its_own_stays(train):
    agent = train(f"{FAILING}sys.exit(5)", "--max-restarts", "0")
    assert agent.end() == 5, agent.err
