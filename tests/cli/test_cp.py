"""ckpt cp: a checkpoint in another repository, as text and as JSON."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.checkpoint.generations import claim, list_numbers
from resilient.clock import SystemClock
from resilient.format.keys import CheckpointId
from resilient.processes import identify
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import write_run, write_usual_run

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers" / "reg_sgd" / "run" / "checkpoint-7"
IMPORTED = ("import", str(GOLDEN), "{kept}")


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder, parity=1)
    return folder


def test_copies_are_told_as_in_the_transcripts(repo, tmp_path, call, matches):
    words = ("ckpt", "cp", "best:eval_loss", tmp_path / "kept", "--repo", repo)
    matches("cp-dry-run", call(*words, "--dry-run"), tmp_path)
    assert not (tmp_path / "kept").exists()
    matches("cp", call(*words), tmp_path)
    matches("cp-again-json", call(*words, "--json"), tmp_path)
    matches("cp-listed", call("ckpt", "ls", tmp_path / "kept"), tmp_path)
    assert call("ckpt", "verify", "--all", "--level", "full", tmp_path / "kept").status == 0


def test_the_path_of_a_checkpoint_names_it(repo, tmp_path, call):
    outcome = call("ckpt", "cp", repo / "checkpoint-25-g2", tmp_path / "kept", "-q")
    assert (outcome.status, outcome.stdout) == (0, "checkpoint-25-g2\n"), outcome.stderr


def test_a_signature_holds_in_the_copy(repo, tmp_path, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", "k" * 32)
    assert call("ckpt", "sign", "latest", repo).status == 0
    assert call("ckpt", "cp", "latest", tmp_path / "kept", "--repo", repo).status == 0
    assert call("ckpt", "verify", tmp_path / "kept", "--require-signature").status == 0


def test_a_copy_mends_what_the_first_one_lost(repo, tmp_path, call):
    words = ("ckpt", "cp", "latest", tmp_path / "kept", "--repo", repo)
    assert call(*words).status == 0
    next((tmp_path / "kept" / "checkpoint-35-g2").glob("model*.safetensors")).unlink()
    assert call("ckpt", "verify", tmp_path / "kept").status == 3
    assert call(*words).status == 0
    assert call("ckpt", "verify", tmp_path / "kept").status == 0


@pytest.mark.parametrize(
    ("prepare", "status", "said"),
    [
        (lambda kept: None, 66, "no checkpoint at"),
        (lambda kept: write_run(kept, [(None, [1])]), 78, "holds another run"),
    ],
)
def test_what_cannot_be_is_refused(prepare, status, said, repo, tmp_path, call):
    kept = tmp_path / "kept"
    prepare(kept)
    if status == 66:
        shutil.rmtree(repo)
    outcome = call("ckpt", "cp", "latest", kept, "--repo", repo)
    assert outcome.status == status, outcome.stderr
    assert said in outcome.stderr


@pytest.mark.parametrize("words", [("cp", "latest", "{kept}", "--repo", "{repo}"), IMPORTED])
def test_copy_of_newer_attempt_beside_live_writer_needs_take_over(tmp_path, call, words):
    repo, kept = tmp_path / "run", tmp_path / "kept"
    write_run(repo, [(None, [10])])
    assert call("ckpt", "cp", "latest", kept, "--repo", repo).status == 0
    write_run(repo, [(CheckpointId(1, 10), [20]), (CheckpointId(2, 20), [30])])
    store = LocalStore(kept)
    named = [one.format(kept=kept, repo=repo) for one in words]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        claim(
            store,
            CheckpointId(1, 10),
            cause="start",
            clock=SystemClock(),
            process=identify(process.pid),
        )
        outcome = call("ckpt", *named)
        numbers = list_numbers(store)
        process.kill()
    assert (outcome.status, numbers) == (80, [1, 2])
    assert f"process {process.pid} on " in outcome.stderr
    assert "--take-over loses its unsaved steps" in outcome.stderr
    if words != IMPORTED:
        (command,) = re.findall(r"; (resilient ckpt .* --take-over)", outcome.stderr)
        assert call(*shlex.split(command)[1:]).status == 0
        assert list_numbers(store) == [1, 2, 3]
