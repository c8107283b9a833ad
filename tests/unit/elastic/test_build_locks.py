"""Build locks of dead processes are removed, those of live processes stay."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.clock import SystemClock
from resilient.elastic.attempt_monitor import awaited_locks
from resilient.elastic.stack_dump import RankStacks
from resilient.elastic.workers.build_locks import (
    BuildLockLeft,
    BuildLockRemoved,
    find_locks,
    held_files,
    remove_dead_locks,
    why_unsafe,
)

# `file_baton.py` alone: torch itself takes seconds to import.
HOLDS = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("file_baton", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.FileBaton(sys.argv[2]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""
MOUNTS = """\
27 1 254:0 / / rw - ext4 /dev/vda rw
30 27 0:40 / /home rw shared:7 - nfs4 server:/home rw
31 27 0:41 / /data\\040one rw - xfs /dev/vdb rw
32 30 0:42 / /home/scratch rw - tmpfs tmpfs rw
"""


@pytest.fixture
def cache(tmp_path):
    """Environment of a job with an extension cache of its own."""
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


@pytest.fixture
def hold(tmp_path):
    """Start processes that hold a baton of torch; all are killed at the end."""
    import torch.utils.file_baton as baton

    started = []

    def start(name="fused_adam"):
        folder = tmp_path / "extensions" / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLDS, baton.__file__, str(folder / "lock")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1], folder / "lock"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def removed(cache):
    told = []
    remove_dead_locks(cache, SystemClock(), told.append)
    return told


def test_lock_of_a_killed_builder_is_removed(hold, cache):
    builder, lock = hold()
    builder.kill()
    builder.wait()
    assert find_locks(cache) == [lock]
    (told,) = removed(cache)
    assert isinstance(told, BuildLockRemoved)
    assert str(lock) in told.message()
    assert not lock.exists()
    assert removed(cache) == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_lock_of_a_live_builder_stays(hold, cache, is_stopped):
    builder, lock = hold()
    if is_stopped:
        builder.send_signal(signal.SIGSTOP)
    assert removed(cache) == []
    assert lock.exists()


def test_lock_with_a_live_compiler_stays_and_is_reported(hold, cache):
    builder, lock = hold()
    builder.kill()
    builder.wait()
    compiler = subprocess.Popen(["sleep", "600"], cwd=lock.parent)
    try:
        (told,) = removed(cache)
    finally:
        compiler.kill()
        compiler.wait()
    assert isinstance(told, BuildLockLeft)
    assert f"process {compiler.pid} (sleep) works in that folder" in told.message()
    assert f"rm {lock}" in told.message()
    assert lock.exists()
    assert isinstance(removed(cache)[0], BuildLockRemoved)


@pytest.mark.parametrize("content", ["", "4711\n"])
def test_file_that_torch_did_not_create_stays(cache, content):
    lock = Path(cache["TORCH_EXTENSIONS_DIR"], "other", "lock")
    lock.parent.mkdir(parents=True)
    lock.write_text(content)
    lock.chmod(0o755 if content else 0o644)
    assert find_locks(cache) == removed(cache) == []
    assert lock.exists()


def test_folder_that_another_agent_looks_at_is_skipped(hold, cache):
    builder, lock = hold()
    builder.kill()
    builder.wait()
    handle = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert removed(cache) == []
    finally:
        os.close(handle)
    assert lock.exists()


def test_default_cache_of_torch_is_searched(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(cpp_extension._get_build_directory("op", verbose=False))
    os.close(os.open(folder / "lock", os.O_CREAT | os.O_EXCL))
    assert find_locks(os.environ) == [folder / "lock"]


@pytest.mark.parametrize(
    ("folder", "sees_all", "why"),
    [
        ("/root/cache", True, ""),
        ("/data one/cache", True, ""),
        ("/home/scratch/cache", True, ""),
        ("/home/me/cache", True, "other hosts may use its file system (nfs4)"),
        ("/root/cache", False, "processes outside this container may use that folder"),
    ],
)
def test_unsafe_folder_is_named_by_its_mount(folder, sees_all, why):
    assert why_unsafe(folder, MOUNTS, sees_all=sees_all) == why


def test_container_root_is_safe_and_its_volumes_are_not():
    mounts = "1 0 0:50 / / rw - overlay overlay rw\n2 1 8:1 / /data rw - ext4 /dev/sda rw\n"
    assert why_unsafe("/root/.cache/x", mounts, sees_all=False) == ""
    assert "outside this container" in why_unsafe("/data/x", mounts, sees_all=False)
    assert "(unknown)" in why_unsafe("/data/x", "", sees_all=True)


def stack(file, function):
    lines = [
        "Current thread 0x1 (most recent call first):",
        f'  File "{file}", line 7 in {function}',
    ]
    return RankStacks(0, "", "\n".join(lines), is_answered=True)


def test_wait_for_a_build_lock_names_the_lock_and_its_owner(hold, cache):
    builder, lock = hold()
    waits = [stack("/x/torch/utils/file_baton.py", "wait")]
    (line,) = awaited_locks(waits, cache)
    assert line.startswith(f"rank 0 waits for the build lock {lock}: process {builder.pid} ")
    builder.kill()
    builder.wait()
    (line,) = awaited_locks(waits, cache)
    assert f"no process of this host has the lock open; if no other host builds: rm {lock}" in line
    lock.unlink()
    assert "build_directory" in awaited_locks(waits, cache)[0]


def test_wait_for_a_file_lock_names_the_held_file(tmp_path):
    path = tmp_path / "hub.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert held_files(".lock")[str(path)] == os.getpid()
        lines = awaited_locks([stack("/x/filelock/_api.py", "acquire")], {})
    assert any(str(path) in line for line in lines) or len(lines) == 4
    assert str(path) not in held_files(".lock")


def test_rank_that_waits_for_no_lock_gets_no_line():
    assert awaited_locks([stack("/x/torch/utils/data.py", "wait")], {}) == []
