"""What is in the trash is told wherever it is named, with the command that brings it back."""

from __future__ import annotations

import json

import pytest

from resilient.checkpoint.catalog import folders_of, prunes_in, read_manifest, trash_of
from resilient.storage.local import LocalStore
from resilient_cli.app import drop_useless_hint
from tests.helpers.cli_repositories import TickingClock, write_usual_run


@pytest.fixture
def repo(tmp_path):
    write_usual_run(folder := tmp_path / "run")
    return folder


def error_of(answer):
    return json.loads(answer.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("repair",), ("cat",), ("verify",), ("rollback",), ("export",)],
    ids=lambda one: one[0],
)
@pytest.mark.parametrize("ref", ["checkpoint-10-g1", "step:10", "ID"])
def test_each_command_names_what_brings_it_back(command, ref, repo, call, tmp_path):
    store = LocalStore(repo)
    (named,) = [one for one in folders_of(store) if one.folder == "checkpoint-10-g1"]
    ref = read_manifest(store, named).root[:12] if ref == "ID" else ref
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--yes").status == 0
    more = {"cat": ("config.json",), "export": ("--out", tmp_path / "out")}.get(command[0], ())
    if command[0] == "cat":
        answer = call("ckpt", "cat", ref, "config.json", repo, "--json")
    else:
        answer = call("ckpt", *command, ref, repo, *more, "--json")
    found = error_of(answer)
    assert (answer.status, found["exit"]) == (66, 66)
    assert found["message"].startswith("checkpoint-10-g1 was pruned, and is in the trash of")
    (prune,) = prunes_in(trash_of(folders_of(store)))
    assert found["hint"] == f"resilient ckpt prune {store.url} --undo {prune}"
    assert call(*found["hint"].split()[1:]).status == 0
    assert call("ckpt", "inspect", ref, repo).status == 0


def test_what_brings_it_back_takes_no_later_prune_back(repo, call, monkeypatch):
    assert call("ckpt", "prune", repo, "--keep-last", "3", "--yes").status == 0
    clock = "resilient_cli.commands.prune.SystemClock"
    monkeypatch.setattr(clock, lambda: TickingClock(120))
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--yes").status == 0
    newer, older = prunes_in(trash_of(folders_of(LocalStore(repo))))
    found = error_of(call("ckpt", "inspect", "step:10", repo, "--json"))
    assert found["hint"].endswith(f" --undo {older}")
    assert call(*found["hint"].split()[1:]).status == 0
    assert prunes_in(trash_of(folders_of(LocalStore(repo)))) == (newer,)


@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        ("resilient ckpt ls s3://b/x", ["ckpt", "ls", "s3://b/x", "--json"],
         "resilient doctor --repo s3://b/x"),
        ("resilient ckpt ls s3://b/x", ["--json", "ckpt", "ls", "-r", "s3://b/x"],
         "resilient doctor --repo s3://b/x"),
        ("resilient ckpt ls", ["ckpt", "ls"], "resilient help RES-A"),
        ("resilient ckpt ls --help", ["ckpt", "ls", "x"], "resilient ckpt ls --help"),
        ("resilient ckpt ls x", ["ckpt", "inspect", "x"], "resilient ckpt ls x"),
        ("resilient ckpt inspect x", ["ckpt", "inspect", "x"], "resilient help RES-A"),
        ("resilient ckpt prune --keep-last 3 --dry-run", ["ckpt", "prune", "x", "--dry-run"],
         "resilient ckpt prune x --keep-last 3 --dry-run"),
        ("resilient ckpt prune --keep-last 3 --dry-run", ["--json", "ckpt", "prune", "x"],
         "resilient --json ckpt prune x --keep-last 3 --dry-run"),
        ("resilient ckpt x --grace 0", ["ckpt", "x", "--grace", "7d", "--grace=8d", "y"],
         "resilient ckpt x y --grace 0"),
        ("resilient ckpt prune --yes", ["ckpt", "prune", "--yes", "x"], "resilient help RES-A"),
        ("resilient ckpt x --grace 0", ["ckpt", "x", "--grace", "0"], "resilient help RES-A"),
        ("it's no command", ["x"], "it's no command"),
    ],
)  # fmt: skip
def test_a_hint_that_repeats_what_failed_becomes_another(hint, given, expected):
    assert drop_useless_hint(hint, given, "RES-A") == expected
