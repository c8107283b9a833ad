"""``resilient init``: each template trains, resumes, and is never written over another file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def start(folder, *words):
    """Run the script that was written, in its folder, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIENT_REPO": ""}
    environment.pop("RESILIENT_REPO")
    return subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["init", "init-json"])
def test_what_is_written_is_told(name, tmp_path, call, matches):
    outcome = call("init", tmp_path / "mine", *(["--json"] if name == "init-json" else []))
    assert outcome.status == 0
    assert {one.name for one in (tmp_path / "mine").iterdir()} == {"train.py", "train.toml"}
    matches(name, outcome, tmp_path)


def test_nothing_is_overwritten(tmp_path, call, matches):
    (tmp_path / "train.toml").write_text("mine", encoding="utf-8")
    outcome = call("init", tmp_path)
    assert outcome.status == 78
    assert (tmp_path / "train.toml").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "train.py").exists()
    matches("init-there", outcome, tmp_path)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("trainer", "hf", "accelerate")]


@pytest.mark.parametrize("template", ["plain", *SLOW])
def test_a_template_trains_and_a_second_start_goes_on(template, tmp_path, call):
    assert call("init", tmp_path, "--template", template).status == 0
    script = tmp_path / "train.py"
    words = ["--config", "train.toml"] if template == "trainer" else []
    for _ in range(2):
        ended = start(tmp_path, *words)
        assert ended.returncode == 0, ended.stderr
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
    listed = [call("ckpt", "ls", "-q", one).stdout for one in _repositories(tmp_path)]
    assert any(one.split() for one in listed)


def _repositories(folder):
    return sorted({one.parent for one in folder.glob("runs/**/generations")})
