"""Real processes, real signals: whatever happens, the run ends with the bits of an unbroken one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.helpers.seeds import draw
from tests.process.jobs import Job, run

PAUSE = ("--pause", "0.08")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    code, said = run(folder)
    assert code == 0, said
    return ending(folder)


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """A repository whose job was killed as a whole after a few saves."""
    folder = tmp_path_factory.mktemp("half-way")
    with Job(folder, *PAUSE) as job:
        job.wait_for_step(14)
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
    wait_until_quiet(folder)
    assert committed(open_store(str(folder)))
    return folder


def wait_until_quiet(folder):
    """Wait for the saver daemon, which ends the save in flight after the death of its job."""
    deadline, files, since = time.monotonic() + 60, None, 0.0
    while time.monotonic() < deadline:
        now = sorted(str(path) for path in folder.rglob("*"))
        is_writing = any(".tmp-" in path for path in now)
        if now != files or is_writing:
            files, since = now, time.monotonic()
        elif time.monotonic() - since > 1:
            return
        time.sleep(0.1)
    raise AssertionError(f"files change for a minute after the death of the job: {files}")


def check_same(folder, unbroken) -> None:
    assert differences(ending(folder), unbroken) == []


def read_steps(folder):
    """Return what each rank noted of its steps, in all lives."""
    files = sorted(folder.glob("steps-*.jsonl"))
    return [[json.loads(line) for line in one.read_text().splitlines()] for one in files]


def newest_file(folder, name):
    checkpoint = committed(open_store(str(folder)))[0]
    return folder / checkpoint.folder / name


@pytest.mark.smoke
def test_sigkill_of_one_rank(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE) as job:
        os.kill(job.wait_for_step(10, rank=1), signal.SIGKILL)
        assert job.wait() == 0, job.said()
        assert "SIGKILL" in job.said()
        assert job.said().count("resumed from checkpoint-8-g1") == 1
    check_same(tmp_path, unbroken)


def test_a_rank_killed_between_two_saves_costs_no_step_that_memory_held(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE, launch=("--every", "memory=1step")) as job:
        os.kill(job.wait_for_step(draw().choice((10, 14, 18)), rank=1), signal.SIGKILL)
        assert job.wait() == 0, job.said()
        said, ended = job.said(), job.steps(0)
    first = next(one["step"] for one in ended if one["pid"] != ended[0]["pid"])
    reached = max(one["step"] for one in ended if one["pid"] == ended[0]["pid"])
    # The last one may have ended and not been held yet.
    assert reached - 1 <= first - 1 <= reached, said
    assert f"resumed from checkpoint-{first - 1}-g1" in said
    assert f"checkpoint-{first - 1}-g1 was cached in memory" in said
    check_same(tmp_path, unbroken)


def test_a_killed_agent_costs_no_step_that_memory_held(tmp_path, unbroken):
    holds = ("--every", "memory=1step")
    with Job(tmp_path, *PAUSE, launch=holds) as job:
        job.wait_for_step(draw().choice((10, 14, 18)))
        job.process.kill()
        job.process.wait()
        reached = min(job.steps(rank)[-1]["step"] for rank in (0, 1))
    code, said = run(tmp_path, launch=holds)
    assert code == 0, said
    # The last one may have ended and not been held yet; the ranks go a moment after their agent.
    assert re.search(r"resumed from checkpoint-(\d+)-g1", said), said
    assert int(re.search(r"resumed from checkpoint-(\d+)-g1", said)[1]) >= reached - 1, said
    check_same(tmp_path, unbroken)


def test_a_launch_that_was_to_end_early_is_gone_on_with(tmp_path, unbroken):
    for time_of_asking in range(2):
        code, said = run(tmp_path, launch=("--until-step", "10"))
        assert code == 0, said
        assert "step 10 is saved, and this agent run ends at this step" in said
        # The second one has nothing to do.
        assert {job[-1]["step"] for job in read_steps(tmp_path)} == {10}, time_of_asking
    code, said = run(tmp_path)
    assert code == 0, said
    assert "resumed from checkpoint-10-g1" in said
    check_same(tmp_path, unbroken)


def test_sigkill_of_the_coordinator_with_loader_workers(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE, "--workers", "2") as job:
        os.kill(job.wait_for_step(7, rank=0), signal.SIGKILL)
        assert job.wait() == 0, job.said()
    check_same(tmp_path, unbroken)


@pytest.mark.smoke
def test_sigterm_to_the_job_saves_the_agreed_step_and_exits_75(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE) as job:
        job.wait_for_step(9)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.said()
        agreed = [steps[-1]["step"] for steps in (job.steps(0), job.steps(1))]
    assert agreed[0] == agreed[1] == committed(open_store(str(tmp_path)))[0].step
    code, said = run(tmp_path)
    assert code == 0, said
    assert f"resumed from checkpoint-{agreed[0]}-g1" in said
    check_same(tmp_path, unbroken)


def test_sigkill_of_the_whole_job(half_way, tmp_path, unbroken):
    shutil.copytree(half_way, tmp_path, dirs_exist_ok=True)
    code, said = run(tmp_path)
    assert code == 0, said
    check_same(tmp_path, unbroken)


def test_sigkill_of_the_agent_leaves_no_orphan(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE) as job:
        pids = [job.wait_for_step(6, rank=rank) for rank in (0, 1)]
        job.process.kill()
        job.process.wait()
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):  # noqa: PTH110
            assert time.monotonic() < deadline, "orphans go on training"
            time.sleep(0.05)
    code, said = run(tmp_path)
    assert code == 0, said
    check_same(tmp_path, unbroken)


def test_a_rank_stopped_and_continued_changes_nothing(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE) as job:
        pid = job.wait_for_step(6, rank=1)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0, job.said()
    check_same(tmp_path, unbroken)


def test_a_rank_stopped_and_then_killed_is_restarted(tmp_path, unbroken):
    with Job(tmp_path, *PAUSE) as job:
        pid = job.wait_for_step(6, rank=0)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 0, job.said()
    check_same(tmp_path, unbroken)


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = [
    "manifest.json",
    "model.r00000.safetensors",
    "optimizer.r00001.safetensors",
    "rng_state_1.safetensors",
    "state.json",
    "trainer_state.json",
]


@pytest.mark.parametrize("damage", [flip, truncate, os.unlink], ids=["flip", "cut", "delete"])
def test_with_the_newest_damaged_the_one_before_is_resumed(half_way, tmp_path, unbroken, damage):
    """Each file in turn, through the restore that every rank runs; then one run to the end."""
    from tests.helpers.restoring import restored_step

    for name in FILES:
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(half_way, copy)
        newest, before = committed(open_store(str(half_way)))[:2]
        damage(copy / newest.folder / name)
        step, skipped = restored_step(copy)
        assert step == before.step, name
        assert any(newest.folder in line for line in skipped), (name, skipped)
    shutil.copytree(half_way, tmp_path / "run")
    damage(newest_file(tmp_path / "run", "optimizer.r00000.safetensors"))
    code, said = run(tmp_path / "run")
    assert code == 0, said
    assert f"skipped {newest.folder}" in said
    assert f"resumed from {before.folder}" in said
    check_same(tmp_path / "run", unbroken)


@pytest.mark.smoke
def test_with_all_damaged_it_refuses_to_start_over(half_way, tmp_path):
    shutil.copytree(half_way, tmp_path / "run")
    for checkpoint in committed(open_store(str(tmp_path / "run"))):
        flip(tmp_path / "run" / checkpoint.folder / "model.r00001.safetensors")
    before = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    code, said = run(tmp_path / "run")
    assert code == 3, said
    assert "does not start over silently" in said
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == before
