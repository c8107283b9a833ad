"""`ckpt ls` of a folder in which another tool keeps its checkpoints, and references into it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest

from resilient.layouts.run_folder import Pointers, RunCheckpoint
from resilient_cli.foreign import ForeignRun
from resilient_cli.views.foreign import build_run_result

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers"


@pytest.fixture
def run(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "run"))
    for step in (4, 12):
        shutil.copytree(folder / "checkpoint-8", folder / f"checkpoint-{step}")
    write_at(folder, 12, minute=20)
    write_at(folder, 8, minute=10)
    write_at(folder, 4, minute=0)
    return folder


def write_at(folder, step, minute):
    """Let the last file of a checkpoint be of a minute of 2026, and the others be older."""
    began = datetime(2026, 1, 1, 0, minute, tzinfo=UTC).timestamp()
    for nth, path in enumerate(sorted((folder / f"checkpoint-{step}").rglob("*"))):
        os.utime(path, (began - nth, began - nth))


@pytest.mark.parametrize(
    ("name", "more"),
    [("ls-foreign", ()), ("ls-foreign-json", ("--json",)), ("ls-foreign-last", ("--last", "1"))],
)
def test_it_is_listed(run, call, matches, name, more):
    matches(name, call("ckpt", "ls", run, *more), run.parent)


def test_names_are_what_other_commands_take(run, call):
    paths = call("ckpt", "ls", run, "-q").stdout.split()
    assert [Path(one).name for one in paths] == ["checkpoint-12", "checkpoint-8", "checkpoint-4"]
    for path in paths:
        beside = ("checkpoint-8", "-r", run) if path.endswith("8") else (path,)
        told = json.loads(call("ckpt", "inspect", *beside, "--json").stdout)
        assert told["url"] == path


def test_of_several_runs_none_is_taken_for_another(run, call):
    shutil.copytree(run, run.parent / "beside" / "a")
    shutil.copytree(run, run.parent / "beside" / "b")
    told = call("ckpt", "inspect", "latest", run.parent / "beside")
    assert told.status == 2
    assert "a/checkpoint-12, b/checkpoint-12" in told.stderr
    assert f"resilient ckpt inspect {run.parent}/beside/a/checkpoint-12" in told.stderr


def test_a_tracker_says_which_is_the_latest(tmp_path, call, matches):
    for step in (5, 10):
        (tmp_path / "run" / f"global_step{step}").mkdir(parents=True)
        states = tmp_path / "run" / f"global_step{step}" / "mp_rank_00_model_states.pt"
        states.touch()
        os.utime(states, (step, step))
    pointer = tmp_path / "run" / "latest"
    pointer.write_text("global_step5")
    matches("ls-foreign-tracker", call("ckpt", "ls", tmp_path / "run"), tmp_path)
    told = call("ckpt", "inspect", "latest", "-r", tmp_path / "run", "--json").stdout
    assert json.loads(told)["url"].endswith("global_step5")
    pointer.write_text("global_step7")
    matches("ls-foreign-stale", call("ckpt", "ls", tmp_path / "run", "--json"), tmp_path)


def test_a_list_loads_nothing_that_reads_numbers(run):
    code = (
        "import sys; from resilient_cli.app import main; main(['ckpt', 'ls', sys.argv[1]]); "
        "sys.exit(sum(one in sys.modules for one in ('numpy', 'torch', 'fsspec')))"
    )
    words = [sys.executable, "-c", code, str(run)]
    assert subprocess.run(words, check=False, timeout=60, capture_output=True).returncode == 0


def test_what_is_a_checkpoint_itself_holds_no_others(run, call):
    newest = call("ckpt", "ls", run, "-q").stdout.split()[0]
    told = call("ckpt", "ls", newest)
    assert told.status == 66
    assert f"resilient ckpt inspect {newest}" in told.stderr


def test_what_chooses_by_a_state_of_ours_is_refused(run, call):
    for option in (("--state", "ok"), ("--tag", "a")):
        assert call("ckpt", "ls", run, *option).status == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "repair"])
def test_references_name_its_checkpoints(run, call, command):
    names = [Path(one).name for one in call("ckpt", "ls", run, "-q").stdout.split()]
    found = {
        reference: json.loads(call("ckpt", command, reference, run, "--json").stdout)["url"]
        for reference in ("latest", "latest~1", f"step:{names[-1].rpartition('-')[2]}", names[0])
    }
    wanted = [names[0], names[1], names[-1], names[0]]
    assert [Path(one).name for one in found.values()] == wanted
    told = call("ckpt", command, "step:3", run)
    assert told.status == 66
    assert f"resilient ckpt ls {run}" in told.stderr


def test_two_of_them_are_compared(run, call):
    told = json.loads(call("ckpt", "diff", "latest~1", "latest", "-r", run, "--json").stdout)
    names = [Path(one).name for one in call("ckpt", "ls", run, "-q").stdout.split()]
    assert [Path(told[side]["url"]).name for side in ("before", "after")] == names[1::-1]
    beside = call("ckpt", "diff", f"{run}/latest~1", f"{run}/latest", "--json")
    assert json.loads(beside.stdout)["before"] == told["before"]


def test_of_a_list_that_is_cut_nothing_is_taken_for_the_latest(run, call, monkeypatch):
    monkeypatch.setattr("resilient.storage.folder.FILES_MAX", 8)
    told = json.loads(call("ckpt", "ls", run, "--json").stdout)
    assert told["whole"] is False
    assert not any("latest" in one["notes"] for one in told["checkpoints"])
    assert "newer checkpoints may be missing" in call("ckpt", "ls", run).stdout
    assert call("ckpt", "inspect", "latest", run).status == 2


def test_a_storage_of_others_tells_when_it_was_written(run, call):
    place = "memory://foreign-ages"
    memory = fsspec.filesystem("memory")
    began = datetime.now(UTC)
    memory.put(str(run), "/foreign-ages", recursive=True)
    told = json.loads(call("ckpt", "ls", place, "--json").stdout)["checkpoints"]
    memory.rm("/foreign-ages", recursive=True)
    assert [one["notes"] for one in told] == [["latest"], ["best"], []]
    for one in told:
        assert abs((datetime.fromisoformat(one["changed"]) - began).total_seconds()) < 300


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (-1.0, None),
        (1e13, None),
        (None, None),
        (float("nan"), None),
        (253_402_300_799.5, "9999-12-31T23:59:59.500Z"),
    ],
)
def test_a_moment_of_no_calendar_is_not_told(changed, expected):
    kept = RunCheckpoint("checkpoint-1", 1, (1,), "hf-trainer", 1, 1, changed)
    run = ForeignRun(
        "/run", [kept], Pointers(frozenset(), frozenset(), {}), frozenset(), is_whole=True
    )
    told = build_run_result(run, [kept], "2026-01-01T00:00:00.000Z").document["checkpoints"][0]
    assert told["changed"] == expected


def test_where_nothing_is_whoever_looks_for_a_repository_says_so(tmp_path, call):
    assert "RES-REPO-404" in call("ckpt", "ls", "memory://nothing-at-all").stderr
