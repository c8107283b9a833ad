"""Two real ranks, one of which meets a loss that is no number: both go back, and alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.train.data.ordering import epoch_order
from tests.helpers.endings import differences, ending
from tests.process.rollback_worker import BROKEN_STEP, SAMPLES, STEP_SAMPLES

WORKER = Path(__file__).with_name("rollback_worker.py")
BEGIN, END = 5 * STEP_SAMPLES, BROKEN_STEP * STEP_SAMPLES
WENT_BACK = "rolled back from step 7 to checkpoint-5-g1"


def run(folder, parallelism="ddp", *death):
    command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(WORKER), str(folder), parallelism, *death],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def audited(folder):
    command = [sys.executable, "-m", "resilient_cli", "audit", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def check_proven(folder):
    answer = audited(folder)
    assert answer["proven"]
    assert answer["place"]["step"] == 12
    assert answer["left_out"] == {"broken loss": END - BEGIN}


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gone-back")
    return folder, run(folder)


def check_what_was_trained(folder, said):
    order = epoch_order(SAMPLES, 0, 0).tolist()
    answers = [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(2)]
    # Steps 1 to 7 were begun, the checkpoint is of step 5, and seven more follow step 7's data.
    places = range((BROKEN_STEP + 7) * STEP_SAMPLES)
    for rank, answer in enumerate(answers):
        assert answer["skipped"] == [[0, BEGIN, 0, END]]
        assert answer["seen"] == [order[one] for one in places if one // 4 % 2 == rank]
    assert WENT_BACK in said
    assert "samples 40 to 56 of epoch 0 are skipped (1 of 3 times)" in said
    check_proven(folder)


def test_ranks_go_back_together(gone_back):
    check_what_was_trained(*gone_back)


@pytest.mark.long
def test_ranks_that_share_a_model_go_back_together(tmp_path):
    check_what_was_trained(tmp_path, run(tmp_path, "fsdp"))


def test_two_runs_that_went_back_have_the_same_bits(gone_back, tmp_path):
    run(tmp_path)
    assert differences(ending(tmp_path), ending(gone_back[0])) == []


@pytest.mark.long
def test_a_rank_that_is_killed_behind_the_data_meets_it_no_more(gone_back, tmp_path):
    said = run(tmp_path, "ddp", "8")
    assert (tmp_path / "death").exists()
    assert said.count(WENT_BACK) == 1, said
    assert differences(ending(tmp_path), ending(gone_back[0])) == []
    check_proven(tmp_path)
