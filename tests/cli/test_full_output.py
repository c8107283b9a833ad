"""A stdout that takes no more: said as what it is, with an exit code of the table."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.cli_repositories import write_usual_run


@pytest.fixture
def repo(tmp_path):
    write_usual_run(tmp_path / "run")
    return tmp_path / "run"


def told(repo, *words):
    """Run the program with a full device for a stdout."""
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 - a device
        return subprocess.run(
            [sys.executable, "-m", "resilient_cli", *map(str, words)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=repo.parent,
            timeout=120,
        )


@pytest.mark.parametrize(
    "words",
    [
        ("ckpt", "ls", "run"),
        ("ckpt", "ls", "run", "--json"),
        ("ckpt", "cat", "latest", "state.json", "run"),
        ("ckpt", "cat", "latest", "other/model.wte.weight", "run", "--raw"),
    ],
)
def test_a_full_disk_is_told_and_is_no_bug_of_ours(repo, words):
    done = told(repo, *words)
    assert done.returncode == 73
    assert "could not be written completely to stdout" in done.stderr
    assert "No space left on device" in done.stderr
    assert "RES-STORE-507" in done.stderr
    assert "unexpected" not in done.stderr
    assert "Exception ignored" not in done.stderr, "the end of the process tries once more"


def test_a_program_gets_it_as_json(repo):
    done = told(repo, "ckpt", "ls", "run", "--json")
    document = json.loads(done.stderr.splitlines()[-1])
    assert (document["exit"], document["code"], document["hint"]) == (73, "RES-STORE-507", "df -h")
