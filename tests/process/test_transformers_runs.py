"""Recorded runs of stock Hugging Face Trainer, gone on with here: same samples, same bits.

The recorded bits are those of one kind of processor. Where stock Transformers itself makes others,
its runs are made anew on this machine, from the recorded checkpoints, and ours must equal those.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hf_runs import SHARED, checkpoint_of, read_record, stock_file
from tests.process.gangs import ROOT

WORKER = Path(__file__).with_name("transformers_worker.py")
STOCK = Path(__file__).with_name("transformers_stock_worker.py")
CPU = Path("/proc/cpuinfo")
HAS_AVX2 = platform.machine() == "x86_64" and CPU.exists() and " avx2 " in CPU.read_text()
# The recorded bits are those of one thread that adds eight numbers at a time.
THEIR_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# Means of losses are told with six digits; of other arithmetic the last of them differ.
NEAR, FAR = 1e-6, 1e-3
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not HAS_AVX2, reason="the runs were recorded on AVX2"),
]
# What comes with the source, and what lies beside it.
HERE = ["gpt2_all:8", "gpt2_all:new", "reg_sgd:7", "reg_sgd:new"]
BESIDE = [
    "gpt2_all:16",
    "gpt2_all:24",
    "gpt2_single:24",
    "reg_sgd:21",
    "reg_earlystop:40",
    "gpt2_ga_uneven:new",
]
BESIDE += ["reg_earlystop:110", "gpt2_ga_uneven:3", "gpt2_ga_uneven:6"]


def run(*command):
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    ended = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **THEIR_CPU, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def is_their_arithmetic(tmp_path_factory):
    """Say whether stock Transformers makes the recorded bits here, too."""
    folder = tmp_path_factory.mktemp("arithmetic")
    cases = ["gpt2_all", "reg_sgd"]
    run(str(STOCK), str(folder), *(f"{case}:new" for case in cases))
    made = {case: json.loads(stock_file(folder, case, "new").read_text()) for case in cases}
    # Its samples are those of the record on any machine.
    for case in cases:
        assert [one for one, _ in made[case]] == [one for one, _ in read_record(case)["seen"]]
    return all(list(map(tuple, made[case])) == read_record(case)["seen"] for case in cases)


def go_on(folder, *command, near):
    run(*command)
    said = {one.stem: json.loads(one.read_text()) for one in folder.glob("*.json")}
    for one in said.values():
        assert one["misplaced"] == [], one
        assert one["differ"] == [], one
        assert one["rates"], one
        assert one["evaluated"][0] == pytest.approx(one["evaluated"][1], rel=near), one
        assert one["steps"][0] == one["steps"][1], one
        assert one["loss"][0] == pytest.approx(one["loss"][1], rel=near), one
    return said


def test_runs_of_one_process_go_on_to_the_bit(tmp_path, is_their_arithmetic):
    runs = HERE + (BESIDE if SHARED.is_dir() else [])
    if not is_their_arithmetic:
        # The last has ended, for us; a stock run would need its callback's state to know it.
        run(str(STOCK), str(tmp_path), *(one for one in runs if one != "reg_earlystop:110"))
    near = NEAR if is_their_arithmetic else FAR
    said = go_on(tmp_path, str(WORKER), str(tmp_path), *runs, near=near)
    assert len(said) == len(runs)
    assert said["gpt2_all-8-0"]["micro_batches"] == 24
    assert said["gpt2_all-new-0"]["micro_batches"] == 32
    assert said["reg_sgd-7-0"]["micro_batches"] == 33
    if SHARED.is_dir():
        assert said["gpt2_single-24-0"]["best"] == 32
        assert said["reg_earlystop-110-0"]["micro_batches"] == 0


def test_a_run_of_two_processes_goes_on_under_our_launcher(tmp_path, is_their_arithmetic):
    taken = checkpoint_of("gpt2_ddp2_all", 4)
    if not is_their_arithmetic:
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        run(*ranks, str(STOCK), str(tmp_path), "gpt2_ddp2_all:4", "gpt2_ddp2_all:new")
        for rank in range(2):
            # Here the launcher says the step.
            stock_file(tmp_path, "gpt2_ddp2_all", 4, rank).rename(
                stock_file(tmp_path, "gpt2_ddp2_all", 0, rank)
            )
    launcher = ("-m", "resilient_cli", "train", "--nproc-per-node", "2", "--resume", str(taken))
    said = go_on(
        tmp_path,
        *launcher,
        str(WORKER),
        str(tmp_path),
        *(f"gpt2_ddp2_all:{one}" for one in (0, "new")),
        near=NEAR if is_their_arithmetic else FAR,
    )
    assert sorted(one["micro_batches"] for one in said.values()) == [12, 12, 16, 16]
