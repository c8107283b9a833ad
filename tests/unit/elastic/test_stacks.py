"""Stacks of processes that answer, are stopped, or know nothing of us."""

import os
import signal
import subprocess
import sys
import time

import pytest

from resilient.clock import SystemClock
from resilient.elastic.stack_dump import (
    RankStacks,
    collect_stacks,
    describe,
    group_by_stack,
    main_stack,
    state_of,
)

ANSWERS = """
import os, sys, time
os.environ["RESILIENT_NOTES"] = sys.argv[1]
os.environ["LOCAL_RANK"] = sys.argv[2]
from resilient.distributed.heartbeat import progress_reporter
progress_reporter()
def waits_here():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(60)
waits_here()
"""
MUTE = "import sys, time; sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    started = []

    def one(code, local=0):
        command = [sys.executable, "-c", code, str(tmp_path), str(local)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield one
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for_state(pid, state):
    while state_of(pid) != state:
        time.sleep(0.01)


def test_a_stopped_process_and_a_running_one_answer(start, tmp_path):
    pids = {0: start(ANSWERS, 0), 1: start(ANSWERS, 1)}
    os.kill(pids[1], signal.SIGSTOP)
    wait_for_state(pids[1], "T")
    found = collect_stacks(str(tmp_path), pids, {0: 4, 1: 5}, SystemClock())
    assert [one.rank for one in found] == [4, 5]
    assert all(one.is_answered and "in waits_here" in one.stacks for one in found)
    assert "State: T" in found[1].kernel
    assert found[1].innermost.startswith("waits_here (")


class Writing:
    """A clock in whose time a process writes its answer, with pauses between the pieces."""

    def __init__(self, path, pieces):
        self.path = path
        self.pieces = dict(pieces)
        self.polls = 0

    def monotonic_seconds(self):
        return self.polls * 0.02

    def sleep(self, seconds):
        self.polls += 1
        with self.path.open("a") as file:
            file.write(self.pieces.get(self.polls, ""))


OUTERMOST = '  File "a.py", line 9 in <module>\n'
HELPER = 'Thread 0x1 (most recent call first):\n  File "t.py", line 2 in run\n'
MAIN = 'Thread 0x2 (most recent call first):\n  File "a.py", line 3 in wait\n'


@pytest.mark.parametrize(
    ("pieces", "expected", "polls"),
    [
        (
            [(1, HELPER), (20, "\n" + MAIN), (45, '  File "a.py", line 9 in <module>\n')],
            "<module>",
            48,
        ),
        ([(1, HELPER + "\n" + MAIN + "  ...\n")], "wait", 4),
        # A main thread that no script began.
        ([(2, HELPER + "\n" + MAIN)], "wait", 32),
        ([], "", 100),
    ],
)
def test_an_answer_is_waited_for_to_its_end(tmp_path, pieces, expected, polls):
    path = tmp_path / "stacks-0"
    process = subprocess.Popen(["/bin/sleep", "60"])
    # It dies of the question: what it answers is written here.
    path.write_text(f"{process.pid}\n")
    clock = Writing(path, pieces)
    try:
        [found] = collect_stacks(str(tmp_path), {0: process.pid}, {0: 0}, clock)
    finally:
        process.kill()
        process.wait()
    assert found.stacks == "".join(piece for _, piece in pieces).strip()
    assert expected in found.stacks
    assert clock.polls == polls


def test_who_cannot_answer_is_described_and_not_killed_by_being_asked(start, tmp_path):
    pid = start(MUTE)
    began = time.monotonic()
    [found] = collect_stacks(str(tmp_path), {0: pid}, {0: 0}, SystemClock())
    assert not found.is_answered
    wait_for_state(pid, "S")
    assert found.stacks == ""
    assert "no stack: the process has no handler for it" in found.kernel
    assert time.monotonic() - began < 2.0


def test_the_kernel_tells_the_state_of_every_thread(start):
    pid = start(MUTE)
    wait_for_state(pid, "S")
    text = describe(pid)
    assert "State: S (sleeping)" in text
    assert "thread " in text
    assert describe(2**22 + 1) == ""
    assert state_of(2**22 + 1) == ""


def test_ranks_at_the_same_place_are_shown_once():
    place = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f'
    other = 'Current thread 0x2 (most recent call first):\n  File "a.py", line 1 in f'
    stuck = 'Current thread 0x3 (most recent call first):\n  File "a.py", line 9 in g'
    helper = 'Thread 0x9 (most recent call first):\n  File "t.py", line 2 in run\n\n'
    stacks = [
        RankStacks(0, "", helper + place, is_answered=True),
        RankStacks(1, "", stuck, is_answered=True),
        RankStacks(2, "", other, is_answered=True),
    ]
    assert sorted(group_by_stack(stacks)) == [(0, 2), (1,)]
    assert main_stack(helper + place)[0].startswith("Current thread 0x1")
    assert stacks[1].innermost == "g (a.py:9)"
