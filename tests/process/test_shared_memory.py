"""Shared memory: owned through a lock, swept when the owner is dead, never before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.errors import StoreDenied, StoreFull
from resilient.storage.shared_memory import SharedFolder, map_file, sweep

OWN = """
import sys
from pathlib import Path
from resilient.storage.shared_memory import SharedFolder
folder = SharedFolder(Path(sys.argv[1]))
folder.allocate(100)
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Start a process that owns a folder below ``tmp_path``."""
    command = [sys.executable, "-c", OWN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.said = process.stdout.readline().decode().strip()
        yield process
        process.kill()


def test_what_one_process_writes_another_mapping_reads(tmp_path):
    folder = SharedFolder(tmp_path)
    path = folder.allocate(10)
    written = map_file(path, 10, writable=True)
    written[:] = b"0123456789"
    assert bytes(map_file(path, 10, writable=False)) == b"0123456789"
    folder.free(path)
    assert bytes(written) == b"0123456789"
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_no_bytes_is_no_special_case(tmp_path):
    folder = SharedFolder(tmp_path)
    assert bytes(map_file(folder.allocate(0), 0, writable=True)) == b""
    folder.close()


def test_a_live_owners_folder_is_not_swept(tmp_path, owner):
    assert sweep(tmp_path) == []
    assert os.listdir(owner.said)  # noqa: PTH208


def test_a_dead_owners_folder_is_swept_and_nothing_else(tmp_path, owner):
    mine = SharedFolder(tmp_path)
    (tmp_path / "resilient-of-somebody").write_text("a file")
    (tmp_path / "other").mkdir()
    (tmp_path / "resilient-link").symlink_to(tmp_path / "other")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert [str(path) for path in sweep(tmp_path)] == [owner.said]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"resilient-of-somebody", "other", "resilient-link", mine.path.name}
    mine.close()


def test_a_pid_that_somebody_else_has_by_now_neither_saves_nor_dooms_a_folder(tmp_path, owner):
    """A stale folder may carry the pid of a process that lives, and a live one that of none."""
    stale = tmp_path / f"resilient-{os.getpid()}-0badcafe"
    stale.mkdir()
    (stale / "owner.json").write_text(json.dumps({"pid": os.getpid(), "started_ticks": 1}))
    (stale / "000001").write_bytes(b"bytes of a dead run")
    Path(owner.said, "owner.json").write_text(json.dumps({"pid": 4194304, "started_ticks": 1}))
    assert sweep(tmp_path) == [stale]
    assert Path(owner.said, "000001").exists()


@pytest.mark.parametrize("name", ["resilient-near", "resilient-7-0badcafe", "resilient-7"])
def test_a_repository_in_memory_is_not_swept_whatever_it_is_called(tmp_path, name):
    """ADR 0017 puts a near tier into /dev/shm; it outlives its agent, which is what it is for."""
    file = tmp_path / name / "checkpoint-10-g1" / "manifest.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    (tmp_path / name / "owner.json").write_text(json.dumps({"pid": 8}))

    assert sweep(tmp_path) == []
    assert file.exists()


@pytest.mark.parametrize("written", [None, "", '{"pid"'])
def test_an_owner_that_was_killed_as_it_began_leaves_nothing(tmp_path, written):
    stale = tmp_path / "resilient-7-0badcafe"
    stale.mkdir()
    if written is not None:
        (stale / "owner.json").write_text(written)

    assert sweep(tmp_path) == [stale]


def test_what_another_user_left_is_not_touched(tmp_path, monkeypatch):
    stale = tmp_path / "resilient-1-0badcafe"
    stale.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: stale.stat().st_uid + 1)
    assert sweep(tmp_path) == []
    assert stale.exists()


def test_the_owner_is_recorded_for_people(tmp_path):
    folder = SharedFolder(tmp_path)
    assert json.loads((folder.path / "owner.json").read_text())["pid"] == os.getpid()
    folder.close()


def test_memory_that_is_not_there_is_refused_with_the_numbers(tmp_path, small_disk):
    folder = SharedFolder(small_disk(1 << 20))
    with pytest.raises(StoreFull, match=r"no 2097152 bytes left \(\d+ are free\)"):
        folder.allocate(2 << 20)
    folder.allocate(1 << 18)
    folder.close()


def test_a_place_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StoreDenied, match="cannot make shared memory"):
        SharedFolder(tmp_path / "missing")
