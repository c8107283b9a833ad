"""A script of Transformers trains here with its import changed and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process.gangs import ROOT

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("adapters")]
STOCK = Path(__file__).with_name("stock_clm.py")
OPTIONS = (
    *("--do_train", "--do_eval", "--max_steps", "30", "--save_steps", "5", "--use_cpu"),
    *("--eval_strategy", "steps", "--eval_steps", "10", "--logging_steps", "5"),
    *("--lr_scheduler_type", "cosine", "--torch_dtype", "auto", "--learning_rate", "1e-3"),
    *("--per_device_train_batch_size", "4", "--report_to", "none", "--disable_tqdm", "true"),
)
IMPORTS = {
    "from transformers import HfArgumentParser": "from resilient import HfArgumentParser",
    "from transformers.trainer_utils import": "from resilient.trainer_utils import",
}


@pytest.fixture
def changed(tmp_path):
    """Return the script with its import changed."""
    text = STOCK.read_text(encoding="utf-8")
    for stock, ours in IMPORTS.items():
        assert text.count(stock) == 1
        text = text.replace(stock, ours)
    script = tmp_path / "clm.py"
    script.write_text(text, encoding="utf-8")
    return script


def start(script, folder, *options):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, str(script), "--output_dir", str(folder / "out"), *OPTIONS, *options],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Return what the script writes at its end: hash of the weights, losses, perplexity."""
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert "distributed training: False, scheduler: SchedulerType.COSINE" in said
    return json.loads(re.search(r"^end: (.*)$", said, re.MULTILINE)[1])


def test_losses_equal_those_of_transformers(tmp_path, changed):
    stock = finish(start(STOCK, tmp_path / "stock"))
    ours = finish(start(changed, tmp_path / "ours", "--random_numbers", "transformers"))
    for (step, loss), (their_step, theirs) in zip(ours["losses"], stock["losses"], strict=True):
        assert (step, loss) == (their_step, pytest.approx(theirs, abs=1e-4))
    assert ours["perplexity"] == pytest.approx(stock["perplexity"])
    names = {"README.md", "all_results.json", "model.safetensors", "trainer_state.json"}
    assert names <= {path.name for path in (tmp_path / "ours" / "out").iterdir()}


def test_a_killed_script_ends_as_one_that_was_not(tmp_path, changed):
    whole = finish(start(changed, tmp_path / "whole"))
    with start(changed, tmp_path / "killed") as process:
        manifest = tmp_path / "killed" / "out" / "checkpoint-15-g1" / "manifest.json"
        for _ in range(20_000):
            if manifest.exists():
                break
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        process.kill()
    again = start(changed, tmp_path / "killed")
    assert finish(again) == whole
