"""What `ckpt inspect` says of checkpoints of other tools, as transcripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "options"),
    [("foreign", ()), ("foreign-json", ("--json",)), ("foreign-plain", ("--format", "plain"))],
)
def test_a_checkpoint_of_transformers_is_told(run, call, matches, name, options):
    outcome = call("ckpt", "inspect", run / "checkpoint-8", *options)
    matches(name, outcome, run)


def test_tensors_are_listed_when_asked_for(run, call):
    outcome = call("ckpt", "inspect", run / "checkpoint-8", "--tensors", "--json")
    document = json.loads(outcome.stdout)
    assert len(document["tensors"]) == sum(one["tensors"] for one in document["parts"])
    quiet = call("ckpt", "inspect", run / "checkpoint-8", "-q")
    assert quiet.stdout == f"{run / 'checkpoint-8'}\n"


def test_a_loss_is_told_and_is_no_failure(run, call, matches):
    (run / "checkpoint-8" / "optimizer.pt").unlink()
    matches("foreign-loss", call("ckpt", "inspect", run / "checkpoint-8"), run)


def test_what_cannot_be_resumed_answers_no_with_the_command_that_helps(run, call, matches):
    (run / "checkpoint-8" / "trainer_state.json").unlink()
    matches("foreign-no", call("ckpt", "inspect", run / "checkpoint-8"), run)


def test_a_broken_one_points_to_one_beside_it(run, call):
    shutil.copytree(run / "checkpoint-8", run / "checkpoint-12")
    (run / "checkpoint-12" / "model.safetensors").write_bytes(b"\0" * 20)
    outcome = call("ckpt", "inspect", run / "checkpoint-12", "--json")
    answer = json.loads(outcome.stdout)["resumable"]
    assert (outcome.status, answer["answer"]) == (1, "no")
    assert answer["command"] == f"resilient ckpt inspect {run / 'checkpoint-8'}"


@pytest.mark.parametrize("is_hurt", [False, True], ids=["saved-so", "hurt-too"])
def test_no_repair_is_named_where_it_mends_nothing(run, call, is_hurt):
    weights = run / "checkpoint-8" / "model.safetensors"
    tensors = load_file(weights)
    name = next(one for one in sorted(tensors) if tensors[one].dtype == np.float32)
    tensors[name].flat[0] = np.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    if is_hurt:
        (run / "checkpoint-8" / "trainer_state.json").unlink()
    told = call("ckpt", "verify", run / "checkpoint-8")
    assert told.status == 1
    assert (f"ckpt repair {run / 'checkpoint-8'}" in told.stdout) == is_hurt
    assert "none: it was saved like that, so resume an earlier step" in told.stdout


def test_verify_reads_every_byte_of_it(run, call, matches):
    whole = call("ckpt", "verify", run / "checkpoint-8", "--json")
    read = json.loads(whole.stdout)
    # Files that are no part of it are not read, and none counts twice.
    assert read["size_bytes"] * 0.9 < read["read_bytes"] <= read["size_bytes"]
    document = json.loads(whole.stdout)
    assert (whole.status, document["problems"]) == (0, [])
    path = run / "checkpoint-8" / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert call("ckpt", "inspect", run / "checkpoint-8").status == 0
    assert call("ckpt", "verify", run / "checkpoint-8", "--level", "quick").status == 0
    matches("foreign-verify", call("ckpt", "verify", run / "checkpoint-8"), run)


def test_a_run_is_no_checkpoint_and_its_newest_is_named(run, call, matches):
    matches("foreign-run", call("ckpt", "inspect", run), run)


def test_a_name_with_terminal_escapes_is_shown_harmless(run, call):
    (run / "checkpoint-8" / "model.safetensors").unlink()
    hostile = {"\x1b]0;owned\x07": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    head = json.dumps(hostile).encode()
    whole = len(head).to_bytes(8, "little") + head + bytes(4)
    (run / "checkpoint-8" / "model.safetensors").write_bytes(whole)
    outcome = call("ckpt", "inspect", run / "checkpoint-8", "--tensors")
    assert "owned" in outcome.stdout
    assert "\x1b" not in outcome.stdout
    assert "\x07" not in outcome.stdout


def test_a_folder_of_checkpoints_names_one_of_them_to_who_verifies_it(run, call):
    outcome = call("ckpt", "verify", run)
    assert outcome.status == 65
    assert "resilient ckpt inspect" in outcome.stderr
    assert "/checkpoint-" in outcome.stderr
