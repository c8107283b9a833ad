"""A URL where a local path is meant is refused: nothing is written to a folder called ``s3:``."""

from __future__ import annotations

import shlex

import pytest

from tests.helpers.cli_repositories import write_usual_run

WORDS = {
    "export": ("ckpt", "export", "latest", "run", "--format", "safetensors", "--out"),
    "repair --out": ("ckpt", "repair", "run/checkpoint-20-g1", "--apply", "--out"),
    "repair --rebuild": ("ckpt", "repair", "latest", "run", "--rebuild"),
    "init": ("init",),
    "report": ("report", "run", "-o"),
    "diff": ("ckpt", "diff", "latest", "latest~1", "run", "--html"),
}


@pytest.mark.parametrize("url", ["s3://bucket/x", "s3:/bucket/x", "https://host/x.html"])
@pytest.mark.parametrize("name", WORDS)
def test_a_url_is_no_folder_of_this_machine(name, url, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    write_usual_run(tmp_path / "run")
    outcome = call(*WORDS[name], url)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "; nothing was written" in outcome.stderr
    hint = shlex.split(outcome.stderr.partition("hint: ")[2])
    assert hint[0] == "resilient"
    assert url not in hint
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_url_of_this_machine_is_a_path(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    outcome = call("init", f"file://{tmp_path}/mine")
    assert outcome.status == 0, outcome.stderr
    assert (tmp_path / "mine" / "train.py").is_file()
