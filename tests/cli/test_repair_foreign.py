"""What `ckpt repair` does with checkpoints of other tools, as transcripts."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers"


@pytest.fixture
def checkpoint(tmp_path):
    run = shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "run")
    return Path(run) / "checkpoint-8"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_plan_is_shown_and_carried_out_only_when_it_is_asked_for(checkpoint, call, matches):
    state = checkpoint / "trainer_state.json"
    state.write_text(state.read_text()[:900])
    before = contents(checkpoint.parent)
    matches("repair-foreign", call("ckpt", "repair", checkpoint), checkpoint.parent)
    assert contents(checkpoint.parent) == before
    outcome = call("ckpt", "repair", checkpoint, "--apply", "--json")
    matches("repair-foreign-json", outcome, checkpoint.parent)
    made = checkpoint.parent / "repaired" / "checkpoint-8"
    verified = call("ckpt", "verify", made, "--json")
    assert (verified.status, json.loads(verified.stdout)["resumable"]["answer"]) == (1, "partly")
    assert {
        one: data for one, data in contents(checkpoint.parent).items() if one in before
    } == before


@pytest.mark.parametrize("flos", [1.2e19, 3 * 10**24, 0])
def test_a_run_may_have_made_any_number_of_operations(checkpoint, call, flos):
    path = checkpoint / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "total_flos": flos}))
    told = json.loads(call("ckpt", "verify", checkpoint, "--json").stdout)
    assert told["resumable"]["answer"] == "yes"


@pytest.mark.parametrize(
    ("name", "lost"), [("total_flos", "counts"), ("train_batch_size", "batch size")]
)
def test_a_number_that_is_none_is_written_anew(checkpoint, call, name, lost):
    path = checkpoint / "trainer_state.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({**held, name: None}))
    assert call("ckpt", "verify", checkpoint).status == 1
    told = call("ckpt", "repair", checkpoint, "--apply", "--json").stdout
    assert lost in json.loads(told)["losses"]
    made = checkpoint.parent / "repaired" / "checkpoint-8"
    assert call("ckpt", "verify", made).status == (1 if name == "train_batch_size" else 0)
    found = json.loads((made / "trainer_state.json").read_text())
    assert found == {**held, name: 0}


def test_another_copy_and_another_place_are_options(checkpoint, call, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (checkpoint / "model.safetensors").unlink()
    options = ("--from", copy, "--out", tmp_path / "new", "--apply")
    assert call("ckpt", "repair", checkpoint, *options).status == 0
    assert call("ckpt", "verify", tmp_path / "new").status == 0
    again = call("ckpt", "repair", checkpoint, *options)
    assert again.status == 78
    assert "exists already" in again.stderr


def test_what_is_saved_of_a_hopeless_one_is_told(checkpoint, call, matches):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    outcome = call("ckpt", "repair", checkpoint)
    assert outcome.status == 1
    matches("repair-foreign-saves", outcome, checkpoint.parent)
    weights.write_bytes(b"")
    outcome = call("ckpt", "repair", checkpoint, "--apply", "--json")
    answer = json.loads(outcome.stdout)
    assert (outcome.status, answer["done"], answer["target"]) == (1, False, None)


def test_a_whole_one_needs_nothing(checkpoint, call):
    outcome = call("ckpt", "repair", checkpoint, "--apply")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert "nothing to repair" in outcome.stdout
    assert not (checkpoint.parent / "repaired").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path, call):
    (tmp_path / "notes.txt").write_text("x")
    assert call("ckpt", "repair", tmp_path).status == 65


def test_what_nothing_here_has_is_said_and_not_called_whole(checkpoint, call):
    (checkpoint / "rng_state.pth").unlink()
    outcome = call("ckpt", "repair", checkpoint)
    assert "no random states are saved, and they are lost" in outcome.stdout
    assert "are created from the script's seed" in outcome.stdout
    assert "whole" not in outcome.stdout


def test_printed_command_works_when_it_is_copied(checkpoint, call, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "a copy" / checkpoint.name)
    (checkpoint / "rng_state.pth").unlink()
    out = tmp_path / "made of two"
    told = call("ckpt", "repair", checkpoint, "--from", copy, "--out", out)
    assert told.status == 0
    line = next(one for one in told.stdout.splitlines() if one.startswith("To write it: "))
    words = shlex.split(line.removeprefix("To write it: "))
    assert call(*words[1:]).status == 0
    assert call("ckpt", "verify", out).status == 0


def test_repair_without_effect_on_a_damaged_checkpoint_ends_with_1(checkpoint, call):
    (checkpoint / "rng_state.pth").unlink()
    assert call("ckpt", "verify", checkpoint).status == 1
    assert call("ckpt", "repair", checkpoint).status == 1
    assert call("ckpt", "inspect", checkpoint).status == 0


def test_latest_after_a_repair_is_one_checkpoint(checkpoint, call):
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-6"))
    (checkpoint / "config.json").write_text("{")
    assert call("ckpt", "repair", checkpoint, "--apply").status in (0, 1)
    found = call("ckpt", "inspect", "latest", checkpoint.parent, "--json")
    assert json.loads(found.stdout)["url"] == str(checkpoint)


def test_save_cut_short_points_at_the_newest_complete_step(checkpoint, call):
    newer = Path(shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-12")))
    for one in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (newer / one).unlink()
    told = call("ckpt", "verify", newer, "--json")
    assert told.status == 1
    said = json.loads(told.stdout)["resumable"]
    assert "incomplete checkpoint" in said["why"][0]
    assert said["command"] == f"resilient ckpt inspect {checkpoint}"
    assert call("ckpt", "repair", newer, "--apply").status == 1
    assert not newer.with_name("repaired").exists()


def test_state_of_an_older_version_is_filled_up(checkpoint, call):
    held = json.loads((checkpoint / "trainer_state.json").read_text())
    other = Path(shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-4")))
    (other / "trainer_state.json").write_text(json.dumps({**held, "global_step": 4}))
    newer = ("train_batch_size", "stateful_callbacks", "num_input_tokens_seen", "best_global_step")
    old = {key: one for key, one in held.items() if key not in newer}
    (checkpoint / "trainer_state.json").write_text(json.dumps(old))
    assert call("ckpt", "verify", checkpoint).status == 1
    made = json.loads(call("ckpt", "repair", checkpoint, "--apply", "--json").stdout)
    assert (made["whole"], made["losses"]) == (True, {})
    made = checkpoint.parent / "repaired" / "checkpoint-8" / "trainer_state.json"
    found = json.loads(made.read_text())
    assert found["train_batch_size"] == held["train_batch_size"]
    assert {key: found[key] for key in old} == old
    assert set(found["stateful_callbacks"]) == {"TrainerControl"}
