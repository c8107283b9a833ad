"""Check of ``--resume`` by the agent, before it starts a worker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.distributed.start_identity import StartIdentity
from resilient.elastic import launcher, resume_check
from resilient.elastic.options import WorkerOptions
from resilient.elastic.resume_check import check_resume
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    NothingToResume,
    ResilientError,
    UnknownLayout,
)
from resilient.train.hf_interop.import_check import open_source
from tests.helpers.hf_runs import checkpoint_of

START = StartIdentity("manual")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(checkpoint_of("reg_sgd", 7), tmp_path / "theirs"))


def damage(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def check(wish, start=START, **options):
    check_resume(WorkerOptions(resume=str(wish), **options), start)


def test_resume_check_intact_folder_accepted(folder):
    check(folder)
    check(folder, repo=str(folder.parent / "empty"))


def test_resume_check_file_url_is_the_path(folder):
    check(folder.as_uri())
    damage(folder)
    with pytest.raises(IntegrityError):
        check(folder.as_uri())
    with pytest.raises(NothingToResume):
        check(f"{folder.as_uri()}-2", repo=str(folder.parent / "empty"))
    with pytest.raises(ConfigError, match="host"):
        check("file://elsewhere/run/checkpoint-4")


def test_resume_check_damaged_folder_refused_as_by_worker(folder):
    damage(folder)
    with pytest.raises(IntegrityError) as ours:
        check(folder)
    with pytest.raises(IntegrityError) as theirs:
        open_source(str(folder))
    assert (ours.value.message, ours.value.hint) == (theirs.value.message, theirs.value.hint)
    assert ours.value.exit_code == 1


def test_resume_check_loss_refused_only_if_strict(folder):
    (folder / "scheduler.pt").unlink()
    check(folder)
    with pytest.raises(IncompatibleCheckpoint) as ours:
        check(folder, strict_resume=True)
    with pytest.raises(IncompatibleCheckpoint) as theirs:
        open_source(str(folder), strict=True)
    assert ours.value.message == theirs.value.message


def test_resume_check_missing_folder_refused(tmp_path):
    with pytest.raises(NothingToResume, match="no such folder") as raised:
        check(tmp_path / "gone", repo=str(tmp_path / "empty"))
    assert raised.value.exit_code == 66


def test_resume_check_deleted_folder_of_a_run_left_to_workers(tmp_path):
    """The workers find out whether the run began from it; only the script knows its repository."""
    held = tmp_path / "run" / "checkpoint-4-g1"
    held.mkdir(parents=True)
    (held / "manifest.json").write_text("{}")
    check(tmp_path / "gone", repo=str(tmp_path / "run"))
    check(tmp_path / "gone")


def test_resume_check_unknown_layout_refused(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "notes.txt").write_text("x")
    with pytest.raises(UnknownLayout) as raised:
        check(tmp_path / "odd")
    assert raised.value.exit_code == 65


def test_resume_check_folder_of_run_names_its_newest_intact_checkpoint(folder):
    intact = folder.rename(folder.parent / "checkpoint-7")
    shutil.copytree(intact, folder.parent / "checkpoint-8")
    damage(folder.parent / "checkpoint-8")
    with pytest.raises(UnknownLayout) as raised:
        check(folder.parent)
    assert raised.value.exit_code == 65
    assert f"the newest intact one is `{intact}`" in raised.value.message
    assert raised.value.hint.startswith(f"to continue: resilient train --resume {intact} SCRIPT")


def test_resume_check_folder_of_own_run_names_its_repository(tmp_path):
    own = tmp_path / "run" / "checkpoint-4-g1"
    own.mkdir(parents=True)
    (own / "manifest.json").write_text("{}")
    with pytest.raises(ResilientError) as raised:
        check(tmp_path / "run")
    assert f"resilient train --repo {tmp_path / 'run'} SCRIPT" in raised.value.hint


def test_resume_check_folder_of_other_tool_refused(folder):
    (folder / "trainer_state.json").unlink()
    with pytest.raises(ResilientError) as raised:
        check(folder)
    assert raised.value.exit_code in {1, 65}


def test_resume_check_path_of_own_checkpoint_names_command(tmp_path):
    own = tmp_path / "run" / "checkpoint-4-g1"
    own.mkdir(parents=True)
    (own / "manifest.json").write_text("{}")
    with pytest.raises(NothingToResume) as raised:
        check(own)
    assert raised.value.hint == f"resilient train --repo {own.parent} --resume {own.name} SCRIPT"


@pytest.mark.parametrize(
    "wish", ["auto", "never", "latest~1", "nowhere", "best:eval/loss", "s3://b/x"]
)
def test_resume_check_references_left_to_workers(wish):
    check(wish)


def test_resume_check_repository_with_run_left_to_workers(folder, tmp_path):
    damage(folder)
    held = tmp_path / "run" / "checkpoint-4-g1"
    held.mkdir(parents=True)
    (held / "manifest.json").write_text("{}")
    check(folder, repo=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("start", "is_checked"),
    [
        (StartIdentity("a", "slurm/c/1", 0), True),
        (StartIdentity("a", "slurm/c/1", 1), False),
        (StartIdentity("a", "kubernetes/run"), False),
        (StartIdentity("a", "rendezvous/x"), False),
    ],
)
def test_resume_check_continued_job_left_to_workers(tmp_path, start, is_checked):
    if is_checked:
        with pytest.raises(NothingToResume):
            check(tmp_path / "gone", start, repo=str(tmp_path / "empty"))
    else:
        check(tmp_path / "gone", start, repo=str(tmp_path / "empty"))


def test_resume_check_several_hosts_left_to_workers(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("checked")

    monkeypatch.setattr(resume_check, "check_resume", refuse)
    options = launcher.TrainOptions(
        "x.py",
        wishes=WorkerOptions(resume=str(tmp_path / "gone")),
        rendezvous=launcher.RendezvousOptions(nnodes="1:2", endpoint="host:1"),
    )
    launcher._check_resume(options, lambda _: None)


PROGRAM = """
import sys
from resilient.elastic import launcher
from resilient.elastic.options import WorkerOptions
from resilient.errors import ResilientError
def begin(*_):
    raise AssertionError("the agent is made")
launcher.build_agent = begin
options = launcher.TrainOptions("x.py", wishes=WorkerOptions(resume=sys.argv[1]))
try:
    launcher.run_agent(options)
except ResilientError as error:
    assert "torch" not in sys.modules
    sys.exit(error.exit_code + 100)
"""


def test_resume_check_agent_refuses_without_torch(folder):
    damage(folder)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 101, ended.stderr
    assert "was refused, no worker was started" in ended.stderr


def test_resume_check_command_ends_without_worker(folder, tmp_path):
    damage(folder)
    script = tmp_path / "script.py"
    script.write_text(f"open({json.dumps(str(tmp_path / 'began'))}, 'w')\n")
    command = [sys.executable, "-m", "resilient_cli", "train", "--resume", str(folder), str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "RES-CKPT-DAMAGED" in ended.stderr
    assert not (tmp_path / "began").exists()
