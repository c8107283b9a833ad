"""Steps that only the keeper's memory holds: which of them is a checkpoint when ranks are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import ConfigError, PeerFailed
from resilient.format.keys import CheckpointId
from resilient.in_memory_steps import start_step_cache
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from resilient.testing.memory_store import run_ranks
from tests.helpers.keepers import begin, names, resumed_from, resumed_weight, weight
from tests.helpers.manifests import Values

HELD_STORE = Path(__file__).parents[1] / "helpers" / "held"
HOLDER = Path(__file__).with_name("dying_holder.py")
SIZE = 300_000


def saved_and_holding(keeper, url, **options):
    """Begin a life that has saved step 1, and holds none yet."""
    checkpointer = begin(keeper, url, **options)
    checkpointer.save(1, weight(1, SIZE), CheckpointInfo())
    checkpointer.wait()
    holding = start_step_cache(checkpointer)
    assert holding is not None
    return checkpointer, holding


def hold(holding, *steps) -> None:
    for step in steps:
        holding.hold(step, weight(step, SIZE), CheckpointInfo(), overlap=False)


def lose(checkpointer, holding) -> None:
    """Release a rank as the kernel does after a kill."""
    holding._client.close()
    checkpointer._persister._connection.close()
    checkpointer._persister._fallback.close()


@pytest.mark.smoke
def test_the_newest_step_that_all_ranks_hold_lands_when_they_are_gone(start, tmp_path):
    keeper = start()

    def rank_main(world, board):
        checkpointer, holding = saved_and_holding(
            keeper, tmp_path / "run", kv_store=board, world=world
        )
        hold(holding, 2, 3, 4, 5)
        if world.rank == 0:
            hold(holding, 6)
        else:
            # This one was lost while it copied step 6.
            holding._client.invalidate(holding._step_count % 2)
        lose(checkpointer, holding)

    run_ranks(2, rank_main)
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 5), 5.0)
    assert keeper.close() == 0
    assert list(keeper.shared.iterdir()) == []


def test_nothing_lands_that_is_older_than_what_is_saved_or_was_given_up(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "old")
    hold(holding, 2)
    checkpointer.save(3, weight(3, SIZE), CheckpointInfo())
    lose(checkpointer, holding)
    assert resumed_weight(keeper, tmp_path / "old")[:2] == (CheckpointId(1, 3), 3.0)
    assert len(committed(open_store(str(tmp_path / "old")))) == 2
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "dropped")
    hold(holding, 2)
    holding.drop()
    lose(checkpointer, holding)
    assert resumed_weight(keeper, tmp_path / "dropped")[:2] == (CheckpointId(1, 1), 1.0)


def test_a_rank_that_is_still_there_when_a_newer_life_comes_is_not_believed(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 1), 1.0)
    lose(checkpointer, holding)
    assert committed(open_store(str(tmp_path / "run"))) == [CheckpointId(1, 1)]


def test_a_rank_that_saves_no_more_and_still_holds_is_not_believed(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    checkpointer._persister._connection.close()
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 1), 1.0)
    lose(checkpointer, holding)
    assert committed(open_store(str(tmp_path / "run"))) == [CheckpointId(1, 1)]


def test_a_rank_that_leaves_while_a_newer_life_comes_is_waited_for(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    # The keeper may hear of the new ranks before it hears of the end of the old ones.
    leaving = threading.Timer(0.2, lose, (checkpointer, holding))
    leaving.start()
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 3), 3.0)
    leaving.join()


def test_a_step_counts_that_a_busy_keeper_reads_only_after_its_rank_has_died(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    keeper.process.send_signal(signal.SIGSTOP)
    began_seconds = time.monotonic()
    hold(holding, 4)
    assert time.monotonic() - began_seconds < 1.0, "nobody waits for a keeper"
    lose(checkpointer, holding)
    keeper.process.send_signal(signal.SIGCONT)
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 4), 4.0)


@pytest.mark.parametrize(
    ("times", "more"),
    [(1, ()), (40, ()), (400, ()), (40, ("5",))],
    ids=["first", "some", "many", "a child of it lives on"],
)
def test_a_rank_that_is_killed_while_it_holds_loses_nothing_that_it_held(
    start, tmp_path, times, more
):
    keeper, run = start(), tmp_path / "run"
    command = [sys.executable, str(HOLDER), str(keeper.path), str(run), *more]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as rank:
        said = [rank.stdout.readline() for _ in range(times)]
        rank.kill()
        held = int([*said, *rank.stdout.read().split()][-1])
    checkpoint, state, _ = resumed_from(keeper, run)
    assert checkpoint.step in (held, held + 1)
    assert set(state["weight"].tolist()) == {float(checkpoint.step)}


@pytest.mark.smoke
def test_what_is_held_lands_though_the_agent_was_killed_before_its_ranks(start, tmp_path):
    keeper = start()
    next_keeper = start("--shared", str(keeper.shared), folder="next")
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    keeper.process.stdin.close()
    time.sleep(0.5)
    leaving = threading.Timer(0.5, lose, (checkpointer, holding))
    leaving.start()
    # The same command was started again at once.
    assert resumed_weight(next_keeper, tmp_path / "run")[:2] == (CheckpointId(1, 3), 3.0)
    leaving.join()
    assert keeper.close() == next_keeper.close() == 0
    assert list(keeper.shared.iterdir()) == []


@pytest.mark.parametrize("bound", [(), ("--auto",)], ids=["the user's", "the machine's"])
def test_a_save_that_needs_the_memory_of_held_steps_gets_it(start, tmp_path, bound):
    one_bytes = 4 * SIZE
    keeper = start("--host-bytes-max", str(3 * one_bytes + 400_000), *bound)
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    worded = {**weight(4, SIZE), "words": Part(Values(words="x" * 900_000))}
    checkpointer.save(4, worded, CheckpointInfo())
    checkpointer.wait()
    with pytest.raises(ConfigError, match="a save needed the memory of cached steps"):
        hold(holding, 5)
    holding.drop()
    checkpointer.save(6, weight(6, 2 * SIZE), CheckpointInfo())
    checkpointer.wait()
    lose(checkpointer, holding)
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 6), 6.0)
    assert "DaemonBypassed" not in names(checkpointer.seen)


def test_what_is_held_stays_where_it_would_not_be_room_enough(start, tmp_path):
    """The memory that is in the way is another rank's."""
    keeper = start("--host-bytes-max", str(16 << 20), "--ranks", "2")
    is_in_the_way, has_ended = threading.Event(), threading.Event()

    def own(world, size_bytes):
        value = torch.ones(size_bytes // 4)
        return {f"own_{world.rank}": Part(Values(weight=value), scope="rank")}

    def rank_main(world, board):
        size_bytes = (1 if world.rank == 0 else 4) << 20
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        checkpointer.save(1, own(world, size_bytes), CheckpointInfo())
        checkpointer.wait()
        holding = start_step_cache(checkpointer)
        for step in (2, 3):
            holding.hold(step, own(world, size_bytes), CheckpointInfo(), overlap=False)
        if world.rank == 0:
            assert is_in_the_way.wait(20)
            with pytest.raises(ConfigError):
                checkpointer.save(4, own(world, 5 << 20), CheckpointInfo())
            has_ended.set()
        else:
            is_in_the_way.set()
        assert has_ended.wait(20)
        lose(checkpointer, holding)

    run_ranks(2, rank_main)
    assert keeper.close() == 0
    assert committed(open_store(str(tmp_path / "run")))[0] == CheckpointId(1, 3)


def test_a_keeper_that_was_killed_is_missed_at_the_next_step(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    keeper.kill()
    with pytest.raises(PeerFailed, match="the saver daemon has ended"):
        hold(holding, 4)
    lose(checkpointer, holding)


def test_a_slot_that_is_being_overwritten_is_not_believed(start, tmp_path):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2, 3)
    holding._client.invalidate((holding._step_count - 1) % 2)
    lose(checkpointer, holding)
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 2), 2.0)


@pytest.mark.parametrize("sizes", [(9, 5), (5, 9, 7), (9, 9, 5, 9), (5, 9, 5, 9, 7, 9)], ids=str)
def test_a_step_lands_as_it_is_laid_out_and_not_as_the_last_in_its_slot(start, tmp_path, sizes):
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    for step, size in enumerate((7, 7, *sizes), start=2):
        holding.hold(step, weight(step, size), CheckpointInfo(), overlap=False)
    lose(checkpointer, holding)
    checkpoint, state, _ = resumed_from(keeper, tmp_path / "run")
    assert checkpoint == CheckpointId(1, len(sizes) + 3)
    assert state["weight"].tolist() == [len(sizes) + 3.0] * sizes[-1]


def test_a_host_whose_keeper_is_gone_ends_the_holding_of_all(start, tmp_path):
    gone = type("Gone", (), {"path": tmp_path / "nobody"})
    checkpointer = begin(gone, tmp_path / "run")
    assert start_step_cache(checkpointer) is None
    assert "StepCacheDisabled" in names(checkpointer.seen)
    checkpointer.close()
    keeper = start("--host-bytes-max", str(4 * SIZE + (1 << 20)))
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "small")
    with pytest.raises(Exception, match="host_bytes_max"):
        hold(holding, 2)
    lose(checkpointer, holding)
    assert resumed_weight(keeper, tmp_path / "small")[0] == CheckpointId(1, 1)


def test_the_newest_save_in_flight_is_waited_for(start, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    gate.mkdir()
    monkeypatch.setenv("HELD_FOLDER", str(gate))
    monkeypatch.setenv("HELD_PREFIX", "checkpoint-3-g1")
    monkeypatch.setenv("PYTHONPATH", f"{HELD_STORE}:{os.environ.get('PYTHONPATH', '')}")
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run")
    hold(holding, 2)
    checkpointer.save(3, weight(3, SIZE), CheckpointInfo())
    lose(checkpointer, holding)
    while not list(gate.glob("held-*")):
        time.sleep(0.01)
    opener = threading.Timer(0.3, (gate / "go").touch)
    opener.start()
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 3), 3.0)
    assert CheckpointId(1, 2) not in committed(open_store(str(tmp_path / "run")))
    opener.join()
