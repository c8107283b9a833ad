"""What `ckpt repair` does with checkpoints of other tools, as transcripts."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.foreign_folders import train_further, write_slices

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
    train_further(other)
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


def test_inspect_empty_checkpoint_names_the_newest_complete_one(checkpoint, call):
    empty = checkpoint.with_name("checkpoint-24")
    empty.mkdir()
    for name in ("inspect", "verify"):
        outcome = call("ckpt", name, empty, "--json")
        told = json.loads(outcome.stdout)["resumable"]
        assert (outcome.status, told["answer"]) == (1, "no")
        assert "there is no file in it" in told["why"][0]
        assert shlex.split(told["command"]) == ["resilient", "ckpt", "inspect", str(checkpoint)]
    outcome = call("ckpt", "repair", empty)
    assert (outcome.status, outcome.stderr) == (1, "")
    assert "there is no file in it" in outcome.stdout


@pytest.mark.parametrize("has_sibling", [False, True])
def test_run_arguments_cut_verify_and_repair_agree(checkpoint, call, has_sibling):
    path = checkpoint / "training_args.bin"
    torch.save({"output_dir": "run", "learning_rate": 0.5}, path)
    whole = path.read_bytes()
    if has_sibling:
        sibling = checkpoint.with_name("checkpoint-4")
        sibling.mkdir()
        for name in ("trainer_state.json", path.name):
            shutil.copy(checkpoint / name, sibling)
    path.write_bytes(whole[: len(whole) // 2])
    assert call("ckpt", "verify", checkpoint).status == 0
    outcome = call("ckpt", "repair", checkpoint, "--apply")
    assert outcome.status == 0
    made = checkpoint.parent / "repaired" / "checkpoint-8" / "training_args.bin"
    assert made.exists() == has_sibling
    if has_sibling:
        assert made.read_bytes() == whole
    else:
        assert "note: training_args.bin: it is not a complete zip" in outcome.stdout


def huge(found):
    next(iter(found.values())).view(-1)[0] = 1e36


def other_shape(found):
    found["transformer.ln_f.weight"] = torch.ones(33)


@pytest.mark.parametrize("damage", [huge, other_shape], ids=lambda one: one.__name__)
def test_salvage_counts_a_tensor_with_damaged_numbers_as_lost(checkpoint, call, damage):
    weights = checkpoint / "model.safetensors"
    found = load_file(weights)
    before = {name: value.clone() for name, value in found.items()}
    damage(found)
    save_file(found, weights, {"format": "pt"})
    outcome = call("ckpt", "repair", checkpoint, "--apply")
    assert outcome.status == 1
    (name,) = [
        name
        for name, value in before.items()
        if value.shape != found[name].shape or not value.equal(found[name])
    ]
    assert f"Lost: 1 tensor: {name}." in outcome.stdout
    made = checkpoint.parent / "salvaged" / "checkpoint-8"
    assert name not in load_file(made / "model.safetensors.salvaged.safetensors")


def test_file_of_zeros_is_not_salvaged(checkpoint, call):
    weights = checkpoint / "model.safetensors"
    save_file({name: 0 * one for name, one in load_file(weights).items()}, weights)
    outcome = call("ckpt", "repair", checkpoint)
    assert outcome.status == 1
    assert "Nothing can be repaired" in outcome.stdout
    assert "Lost: 0" not in outcome.stdout


def test_place_that_exists_hint_keeps_the_copy(checkpoint, call, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy" / checkpoint.name)
    (checkpoint / "model.safetensors").unlink()
    options = ("--from", copy, "--apply")
    assert call("ckpt", "repair", checkpoint, *options).status == 0
    for _ in range(2):
        refused = call("ckpt", "repair", checkpoint, *options)
        (hint,) = [line for line in refused.stderr.splitlines() if "hint: " in line]
        assert call(*shlex.split(hint.partition("hint: ")[2])[1:]).status == 0


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "{}", "--sample", "5%"),
        ("verify", "--all", "{}"),
        ("cp", "{}", "other"),
        ("repair", "{}", "--rebuild", "other"),
        ("rollback", "latest", "{}"),
        ("reflog", "{}"),
    ],
    ids=lambda one: one[0],
)
def test_repository_command_on_slices_says_what_is_there(call, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("step-8").mkdir()
    write_slices({"w": torch.ones(3)}, tmp_path / "step-8")
    named = [one.format(tmp_path / "step-8") for one in words]
    outcome = call("ckpt", *named)
    assert (outcome.status, "is a checkpoint of another tool" in outcome.stderr) == (2, True)
    (tmp_path / "step-8" / ".metadata").unlink()
    outcome = call("ckpt", *named)
    assert outcome.status == 1
    assert "is damaged: .metadata: it is missing" in outcome.stderr
    assert call("ckpt", *words[:1], tmp_path / "absent").status != 1


def test_rebuild_of_a_whole_state_names_a_command_that_answers(checkpoint, call, tmp_path):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    outcome = call("ckpt", "repair", checkpoint, "--rebuild", tmp_path / "new")
    assert outcome.status == 78
    hint = outcome.stderr.partition("hint: ")[2]
    assert shlex.split(hint)[1:3] == ["ckpt", "verify"]
    assert call(*shlex.split(hint)[1:]).status == 1


def test_lost_optimizer_folder_offers_the_restart(call, tmp_path):
    path = tmp_path / "checkpoint-8"
    shutil.copytree(GOLDEN / "gpt2_all" / "run" / "checkpoint-8", path)
    (path / "optimizer.pt").unlink()
    outcome = call("ckpt", "repair", path)
    assert outcome.status == 1
    assert "A resume continues with the loss of the optimizer's state" in outcome.stdout
    assert f"resilient train SCRIPT --resume {path}" in outcome.stdout
