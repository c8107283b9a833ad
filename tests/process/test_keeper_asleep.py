"""A keeper that sleeps (SIGSTOP, swapping): others persist in its place, and it may wake."""

from __future__ import annotations

import signal
import time

import pytest

from resilient.checkpoint.daemon.client import DaemonProcess
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import run_ranks
from tests.helpers.keepers import begin, resumed_weight, weight


@pytest.fixture(params=[True, False])
def can_be_killed(request, monkeypatch):
    """Whether its rank may kill it: not where it is another user's, or in state D."""
    if not request.param:
        monkeypatch.setattr(DaemonProcess, "end", lambda _: False)
    return request.param


@pytest.mark.parametrize("asleep", [0, 1])
@pytest.mark.parametrize("before", ["the save", "the commit"])
def test_a_hosts_keeper_that_sleeps_is_not_waited_for_by_a_stop(
    start, gate, tmp_path, asleep, before, can_be_killed
):
    keepers = [start(folder="host-0"), start(folder="host-1")]
    for one in keepers:
        one.left_seconds = lambda: 12.0

    def rank_main(world, board):
        mine = keepers[world.rank]
        checkpointer = begin(mine, tmp_path / "run", kv_store=board, world=world, within_seconds=60)
        if before == "the save" and world.rank == asleep:
            mine.process.send_signal(signal.SIGSTOP)
        (gate / "go").touch() if before == "the save" else None
        checkpointer.save(1, weight(7, 300_000), CheckpointInfo())
        if before == "the commit" and world.rank == asleep:
            while len(list(gate.glob("held-*"))) < 2:
                time.sleep(0.01)
            mine.process.send_signal(signal.SIGSTOP)
            (gate / "go").touch()
        began = time.monotonic()
        checkpointer.wait()
        took = time.monotonic() - began
        checkpointer.close()
        return took < 12, checkpointer.committed()

    try:
        assert run_ranks(2, rank_main) == [(True, [CheckpointId(1, 1)])] * 2
    finally:
        keepers[asleep].process.send_signal(signal.SIGCONT)
    if before == "the commit":
        # One that sleeps before it is handed anything is only passed over.
        assert (keepers[asleep].process.poll() is not None) == can_be_killed
    assert resumed_weight(start(folder="other"), tmp_path / "run")[:2] == (CheckpointId(1, 1), 7.0)


def slept(start, gate, run, **options):
    """Return a checkpointer whose keeper sleeps while it writes step 2, and that keeper."""
    keeper = start()
    keeper.left_seconds = lambda: 6.0
    checkpointer = begin(keeper, run, **options)
    checkpointer.save(1, weight(1, 300_000), CheckpointInfo())
    checkpointer.wait()
    checkpointer.save(2, weight(2, 300_000), CheckpointInfo(), keep=(CheckpointId(1, 1),))
    wait_until(lambda: list(gate.glob("held-*")))
    keeper.process.send_signal(signal.SIGSTOP)
    checkpointer.wait()
    return checkpointer, keeper


def wait_until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def second_gate(gate, monkeypatch):
    """Hold what is written of step 2 alone."""
    monkeypatch.setenv("HELD_PREFIX", "checkpoint-2-g1")
    return gate


@pytest.mark.smoke
def test_a_keeper_that_wakes_after_later_saves_deletes_none_of_them(
    start, second_gate, tmp_path, can_be_killed
):
    retention = Retention(keep_last=1)
    checkpointer, keeper = slept(start, second_gate, tmp_path / "run", retention=retention)
    best = CheckpointId(1, 3)
    for step in (3, 4):
        checkpointer.save(step, weight(step, 300_000), CheckpointInfo(), keep=(best,))
        checkpointer.wait()
    (second_gate / "go").touch()
    keeper.process.send_signal(signal.SIGCONT)
    if can_be_killed:
        assert keeper.process.wait(20) == -signal.SIGKILL
    else:
        # It puts its own once more, and lets the others be.
        wait_until(lambda: CheckpointId(1, 2) in checkpointer.committed())
        assert keeper.close() == 0
    checkpointer.close()
    assert {best, CheckpointId(1, 4)} <= set(checkpointer.committed())
