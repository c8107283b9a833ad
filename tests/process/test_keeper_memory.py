"""The keeper's shared memory: too little of it, whose it is, and what is read from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.elastic.options import DaemonOptions
from resilient.elastic.saver_daemon import DaemonSupervisor
from resilient.errors import ConfigError, SaveFailed
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore
from tests.helpers.keepers import begin, names, resumed_weight, weight


def test_too_little_memory_is_refused_with_the_numbers_and_nothing_is_saved(start, tmp_path):
    keeper = start("--host-bytes-max", "30000")
    checkpointer = begin(keeper, tmp_path / "run")
    checkpointer.save(1, weight(1, 5000), CheckpointInfo())
    checkpointer.wait()
    with pytest.raises(ConfigError, match=r"needs at least \d+ .* host_bytes_max allows 30000"):
        checkpointer.save(2, weight(2, 50_000), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 1)]


def test_a_full_shared_memory_is_worked_around_and_said(start, tmp_path, small_disk):
    keeper = start("--shared", str(small_disk(1 << 20)))
    checkpointer = begin(keeper, tmp_path / "run")
    checkpointer.save(1, weight(1, 500_000), CheckpointInfo())
    checkpointer.save(2, weight(2, 1000), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 2), CheckpointId(1, 1)]
    assert names(checkpointer.seen).count("DaemonBypassed") >= 1
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 2), 2.0)


def test_a_save_that_the_keeper_could_not_write_leaves_nothing_on_the_disk(start, tmp_path):
    """On a full disk what it leaves would be in the way of the next save."""
    checkpointer = begin(start(), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-1-g1"
    (folder / "state.json" / "in the way").mkdir(parents=True)
    checkpointer.save(1, weight(1, 500_000), CheckpointInfo())
    with pytest.raises(SaveFailed):
        checkpointer.wait()
    assert [one.name for one in folder.iterdir()] == ["state.json"]
    checkpointer.save(2, weight(2, 500_000), CheckpointInfo())
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 2)]
    assert "DaemonBypassed" not in names(checkpointer.seen)


def test_memory_is_used_again_and_never_by_two_lives(start, tmp_path):
    keeper = start()
    shared = set()
    for life in (1, 2):
        checkpointer = begin(keeper, tmp_path / "run", scope=f"life-{life}")
        mine = set()
        for step in (1, 2, 3):
            checkpointer.save(step, weight(step), CheckpointInfo())
            mine.add(tuple(sorted(path.name for path in keeper.shared.glob("*/0*"))))
        checkpointer.close()
        assert len(mine) == 1
        (files,) = mine
        assert not shared & set(files)
        shared |= set(files)


@pytest.mark.smoke
def test_a_restore_from_memory_reads_nothing_and_damaged_memory_is_not_believed(
    start, tmp_path, monkeypatch
):
    keeper = start()
    url = tmp_path / "run"
    checkpointer = begin(keeper, url)
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.close()
    reads = []
    get = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key: [reads.append(key), get(self, key)][1])
    assert resumed_weight(keeper, url, "second")[:2] == (CheckpointId(1, 1), 1.0)
    assert not [key for key in reads if key.endswith(".safetensors")]
    for path in keeper.shared.glob("*/0*"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\xa5")
    checkpoint, value, seen = resumed_weight(keeper, url, "third")
    assert (checkpoint, value) == (CheckpointId(1, 1), 1.0)
    assert [key for key in reads if key.endswith(".safetensors")]
    assert "MemoryCopyRejected" in names(seen)


def test_stale_memory_of_a_killed_keeper_is_removed_by_the_next(start, tmp_path):
    first = start()
    checkpointer = begin(first, tmp_path / "run")
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.wait()
    first.kill()
    stale = list(first.shared.iterdir())
    assert stale
    second = start()
    assert not any(path.exists() for path in stale)
    checkpointer.close()
    assert resumed_weight(second, tmp_path / "run")[:2] == (CheckpointId(1, 1), 1.0)


def test_a_host_without_shared_memory_is_told_in_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "resilient.checkpoint.daemon.server",
        "--socket",
        str(tmp_path / "k"),
    ]
    done = subprocess.run(
        [*command, "--shared", str(tmp_path / "missing")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot make shared memory" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_a_keeper_that_cannot_start_is_told_once_and_not_tried_again(tmp_path):
    said = []
    emit = Emitter(SystemClock(), (lambda _, event: said.append(event.message()),))
    keeping = DaemonSupervisor(tmp_path, DaemonOptions(1 << 20), 1.0, emit)
    keeping._argv += ["--shared", str(tmp_path / "missing")]
    for _ in range(2):
        keeping.start()
        keeping.ready()
    assert (keeping.path, keeping.pid) == ("", 0)
    assert len(said) == 1
    assert "the trainers save by themselves: cannot make shared memory" in said[0]
    keeping.stop()
