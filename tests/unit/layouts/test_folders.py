"""What is said of checkpoints of Transformers and torch is what their own libraries load."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from resilient.layouts.detect import read_layout
from resilient.layouts.model import MODEL, OPTIMIZER
from resilient.layouts.resumability import assess_resumability
from resilient.layouts.run_folder import checkpoints_in
from resilient.storage.folder import open_folder
from tests.helpers.sharded_folders import write_fsdp, write_zero

HERE = Path(__file__).parents[2] / "golden" / "transformers"
SHARED = Path(__file__).parents[4] / "shared" / "fixtures" / "hf"
GOLDEN = sorted(one for one in HERE.glob("*/run/checkpoint-*"))


def look(path):
    folder = open_folder(str(path))
    return read_layout(folder, folder.list())


def verdict(path):
    return assess_resumability(look(path), str(path))


def shapes(contents, part):
    return {one.name: (one.dtype, one.shape) for one in contents.tensors if one.part == part}


def expected_step(path):
    return int(path.name.partition("-")[2])


def check_trainer(path):
    """Hold everything said of a folder of the Trainer against what its files load as."""
    found = look(path)
    state = json.loads((path / "trainer_state.json").read_text())
    schedule = torch.load(path / "scheduler.pt", weights_only=True)
    lost = tuple(one.loses for one in found.problems)
    assert (found.layout, lost) == ("hf-trainer", ("the place in the data",) * is_stream(path))
    assert (found.step, found.epoch) == (state["global_step"], state["epoch"])
    assert found.schedule.step == schedule["last_epoch"] == expected_step(path)
    assert found.schedule.rates == tuple(schedule["_last_lr"])
    ranks = sorted(one.name for one in path.glob("rng_state*"))
    assert len(found.rng.ranks) == len(ranks) == found.world
    assert assess_resumability(found, str(path)).answer == ("partly" if is_stream(path) else "yes")
    return found


def is_stream(path):
    """Say whether it is of the run over data without a length, behind its first pass."""
    epoch = json.loads((path / "trainer_state.json").read_text())["epoch"]
    return "gpt2_iterable" in path.parts and epoch > 1


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.parts[-3])
def test_a_folder_of_the_trainer_is_what_its_files_load_as(path):
    found = check_trainer(path)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    names = {torch.float32: "F32", torch.int64: "I64"}
    held = {name: (names[one.dtype], tuple(one.shape)) for name, one in weights.items()}
    assert shapes(found, MODEL) == held
    optimizer = torch.load(path / "optimizer.pt", weights_only=True)
    state, groups = optimizer["state"], optimizer["param_groups"]
    held = sum(isinstance(one, torch.Tensor) for of in state.values() for one in of.values())
    assert len(shapes(found, OPTIMIZER)) == held
    assert found.optimizer.states == len(state)
    assert found.optimizer.params == sum(len(one["params"]) for one in groups)
    assert found.optimizer.rates == tuple(one["lr"] for one in groups)
    steps = {int(one["step"]) for one in state.values() if "step" in one}
    assert {found.optimizer.step} - {None} == steps


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded runs are not beside this clone")
def test_every_recorded_checkpoint_of_the_trainer_is_read_whole():
    folders = sorted(SHARED.glob("*/run/checkpoint-*"))
    titles = {check_trainer(one).title for one in folders}
    assert len(folders) > 40
    assert {one.partition(", ")[2].partition(" in ")[0] for one in titles} == {
        "", "FSDP with full state", "FSDP with sharded state", "DeepSpeed",
    }  # fmt: skip


@pytest.fixture
def trainer(tmp_path):
    source = next(one for one in GOLDEN if "gpt2_ddp2_all" in str(one))
    return Path(shutil.copytree(source, tmp_path / source.name))


@pytest.mark.parametrize(
    ("spoil", "answer", "why"),
    [
        (lambda at: (at / "optimizer.pt").unlink(), "partly", "optimizer's state and the schedule"),
        (lambda at: (at / "scheduler.pt").unlink(), "partly", "optimizer's state and the schedule"),
        (lambda at: (at / "rng_state_0.pth").unlink(), "partly", "random state"),
        (lambda at: (at / "rng_state_1.pth").write_bytes(b"x" * 90), "no", "rng_state_1.pth"),
        (lambda at: (at / "trainer_state.json").unlink(), "no", "trainer_state.json"),
        (lambda at: (at / "trainer_state.json").write_bytes(b""), "no", "empty"),
        (lambda at: (at / "trainer_state.json").write_bytes(b'{"epoch": 1'), "no", "JSON"),
        (lambda at: (at / "model.safetensors").unlink(), "no", "no weights"),
        (lambda at: cut(at / "model.safetensors"), "no", "model.safetensors"),
        (lambda at: cut(at / "optimizer.pt"), "no", "optimizer.pt"),
        (lambda at: (at / "checkpoint-is-incomplete.txt").touch(), "no", "never finished"),
    ],
)
def test_the_verdict_is_that_of_what_is_left(trainer, spoil, answer, why):
    spoil(trainer)
    found = verdict(trainer)
    assert found.answer == answer
    assert why in " ".join(found.why)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_a_folder_that_was_renamed_or_mixed_is_told(trainer):
    other = trainer.with_name("checkpoint-400")
    trainer.rename(other)
    assert "different steps" in look(other).problems[0].what


def test_the_command_for_a_lost_state_is_one_that_rebuilds_it(trainer):
    (trainer / "trainer_state.json").unlink()
    wanted = f"resilient ckpt repair {trainer}"
    assert verdict(trainer).command == wanted


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_state_of_fsdp_is_read_in_both_forms(trainer, kind):
    write_fsdp(trainer, kind)
    found = look(trainer)
    assert set(shapes(found, MODEL).values()) == {("F32", (1, 4)), ("F32", (1,))}
    assert found.optimizer.step == 7
    assert kind in found.title


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_says_how_many_ranks_it_had_and_which_of_them_is_gone(trainer, stage):
    write_zero(trainer, stage, 2)
    found = look(trainer)
    assert "DeepSpeed" in found.title
    assert found.world == 2
    assert found.optimizer.step == 7
    next(trainer.glob("*/*rank_1_mp_rank_00_optim_states.pt")).unlink()
    assert "part of rank 1 is missing" in " ".join(verdict(trainer).why)


@pytest.fixture
def distributed(tmp_path):
    state = {
        "model": {"w": torch.zeros(5, 3), "b": torch.zeros(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {"w": {"step": torch.tensor(9.0), "exp_avg": torch.zeros(5, 3)}},
                      "param_groups": [{"lr": 0.5, "params": ["w"]}]},
        "lr_scheduler": {"last_epoch": 9},
        "epoch": 3,
    }  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path / "step-9", no_dist=True)
    return tmp_path / "step-9"


def test_a_distributed_checkpoint_is_what_its_reader_says(distributed):
    found = look(distributed)
    theirs = dcp.FileSystemReader(distributed).read_metadata().state_dict_metadata
    tensors = {name: one for name, one in theirs.items() if hasattr(one, "size")}
    ours = {one.name: one.shape for one in found.tensors}
    assert ours == {name: tuple(one.size) for name, one in tensors.items()}
    assert (found.layout, found.world) == ("dcp", 1)
    assert {one.name: one.dtype for one in found.tensors}["model.b"] == "BF16"
    assert found.optimizer.step == 9
    assert assess_resumability(found, "there").why == ("the random state", "the place in the data")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda at: next(at.glob("*.distcp")).unlink(), "missing"),
        (lambda at: cut(next(at.glob("*.distcp"))), "too early"),
        (lambda at: (at / ".metadata").unlink(), "missing"),
        (lambda at: cut(at / ".metadata"), "pickle"),
    ],
)
def test_a_distributed_checkpoint_without_its_pieces_cannot_be_resumed(distributed, spoil, why):
    spoil(distributed)
    found = verdict(distributed)
    assert found.answer == "no"
    assert why in " ".join(found.why)


def test_a_file_that_the_index_does_not_know_is_told(distributed):
    (distributed / "__1_0.distcp").write_bytes(b"old")
    assert any(one.place == "__1_0.distcp" for one in look(distributed).problems)
    assert verdict(distributed).answer == "partly"


def test_a_training_state_of_a_script_is_understood_by_its_names(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 1,
        "epoch": 0,
    }
    torch.save({**state, "lr_scheduler": schedule.state_dict()}, path := tmp_path / "last.pt")
    found = look(path)
    assert (found.step, found.epoch, found.optimizer.step, found.schedule.step) == (1, 0.0, 1, 1)
    assert set(shapes(found, MODEL)) == {"model.weight", "model.bias"}
    assert assess_resumability(found, str(path)).why == ("the random state",)


def test_weights_alone_are_no_training(tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(), path := tmp_path / "weights.pt")
    found = verdict(path)
    assert found.answer == "no"
    assert found.command == f"torch.load('{path}', weights_only=True)"


def test_what_is_no_checkpoint_is_nothing(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    assert look(tmp_path) is None
    for step in (5, 20, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/x").touch()
    folder = open_folder(str(tmp_path))
    names = ["checkpoint-100", "checkpoint-20", "checkpoint-5"]
    assert checkpoints_in(folder.list()) == names
