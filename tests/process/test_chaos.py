"""`resilient chaos run` on real trainings: one that keeps its promises, and one that cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from resilient.goodput.event_log import read_records
from resilient.goodput.report import build_report
from resilient.testing.chaos.clock_shift import why_not_moving

PLAN = """
[[fault]]
kind = "kill"
at = 0.4

[[fault]]
kind = "bit_flip"
at = 0.65
"""

CLOCK = """
[[fault]]
kind = "clock_skew"
seconds = -7200
at = 0.2

[[fault]]
kind = "kill"
at = 0.4

[[fault]]
kind = "clock_skew"
seconds = 86400
at = 0.6

[[fault]]
kind = "preempt"
at = 0.8
"""

UNSEEDED = """
import os, sys, torch
from resilient import Trainer, TrainingArguments

class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        noise = torch.tensor(list(os.urandom(4)), dtype=torch.float32)
        return {"loss": ((self.weight - x - noise) ** 2).sum()}

torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=6, save_steps=3, use_cpu=True, disable_tqdm=True
)
data = [{"x": torch.ones(4)} for _ in range(64)]
Trainer(Noisy(), arguments, train_dataset=data).train()
"""


def chaos(tmp_path, plan, *command):
    words = ("run", plan, "--seed", "3", "--within", "100", "--folder", str(tmp_path / "runs"))
    return subprocess.run(
        [sys.executable, "-m", "resilient_cli", "--json", "chaos", *words, "--", "train", *command],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


def states(ended):
    promises = json.loads(ended.stdout)["promises"]
    return {one["name"]: one["state"] for one in promises}


@pytest.mark.long
def test_a_training_that_survives_a_kill_and_a_flipped_bit_keeps_its_promises(tmp_path):
    plan = tmp_path / "two.toml"
    plan.write_text(PLAN, encoding="utf-8")
    script = str(Path(__file__).with_name("workload.py"))
    options = ("--output-dir", "{folder}", "--steps", "30", "--pause", "0.1")
    ended = chaos(tmp_path, str(plan), script, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdict = json.loads(ended.stdout)
    assert [one["kind"] for one in verdict["faults"]] == ["kill", "bit_flip"]
    assert [one["exit"] for one in verdict["faults"]] == [None, 137]
    assert all(one["restored"] for one in verdict["faults"])
    found = states(ended)
    assert {name for name, state in found.items() if state != "kept"} == {"one_writer"}
    assert found["one_writer"] == "untested"
    assert verdict["missed"] == []


@pytest.mark.long
@pytest.mark.skipif(bool(why_not_moving()), reason=why_not_moving())
def test_a_training_whose_clock_jumps_keeps_its_promises(tmp_path):
    plan = tmp_path / "clock.toml"
    plan.write_text(CLOCK, encoding="utf-8")
    script = str(Path(__file__).with_name("workload.py"))
    options = ("--output-dir", "{folder}", "--steps", "30", "--pause", "0.1")
    ended = chaos(tmp_path, str(plan), "--nproc-per-node", "2", script, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdict = json.loads(ended.stdout)
    assert [one["what"] for one in verdict["faults"][::2]] == [
        "the time of day jumps by -7200 s",
        "the time of day jumps by +86400 s",
    ]
    # A jump ends no life, and nothing is trained twice for it.
    assert [one["exit"] for one in verdict["faults"]] == [None, None, None, 75]
    assert [bool(one["restored"]) for one in verdict["faults"]] == [False, True, False, True]
    found = states(ended)
    assert found["exactly_once"] == found["exact"] == found["survival"] == "kept"
    told = (tmp_path / "runs" / "struck" / "events" / "rank-0.jsonl").read_text().splitlines()
    days = [datetime.fromisoformat(json.loads(line)["at"]) for line in told]
    # Else nothing was moved, and nothing was tested.
    assert max(days) - min(days) > timedelta(hours=23)
    spent = build_report(read_records([tmp_path / "runs" / "struck" / "events"]))
    assert sum(spent.spent_ms.values()) == spent.wall_ms
    assert spent.wall_ms < 220_000, "no jump is in the account"
    assert all(one.length_ms > 0 for one in spent.intervals)


def test_a_script_with_a_random_stream_of_its_own_is_found_out(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNSEEDED, encoding="utf-8")
    ended = chaos(tmp_path, "calm", str(script), "{folder}")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert states(ended)["exact"] == "BROKEN"
    verdict = json.loads(ended.stdout)
    assert any("weight" in one for one in verdict["differences"])
    assert verdict["command"].startswith("resilient chaos run calm --folder ")
    assert " --within 100 --seed 3 -- train " in verdict["command"]
