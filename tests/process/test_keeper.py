"""The keeper under `resilient train`: what was handed over lands, whoever is killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.format.keys import CheckpointId
from resilient.storage.open import open_store
from resilient.storage.shared_memory import ROOT
from tests.helpers.agent_harness import is_alive, wait_until
from tests.helpers.endings import differences, ending
from tests.process.jobs import Job, run

PAUSE = ("--pause", "0.08")
HELD = Path(__file__).parents[1] / "helpers" / "held"
NO_KEEPER = ("--host-bytes-max", "none")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    code, said = run(folder)
    assert code == 0, said
    return ending(folder)


class Gate:
    """Holds the puts of one checkpoint's shards until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def holds(self, files: int) -> bool:
        # A note that is not written yet has no number in it.
        return sum(path.stat().st_size > 0 for path in self.folder.glob("held-*")) >= files

    def pids(self) -> set[int]:
        return {int(path.read_text()) for path in self.folder.glob("held-*")}

    def open(self) -> None:
        (self.folder / "go").touch()

    def reads(self) -> list[str]:
        path = self.folder / "reads"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Hold checkpoint-8 in every process that the test starts."""
    folder = tmp_path / "gate"
    folder.mkdir()
    monkeypatch.setenv("HELD_FOLDER", str(folder))
    monkeypatch.setenv("HELD_PREFIX", "checkpoint-8-g1")
    monkeypatch.setenv("PYTHONPATH", f"{HELD}:{os.environ.get('PYTHONPATH', '')}")
    return Gate(folder)


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """Give the test shared memory of its own, of which nothing may be left: others use theirs."""
    with tempfile.TemporaryDirectory(prefix="keeper-test-", dir=ROOT) as folder:
        monkeypatch.setenv("RESILIENT_SHARED_FOLDER", folder)
        yield Path(folder)
        wait_until(lambda: not any(Path(folder).iterdir()), "clean shared memory", seconds=40)


def keeper_of(job: Job) -> int:
    """Return the process of the agent's keeper."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text()
    (pid,) = [
        int(child)
        for child in children.split()
        if b"resilient.checkpoint.daemon.server" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return pid


def trainers_after(job: Job, step: int) -> list[int]:
    return [job.wait_for_step(step, rank=rank) for rank in (0, 1)]


def kill(pids) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def is_committed(folder, step: int) -> bool:
    return CheckpointId(1, step) in committed(open_store(str(folder)))


@pytest.mark.smoke
def test_with_every_trainer_killed_right_after_save_returned_the_checkpoint_lands(
    tmp_path, gate, unbroken
):
    folder = tmp_path / "run"
    with Job(folder, *PAUSE) as job:
        pids = trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        assert keeper_of(job) in gate.pids()
        kill(pids)
        wait_until(lambda: "attempt 2" in job.said(), "the next life")
        assert not is_committed(folder, 8)
        gate.open()
        assert job.wait() == 0, job.said()
        assert "saved checkpoint-8-g1" in job.said()
        assert job.said().count("resumed from checkpoint-8-g1") == 1
    assert gate.reads() == []
    assert differences(ending(folder), unbroken) == []


def test_with_a_near_tier_the_keeper_lands_it_there_and_promotes_the_last(tmp_path, gate, unbroken):
    folder, near = tmp_path / "run", tmp_path / "near"
    with Job(folder, *PAUSE, "--near", str(near)) as job:
        pids = trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        assert keeper_of(job) in gate.pids()
        kill(pids)
        wait_until(lambda: "attempt 2" in job.said(), "the next life")
        gate.open()
        assert job.wait() == 0, job.said()
        assert job.said().count("resumed from checkpoint-8-g1") == 1
        assert "persisted by the trainers" not in job.said()
    assert is_committed(folder, 8), "what a life began from goes on"
    assert differences(ending(folder), unbroken) == []


def test_without_a_keeper_the_same_history_costs_that_checkpoint(tmp_path, gate, unbroken):
    folder = tmp_path / "run"
    with Job(folder, *PAUSE, launch=NO_KEEPER) as job:
        pids = trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        assert gate.pids() == set(pids)
        kill(pids)
        gate.open()
        assert job.wait() == 0, job.said()
        assert job.said().count("resumed from checkpoint-4-g1") == 1
    assert any("checkpoint-4-g1/model" in line for line in gate.reads())
    assert differences(ending(folder), unbroken) == []


def files_in(shared):
    found = [*shared.glob("resilient-*/0*")]
    return [path for path in found if path.stat().st_size > 1000]


def flip(path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("where", ["memory", "store"])
def test_a_restore_survives_damage_of_either_copy(tmp_path, shared, gate, unbroken, where):
    folder = tmp_path / "run"
    gate.open()
    with Job(folder, "--pause", "0.4") as job:
        pids = trainers_after(job, 8)
        wait_until(lambda: is_committed(folder, 8), "checkpoint-8")
        for path in (
            files_in(shared) if where == "memory" else (folder / "checkpoint-8-g1").glob("*")
        ):
            if path.suffix != ".json":
                flip(path)
        kill(pids)
        assert job.wait() == 0, job.said()
        assert job.said().count("resumed from checkpoint-8-g1") == 1
        assert ("in memory differs from what was saved" in job.said()) is (where == "memory")
    assert bool(gate.reads()) is (where == "memory")
    assert differences(ending(folder), unbroken) == []


def test_what_a_keeper_killed_in_mid_save_held_is_persisted_by_the_trainers(
    tmp_path, gate, unbroken
):
    folder = tmp_path / "run"
    with Job(folder, *PAUSE) as job:
        trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        kill([keeper_of(job)])
        gate.open()
        assert job.wait() == 0, job.said()
        said = job.said()
    assert "checkpoint-8-g1 is persisted by the trainers" in said
    assert "saved checkpoint-8-g1" in said
    assert "the saver daemon ended with -9" in said
    assert differences(ending(folder), unbroken) == []


def test_a_keeper_killed_in_the_middle_of_a_stop_costs_nothing(
    tmp_path, gate, unbroken, monkeypatch
):
    folder = tmp_path / "run"
    monkeypatch.setenv("HELD_PREFIX", "checkpoint-")
    with Job(folder, *PAUSE) as job:
        trainers_after(job, 2)
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        kill([keeper_of(job)])
        gate.open()
        assert job.wait() == 75, job.said()
        assert "is persisted by the trainers" in job.said()
    code, said = run(folder)
    assert code == 0, said
    assert "resumed from checkpoint-" in said
    assert differences(ending(folder), unbroken) == []


def test_a_killed_agent_loses_no_checkpoint_that_was_handed_over(tmp_path, gate, unbroken):
    folder = tmp_path / "run"
    with Job(folder, *PAUSE) as job:
        trainers = trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        keeper = keeper_of(job)
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not any(map(is_alive, trainers)), "the trainers to die")
        time.sleep(0.5)
        assert is_alive(keeper)
        gate.open()
        wait_until(lambda: not is_alive(keeper), "the keeper to leave")
    assert is_committed(folder, 8)
    code, said = run(folder)
    assert code == 0, said
    assert "resumed from checkpoint-8-g1" in said
    assert differences(ending(folder), unbroken) == []


def test_the_same_command_started_again_at_once_waits_for_what_was_handed_over(
    tmp_path, gate, unbroken
):
    folder = tmp_path / "run"
    with Job(folder, *PAUSE) as job:
        trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        job.process.kill()
        job.process.wait()
    with Job(folder, *PAUSE) as again:
        wait_until(lambda: "attempt 1" in again.said(), "the next agent's life")
        time.sleep(4)
        gate.open()
        assert again.wait() == 0, again.said()
        assert "resumed from checkpoint-8-g1" in again.said()
    assert differences(ending(folder), unbroken) == []


def test_a_keeper_whose_agent_is_gone_leaves_at_its_deadline_whatever_hangs(tmp_path, gate):
    with Job(tmp_path / "run", *PAUSE, launch=("--grace", "2")) as job:
        trainers_after(job, 9)
        wait_until(lambda: gate.holds(2), "both ranks to write")
        keeper = keeper_of(job)
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not is_alive(keeper), "the keeper to leave", seconds=10)
    assert not is_committed(tmp_path / "run", 8)


def test_too_small_a_bound_is_refused_with_the_numbers(tmp_path):
    launch = ("--host-bytes-max", "1000", "--max-restarts", "0")
    code, said = run(tmp_path, launch=launch)
    assert code == 78, said
    assert "host_bytes_max allows 1000" in said


def test_memory_that_the_host_has_not_is_refused_before_anything_starts(tmp_path, shared):
    code, said = run(tmp_path, launch=("--host-bytes-max", "900TiB"))
    assert code == 78, said
    assert f"{900 << 40} bytes are too many: {shared} has" in said
    assert "attempt 1" not in said
