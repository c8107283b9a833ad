"""The examples run as their users would run them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process import forked

ROOT = Path(__file__).resolve().parents[2]
LONG = {"gpt.py"}  # a model, options and a log of samples, for the demo


def run(*command, cwd, **environ):
    return forked.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **environ},
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("switch", "strategy"), [("USE_FSDP", "fsdp"), ("USE_DEEPSPEED", "zero-2")]
)
def test_the_language_model_is_cut_by_a_switch_and_survives_a_death(tmp_path, switch, strategy):
    if switch == "USE_DEEPSPEED":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    worker = str(Path(__file__).with_name("dying_example.py"))
    script = str(ROOT / "examples" / "gpt2_lm.py")
    for folder, die_at in (("whole", "0"), ("killed", "9")):
        words = ("train", "--nproc-per-node", "2", worker, script, folder, "14", die_at)
        ended = run("resilient_cli", *words, cwd=tmp_path, **{switch: "1"})
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert float(ended.stdout.split()[-1]) < 120, "it learns: 256 is to know nothing"
    killed = committed(open_store(str(tmp_path / "killed")))[0]
    assert killed.generation == 2, "it did die"
    manifest = read_manifest(open_store(str(tmp_path / "killed")), killed)
    assert manifest.world == {"size": 2, "strategy": strategy}
    assert differences(ending(tmp_path / "killed"), ending(tmp_path / "whole")) == []
    ours, expected = (
        load_file(tmp_path / one / "model" / "model.safetensors") for one in ("killed", "whole")
    )
    assert all(torch.equal(one, ours[name]) for name, one in expected.items())
    assert len(expected) > 20
