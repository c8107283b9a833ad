"""The examples run as their users would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = {"gpt.py"}  # a model, options and a log of samples, for the demo


def run(*command, cwd, **environ):
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


def test_the_quickstart_trains_and_a_second_start_has_nothing_to_do(tmp_path):
    script = str(ROOT / "examples" / "quickstart.py")
    for expected in ("trained to step 1000", "resumed from checkpoint-1000-g1"):
        ended = run("resilient_cli", "train", script, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert expected in ended.stderr
    assert (tmp_path / "runs/quickstart/model.safetensors").exists()


@pytest.mark.parametrize("seed", ["3"])
def test_the_demo_ends_identical(tmp_path, seed):
    ended = run(
        "examples.demo", "--steps", "60", "--seed", seed, "--folder", str(tmp_path), cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "identical to the bit" in ended.stdout
    assert "DIFFERENT" not in ended.stdout


@pytest.mark.parametrize(
    "script", sorted((ROOT / "examples").glob("*.py")), ids=lambda one: one.name
)
def test_small_examples_are_short(script):
    assert script.name in LONG or script.read_text().count("\n") < 80
