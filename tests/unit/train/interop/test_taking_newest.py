"""An output folder of Transformers' Trainer: the newest intact checkpoint is taken over."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.errors import (
    IncompatibleCheckpoint,
    NoIntactCheckpoint,
    NothingToResume,
    StartOverRefused,
)
from tests.helpers.hf_runs import HERE, SHARED, make, read_record


@pytest.fixture
def output(tmp_path):
    """Return the output folder of a recorded run: steps 7, 14 and so on."""
    folder = tmp_path / "out"
    shutil.copytree(HERE / "reg_sgd" / "run", folder)
    return folder


def steps_in(folder):
    names = [one.name.removeprefix("checkpoint-") for one in folder.glob("checkpoint-*")]
    return sorted((int(one) for one in names if one.isdigit()), reverse=True)


def copy_as_newer(folder):
    """Copy the newest checkpoint under the name of a higher step, and return that step."""
    newest = steps_in(folder)[0]
    shutil.copytree(folder / f"checkpoint-{newest}", folder / f"checkpoint-{newest + 1}")
    return newest + 1


def events_of(folder):
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_trained(run):
    return [one for one, _ in run.seen]


@pytest.mark.parametrize("wanted", [None, True])
def test_train_output_of_transformers_continues_from_the_newest(wanted, output):
    newest = steps_in(output)[0]
    run = make("reg_sgd", output)
    run.train(wanted)
    assert steps_trained(run) == [one for one, _ in read_record("reg_sgd")["seen"][newest:]]
    told = next(one for one in events_of(output) if one["event"] == "HFCheckpointImported")
    assert (told["step"], told["folder"]) == (newest, str(output / f"checkpoint-{newest}"))


def test_train_newest_is_damaged_falls_to_the_next_older(output):
    older = steps_in(output)[0]
    newest = copy_as_newer(output)
    (output / f"checkpoint-{newest}" / "optimizer.pt").write_bytes(b"PK damaged")
    run = make("reg_sgd", output)
    run.train()
    assert steps_trained(run) == [one for one, _ in read_record("reg_sgd")["seen"][older:]]
    skipped = [one for one in events_of(output) if one["event"] == "CheckpointSkipped"]
    assert [one["checkpoint"].rpartition("/")[2] for one in skipped] == [f"checkpoint-{newest}"]
    assert "optimizer.pt" in skipped[0]["reason"]


def flip_byte(file, marker):
    """Change one byte of the data behind a marker, which no header tells of."""
    data = bytearray(file.read_bytes())
    data[data.index(marker) + len(marker) + 64] ^= 1
    file.write_bytes(bytes(data))


def test_train_newest_fails_at_import_falls_to_the_next_older(tmp_path):
    if not (SHARED / "reg_sgd" / "run").is_dir():
        pytest.skip("the recorded runs are not here: ../shared/fixtures/hf")
    output = tmp_path / "out"
    shutil.copytree(SHARED / "reg_sgd" / "run", output)
    newest, older = steps_in(output)[:2]
    flip_byte(output / f"checkpoint-{newest}" / "rng_state.pth", b"data/0")
    run = make("reg_sgd", output)
    run.train()
    assert steps_trained(run) == [one for one, _ in read_record("reg_sgd")["seen"][older:]]
    skipped = [one for one in events_of(output) if one["event"] == "CheckpointSkipped"]
    assert [one["checkpoint"].rpartition("/")[2] for one in skipped] == [f"checkpoint-{newest}"]


def test_train_only_checkpoint_fails_at_import_is_refused(output):
    flip_byte(output / "checkpoint-7" / "rng_state.pth", b"data/0")
    run = make("reg_sgd", output)
    with pytest.raises(NoIntactCheckpoint, match=r"rng_state\.pth"):
        run.train()
    assert run.seen == []


@pytest.mark.parametrize("wanted", [None, True])
def test_train_no_intact_checkpoint_of_transformers_is_refused(wanted, output):
    for step in steps_in(output):
        (output / f"checkpoint-{step}" / "trainer_state.json").unlink()
    run = make("reg_sgd", output)
    with pytest.raises(NoIntactCheckpoint, match="no checkpoint of Transformers") as told:
        run.train(wanted)
    assert told.value.exit_code == 3
    assert "resume_from_checkpoint=False" in told.value.hint
    assert not list(output.glob("checkpoint-*-g*"))


def test_train_false_beside_checkpoints_of_transformers_starts_at_step_0(output):
    run = make("reg_sgd", output)
    run.train(resume_from_checkpoint=False)
    assert len(run.seen) == run.state.max_steps


def test_train_own_checkpoints_win_over_those_of_transformers(output):
    make("reg_sgd", output).train()
    again = make("reg_sgd", output)
    again.train()
    assert again.seen == []


def add_newer(output, *steps):
    """Add checkpoints of Transformers with later steps, as a run of stock Transformers does."""
    for step in steps:
        path = output / f"checkpoint-{step}"
        shutil.copytree(output / f"checkpoint-{steps_in(output)[0]}", path)
        state = json.loads((path / "trainer_state.json").read_text())
        (path / "trainer_state.json").write_text(json.dumps({**state, "global_step": step}))


@pytest.mark.parametrize("wanted", [None, True])
def test_train_names_later_checkpoints_of_transformers_once(wanted, output, capsys):
    make("reg_sgd", output, max_steps=2 + steps_in(output)[0]).train()
    capsys.readouterr()
    last = steps_in(output)[0]
    make("reg_sgd", output, max_steps=last).train(wanted)
    assert "ignores later ones" not in capsys.readouterr().err
    add_newer(output, last + 50, last + 60)
    make("reg_sgd", output, max_steps=last + 1).train(wanted)
    told = capsys.readouterr().err
    assert told.count("ignores later ones that Transformers saved beside it") == 1
    newest = f"checkpoint-{last + 60}"
    assert f"beside it: {newest}, checkpoint-{last + 50}; to continue from {newest}" in told
    assert f"resilient train --repo NEW --resume {output / newest} SCRIPT" in told
    event = [one for one in events_of(output) if one["event"] == "NewerCheckpointsIgnored"]
    assert [len(one["newer"]) for one in event] == [2]


def test_train_true_without_any_checkpoint_raises_value_error(tmp_path):
    run = make("reg_sgd", tmp_path / "out")
    with pytest.raises(ValueError, match="no checkpoint to resume from") as told:
        run.train(resume_from_checkpoint=True)
    assert isinstance(told.value, NothingToResume)
    assert not (tmp_path / "out" / "generations").exists()


def test_train_output_of_another_tool_is_refused(tmp_path):
    place = tmp_path / "out" / "global_step10"
    place.mkdir(parents=True)
    (place / "mp_rank_00_model_states.pt").write_bytes(b"x")
    run = make("reg_sgd", tmp_path / "out", repo=str(tmp_path / "repo"))
    with pytest.raises(StartOverRefused, match="global_step10"):
        run.train()


def change_file(file, change):
    """Load a torch file, change its value in place and save it."""
    value = torch.load(file, weights_only=False)
    change(value)
    torch.save(value, file)


def spoil_weights(folder):
    """Write an infinite number into the weights: only their bytes show the loss."""
    weights = load_file(folder / "model.safetensors")
    next(one for one in weights.values() if one.is_floating_point()).view(-1)[0] = float("inf")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def copy_as_older(output):
    """Write a checkpoint of one step before the only one, and return both steps."""
    newest = steps_in(output)[0]
    older = newest - 1
    source, folder = output / f"checkpoint-{newest}", output / f"checkpoint-{older}"
    shutil.copytree(source, folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    state["epoch"] *= older / newest
    state["global_step"] = older
    state["log_history"] = [one for one in state["log_history"] if one["step"] <= older]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    rate = json.loads((source / "trainer_state.json").read_text())["log_history"][-1][
        "learning_rate"
    ]

    def set_rate(optimizer):
        for group in optimizer["param_groups"]:
            group["lr"] = rate

    schedule = {"last_epoch": older, "_step_count": newest, "_last_lr": [rate, rate]}
    change_file(folder / "scheduler.pt", lambda one: one.update(schedule))
    change_file(folder / "optimizer.pt", set_rate)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: one * 0.5 if one.is_floating_point() else one for name, one in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return newest, older


def taken_and_skipped(output):
    told = events_of(output)
    taken = next(one["step"] for one in told if one["event"] == "HFCheckpointImported")
    skipped = [one for one in told if one["event"] == "CheckpointSkipped"]
    return taken, [(one["checkpoint"].rpartition("-")[2], one["reason"]) for one in skipped]


def test_train_newest_has_a_loss_takes_the_intact_older(output):
    newest, older = copy_as_older(output)
    spoil_weights(output / f"checkpoint-{newest}")
    make("reg_sgd", output).train()
    taken, skipped = taken_and_skipped(output)
    assert taken == older
    assert [one for one, _ in skipped] == [str(newest)]
    assert "loss of finite numbers in the weights" in skipped[0][1]


def test_train_all_have_a_loss_takes_the_newest(output):
    newest, older = copy_as_older(output)
    for step in (newest, older):
        spoil_weights(output / f"checkpoint-{step}")
    make("reg_sgd", output).train()
    assert taken_and_skipped(output) == (newest, [])
    told = next(one for one in events_of(output) if one["event"] == "ImportLossReported")
    assert told["lost"] == ["finite numbers in the weights"]


def test_train_only_checkpoint_lost_a_file_is_taken_with_that_loss(output):
    (output / "checkpoint-7" / "rng_state.pth").unlink()
    make("reg_sgd", output).train()
    assert taken_and_skipped(output) == (7, [])
    assert any(one["event"] == "ImportLossReported" for one in events_of(output))


def test_train_newest_is_damaged_and_older_has_a_loss_takes_the_older(output):
    newest, older = copy_as_older(output)
    (output / f"checkpoint-{newest}" / "optimizer.pt").write_bytes(b"PK damaged")
    spoil_weights(output / f"checkpoint-{older}")
    make("reg_sgd", output).train()
    taken, skipped = taken_and_skipped(output)
    assert (taken, [one for one, _ in skipped]) == (older, [str(newest)])


def test_train_strict_with_losses_only_is_refused(output):
    spoil_weights(output / "checkpoint-7")
    run = make("reg_sgd", output, strict_resume=True)
    with pytest.raises(IncompatibleCheckpoint, match="strict_resume refuses a loss"):
        run.train()
    assert not list(output.glob("checkpoint-*-g*"))


def test_train_strict_takes_the_intact_older(output):
    newest, older = copy_as_older(output)
    spoil_weights(output / f"checkpoint-{newest}")
    make("reg_sgd", output, strict_resume=True).train()
    assert taken_and_skipped(output)[0] == older


def test_train_named_checkpoint_with_a_loss_holds(output):
    newest, _ = copy_as_older(output)
    spoil_weights(output / f"checkpoint-{newest}")
    make("reg_sgd", output).train(str(output / f"checkpoint-{newest}"))
    assert taken_and_skipped(output)[0] == newest
