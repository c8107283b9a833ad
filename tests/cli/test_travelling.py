"""rollback, undo and reflog, as text and as JSON; references that they bring."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.generations import claim, list_numbers
from resilient.clock import SystemClock
from resilient.processes import identify
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import truncate_file, write_usual_run


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def head(repo):
    return lineage(LocalStore(repo)).candidates[0].folder


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rollback", ("rollback", "step:20")),
        ("rollback-json", ("rollback", "checkpoint-30-g1", "--json")),
        ("rollback-dry-run", ("rollback", "latest~1", "--dry-run")),
        ("rollback-nothing", ("rollback", "latest")),
        ("undo-nothing", ("undo",)),
        ("reflog", ("reflog",)),
        ("reflog-json", ("reflog", "--json")),
    ],
)
def test_it_reads_as_in_the_transcript(name, arguments, repo, call, matches):
    matches(name, call("ckpt", *arguments, "--repo", repo), repo)


def test_back_and_forth_as_in_the_transcripts(repo, call, matches):
    assert call("ckpt", "rollback", "step:10", repo).status == 0
    assert head(repo) == "checkpoint-10-g1"
    matches("undo-dry-run", call("ckpt", "undo", repo, "--dry-run"), repo)
    assert head(repo) == "checkpoint-10-g1"
    matches("undo", call("ckpt", "undo", repo), repo)
    assert head(repo) == "checkpoint-35-g2"
    matches("reflog-moved", call("ckpt", "reflog", repo), repo)
    assert call("ckpt", "rollback", "@{1}", repo).status == 0
    assert head(repo) == "checkpoint-10-g1"
    assert json.loads(call("ckpt", "undo", repo, "--json").stdout)["after"] == "checkpoint-35-g2"


def test_a_checkpoints_own_url_is_a_reference(repo, call):
    assert call("ckpt", "rollback", repo / "checkpoint-25-g2").status == 0
    assert head(repo) == "checkpoint-25-g2"


@pytest.fixture
def writer(repo, call):
    """Roll back once, then let another process of this machine claim the newest generation."""
    assert call("ckpt", "rollback", "latest~1", repo).status == 0
    store = LocalStore(repo)
    parent = lineage(store).candidates[0]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        claim(store, parent, cause="start", clock=SystemClock(), process=identify(process.pid))
        yield process
        process.kill()


@pytest.mark.parametrize("words", [("rollback", "checkpoint-20-g1"), ("undo",)])
def test_move_beside_live_writer_needs_take_over(repo, call, writer, words):
    numbers = list_numbers(LocalStore(repo))
    outcome = call("ckpt", *words, repo)
    assert outcome.status == 80
    assert f"process {writer.pid} on " in outcome.stderr
    assert "is alive; nothing was changed" in outcome.stderr
    assert list_numbers(LocalStore(repo)) == numbers
    assert call("ckpt", *words, repo, "--dry-run").status == 0
    (command,) = re.findall(r"; (resilient ckpt .* --take-over)", outcome.stderr)
    assert call(*shlex.split(command)[1:]).status == 0
    assert list_numbers(LocalStore(repo)) > numbers


def test_rollback_after_writer_ended_needs_no_option(repo, call, writer):
    writer.kill()
    writer.wait()
    assert call("ckpt", "rollback", "checkpoint-20-g1", repo).status == 0


def test_other_commands_beside_live_writer_are_allowed(repo, call, writer):
    newest = committed(LocalStore(repo))[0]
    assert call("ckpt", "tag", newest, "kept", repo).status == 0
    assert call("ckpt", "untag", "kept", repo).status == 0
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--yes").status == 0
    assert newest in committed(LocalStore(repo))


def test_a_rollback_takes_less_than_a_second(repo, call):
    began = time.monotonic()
    assert call("ckpt", "rollback", "step:10", repo).status == 0
    # A second is the promise; the rest is room for a machine that is busy.
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("rollback", "step:77"), 66, "no checkpoint `step:77`"),
        (("rollback",), 2, "Missing argument"),
        (("rollback", "@never"), 2, "is not a time such as"),
        (("undo",), 66, "nothing to undo"),
    ],
)
def test_what_is_refused_changes_nothing(arguments, status, said, repo, call):
    outcome = call("ckpt", *arguments, "--repo", repo)
    assert (outcome.status, said in outcome.stderr) == (status, True)
    assert head(repo) == "checkpoint-35-g2"


def test_a_lone_repository_is_no_reference(repo, call):
    outcome = call("ckpt", "rollback", repo)
    assert outcome.status == 2
    assert f"resilient ckpt rollback latest~1 {repo}" in outcome.stderr


def test_a_damaged_target_is_refused_with_the_command_that_mends_it(repo, call):
    truncate_file(repo / "checkpoint-10-g1" / "model.r00000.safetensors", 100)
    outcome = call("ckpt", "rollback", "step:10", repo)
    assert outcome.status == 1
    assert "resilient ckpt repair checkpoint-10-g1" in outcome.stderr
    assert head(repo) == "checkpoint-35-g2"


def test_no_repository_is_not_found(tmp_path, call):
    for arguments in (("rollback", "latest"), ("undo",), ("reflog",)):
        assert call("ckpt", *arguments, tmp_path / "no").status == 66


def test_prune_says_what_undo_needs_and_forgets_it_when_told(repo, call):
    call("ckpt", "rollback", "step:10", repo)
    kept = call("ckpt", "prune", repo, "--keep-last", "1", "--yes").stdout
    assert "checkpoint-35-g2  it is the target of `ckpt undo`" in kept
    call("ckpt", "prune", repo, "--keep-last", "1", "--forget-undo", "--yes")
    outcome = call("ckpt", "undo", repo)
    assert outcome.status == 66
    assert "cannot be undone" in outcome.stderr
