"""State that is larger than the keeper's memory goes through it in pieces, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.daemon import connection
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import ConfigError, SaveFailed
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import run_ranks
from tests.helpers.keepers import begin, names, resumed_from
from tests.helpers.manifests import Values

TRAINER = Path(__file__).with_name("streaming_trainer.py")


MIB = 1 << 20


# A state of 48 MiB becomes three files of 16 MiB.
FILE_BYTES = 16 * MIB


BOUND_BYTES = 34 * MIB


def state(seed, mib=48):
    """Return a model of so many MiB whose every byte depends on the seed."""
    made = torch.Generator().manual_seed(seed)
    piece = (mib * MIB // 4 // 12,)
    return {
        f"layer{number}": torch.randint(0, 1 << 30, piece, generator=made, dtype=torch.int32)
        for number in range(12)
    }


def parts_of(tensors):
    return {"model": Part(Values(**tensors))}


def is_same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


class Watch(threading.Thread):
    """Notes the most shared memory that files in a folder ever took together."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.most_bytes, self.is_over = folder, 0, threading.Event()

    def run(self):
        while not self.is_over.wait(0.002):
            self.most_bytes = max(self.most_bytes, _taken_bytes(self.folder))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.join()


def _taken_bytes(folder):
    total = 0
    for path in folder.glob("*/0*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize("limits", [{}, {"parity": 1}], ids=["plain", "parity"])
def test_state_larger_than_the_bound_is_streamed_within_it_and_comes_back_whole(
    start, tmp_path, limits
):
    keeper = start("--host-bytes-max", str(BOUND_BYTES))
    checkpointer = begin(keeper, tmp_path / "run", **limits)
    with Watch(keeper.shared) as watch:
        for step in (1, 2):
            checkpointer.save(step, parts_of(state(step)), CheckpointInfo(), overlap=step == 2)
            # It waited: what is streamed is durable when save() returns.
            assert checkpointer.committed()[0] == CheckpointId(1, step)
        checkpointer.close()
    assert 2 * FILE_BYTES <= watch.most_bytes <= BOUND_BYTES
    assert "DaemonBypassed" not in names(checkpointer.seen)
    found, tensors, _ = resumed_from(keeper, tmp_path / "run")
    assert found == CheckpointId(1, 2)
    assert is_same(tensors, state(2))
    assert keeper.close() == 0
    assert list(keeper.shared.iterdir()) == []


def test_one_slot_is_enough(start, tmp_path):
    keeper = start("--host-bytes-max", str(20 * MIB))
    checkpointer = begin(keeper, tmp_path / "run", parity=1)
    checkpointer.save(1, parts_of(state(1)), CheckpointInfo())
    checkpointer.close()
    assert is_same(resumed_from(keeper, tmp_path / "run")[1], state(1))


def test_state_that_grows_past_the_bound_and_shrinks_again_is_saved_each_time(start, tmp_path):
    keeper = start("--host-bytes-max", str(BOUND_BYTES))
    checkpointer = begin(keeper, tmp_path / "run")
    with Watch(keeper.shared) as watch:
        for step, mib in enumerate((32, 48, 16, 33), 1):
            checkpointer.save(step, parts_of(state(step, mib)), CheckpointInfo())
        checkpointer.close()
    assert watch.most_bytes <= BOUND_BYTES
    assert [one.step for one in checkpointer.committed()] == [4, 3, 2, 1]
    assert "DaemonBypassed" not in names(checkpointer.seen)
    assert is_same(resumed_from(keeper, tmp_path / "run")[1], state(4, 33))


def test_a_file_larger_than_a_ranks_share_is_refused_on_all_ranks_with_the_numbers(start, tmp_path):
    keeper = start("--host-bytes-max", str(2 * BOUND_BYTES), "--ranks", "2")

    def rank_main(world, board):
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        # What belongs to one rank alone is one file.
        own = Values(whole=torch.zeros((40 if world.rank else 1) * MIB, dtype=torch.int8))
        with pytest.raises(ConfigError, match=f"needs at least .* allows {2 * BOUND_BYTES}"):
            checkpointer.save(1, {"own": Part(own, "rank")}, CheckpointInfo())
        checkpointer.close()
        return checkpointer.committed()

    with Watch(keeper.shared) as watch:
        assert run_ranks(2, rank_main) == [[], []]
    assert watch.most_bytes <= 2 * BOUND_BYTES


def test_a_rank_that_has_room_waits_for_one_that_has_not(start, tmp_path):
    keeper = start("--host-bytes-max", str(2 * BOUND_BYTES), "--ranks", "2")

    def rank_main(world, board):
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        parts = {
            f"own{number}": Part(Values(whole=torch.ones(mib * MIB, dtype=torch.int8)), "rank")
            for number, mib in enumerate((16, 16, 16) if world.rank else (1, 1, 1))
        }
        checkpointer.save(1, parts, CheckpointInfo())
        is_durable = CheckpointId(1, 1) in checkpointer.committed()
        checkpointer.close()
        return is_durable, "DaemonBypassed" in names(checkpointer.seen)

    with Watch(keeper.shared) as watch:
        assert run_ranks(2, rank_main) == [(True, False)] * 2
    assert watch.most_bytes <= 2 * BOUND_BYTES


def test_two_ranks_stream_at_once(start, tmp_path):
    keeper = start("--host-bytes-max", str(2 * 20 * MIB), "--ranks", "2")

    def rank_main(world, board):
        checkpointer = begin(keeper, tmp_path / "run", kv_store=board, world=world)
        checkpointer.save(1, parts_of(state(5, 72)), CheckpointInfo())
        is_durable = CheckpointId(1, 1) in checkpointer.committed()
        checkpointer.close()
        return is_durable, "DaemonBypassed" in names(checkpointer.seen)

    with Watch(keeper.shared) as watch:
        assert run_ranks(2, rank_main) == [(True, False)] * 2
    assert watch.most_bytes <= 40 * MIB
    assert is_same(resumed_from(keeper, tmp_path / "run")[1], state(5, 72))


@pytest.mark.smoke
def test_what_is_streamed_is_of_one_moment(start, tmp_path, monkeypatch):
    """Training cannot go on before the last byte was copied, however late that is asked for."""
    keeper = start("--host-bytes-max", str(BOUND_BYTES))
    url = tmp_path / "run"
    checkpointer = begin(keeper, url)
    tensors = state(1)
    expected = {name: one.clone() for name, one in tensors.items()}
    for step in (1, 2, 3):
        checkpointer.save(step, parts_of(tensors), CheckpointInfo())
        for name, one in tensors.items():
            one.add_(1)
            expected[name].add_(step < 3)
    checkpointer.close()
    assert is_same(resumed_from(keeper, url)[1], expected)


def test_a_keeper_that_dies_in_mid_stream_costs_nothing(start, tmp_path, monkeypatch):
    keeper = start("--host-bytes-max", str(BOUND_BYTES))
    checkpointer = begin(keeper, tmp_path / "run")
    copy, count = connection._fill, []

    def copy_and_kill(file, slot):
        copy(file, slot)
        count.append(file.name)
        if len(count) == 2:
            keeper.process.kill()
            keeper.process.wait()

    monkeypatch.setattr(connection, "_fill", copy_and_kill)
    checkpointer.save(1, parts_of(state(1)), CheckpointInfo())
    assert checkpointer.committed() == [CheckpointId(1, 1)]
    checkpointer.close()
    assert len(count) == 2
    assert "DaemonBypassed" in names(checkpointer.seen)
    keeper.close()
    again = start(folder="again")
    assert is_same(resumed_from(again, tmp_path / "run")[1], state(1))


def test_a_file_that_cannot_be_copied_fails_the_save_and_the_next_one_lands(
    start, tmp_path, monkeypatch
):
    keeper = start("--host-bytes-max", str(BOUND_BYTES))
    checkpointer = begin(keeper, tmp_path / "run", within_seconds=20)
    copy = connection._fill

    def broken(file, slot):
        raise SaveFailed("the device is gone")

    monkeypatch.setattr(connection, "_fill", broken)
    began_seconds = time.monotonic()
    checkpointer.save(1, parts_of(state(1)), CheckpointInfo())
    with pytest.raises(SaveFailed, match="the device is gone"):
        checkpointer.wait()
    assert time.monotonic() - began_seconds < 15
    monkeypatch.setattr(connection, "_fill", copy)
    checkpointer.save(2, parts_of(state(2)), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 2)]


@pytest.mark.smoke
def test_a_trainer_killed_in_mid_stream_costs_that_save_and_nothing_else(
    start, tmp_path, monkeypatch
):
    keeper = start("--host-bytes-max", str(BOUND_BYTES))
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(TRAINER), str(keeper.path), str(run)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found, tensors, _ = resumed_from(keeper, run)
    assert found == CheckpointId(1, 1)
    assert is_same(tensors, state(1))
    left = [path.parent.name for path in run.glob("checkpoint-*/manifest.json")]
    assert left == ["checkpoint-1-g1"]
    assert keeper.close() == 0
    assert list(keeper.shared.iterdir()) == []
