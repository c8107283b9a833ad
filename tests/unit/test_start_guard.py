"""A run begins at step 0 only where no checkpoint of any layout lies, or on request."""

from __future__ import annotations

import json

import pytest
import torch

from resilient import Checkpointer
from resilient.errors import NothingToResume, StartOverRefused
from resilient.start_guard import (
    LOOP,
    TRAINER,
    StartGuard,
    checkpoints_in_folder,
    checkpoints_in_store,
)
from resilient.storage.open import open_store

KINDS = {
    "hf-trainer": ("checkpoint-20", {"trainer_state.json": "{}", "optimizer.pt": "x"}),
    "hf-model": ("checkpoint-20", {"model.safetensors": "x", "config.json": "{}"}),
    "accelerate": (
        "checkpoints/checkpoint_3",
        {"model.safetensors": "x", "optimizer.bin": "x", "random_states_0.pkl": "x"},
    ),
    "dcp": ("step-10", {".metadata": "x", "__0_0.distcp": "x"}),
    "deepspeed": (
        "global_step10",
        {"mp_rank_00_model_states.pt": "x", "zero_pp_rank_0_mp_rank_00_optim_states.pt": "x"},
    ),
    "megatron": ("iter_0000010", {"common.pt": "x", "metadata.json": "{}", "__0_0.distcp": "x"}),
    "file": ("lightning_logs/version_0/checkpoints", {"epoch=1-step=20.ckpt": "x"}),
}


def place_checkpoint(folder, layout):
    """Write the file names of one layout, and return where they are."""
    name, files = KINDS[layout]
    for file, text in files.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / name


def loop(folder):
    return Checkpointer(folder, model=torch.nn.Linear(2, 2))


@pytest.mark.parametrize("layout", KINDS)
def test_start_beside_checkpoints_of_any_layout_is_refused(layout, tmp_path):
    place = place_checkpoint(tmp_path, layout)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StartOverRefused, match="will not start at step 0") as told:
        loop(tmp_path).resume()
    assert str(place) in told.value.message
    assert "--resume never" in told.value.hint
    assert "checkpointer.resume('never')" in told.value.hint
    assert told.value.exit_code == 78
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("layout", KINDS)
def test_start_beside_checkpoints_by_never_begins(layout, tmp_path):
    place_checkpoint(tmp_path, layout)
    with loop(tmp_path) as checkpointer:
        assert checkpointer.resume("never") is None
        checkpointer.save(1)
    with loop(tmp_path) as checkpointer:
        assert checkpointer.resume() == 1


@pytest.mark.parametrize("layout", KINDS)
def test_guard_store_without_folders_sees_the_same(layout, tmp_path):
    place_checkpoint(tmp_path, layout)
    store = open_store(f"memory://guard-{layout}")
    for path in tmp_path.rglob("*"):
        key = str(path.relative_to(tmp_path))
        if path.is_file() and not path.name.startswith("."):
            store.put(key, path.read_bytes())
    found = [one.path.removeprefix(f"{store.url}/") for one in checkpoints_in_store(store)]
    named = [one.path.removeprefix(f"{tmp_path}/") for one in checkpoints_in_folder(tmp_path)]
    assert found == named
    assert len(found) == 1


def test_guard_folder_that_is_a_checkpoint_itself_is_found(tmp_path):
    folder = place_checkpoint(tmp_path, "hf-trainer")
    assert [one.path for one in checkpoints_in_folder(folder)] == [str(folder)]


def test_guard_output_folder_with_own_checkpoints_names_its_repository(tmp_path):
    with loop(tmp_path / "out") as checkpointer:
        checkpointer.resume()
        checkpointer.save(3)
    guard = StartGuard(TRAINER, (str(tmp_path / "out"),))
    with pytest.raises(StartOverRefused) as told:
        guard.check(open_store(str(tmp_path / "elsewhere")))
    assert "out/checkpoint-3-g1" in told.value.message
    assert f"--repo {tmp_path / 'out'}" in told.value.hint


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors", "config.json", "trainer_state.json"],  # the end of a finished run
        ["best.pt", "pretrained.pth", "data.pt"],
        ["other_run/checkpoint-20/trainer_state.json"],
        ["run-0/checkpoint-3-g1/manifest.json"],
        [".cache/checkpoint-20/trainer_state.json"],
        ["exported/model.safetensors"],
        ["log.jsonl", "events/rank-0.jsonl"],
        ["checkpoint-20/README.md"],
    ],
)
def test_guard_folder_without_checkpoints_of_the_run_allows(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({}))
    StartGuard(LOOP).check(open_store(str(tmp_path)))


def test_guard_required_checkpoint_is_missing_raises_value_error(tmp_path):
    guard = StartGuard(TRAINER, requires_checkpoint=True)
    with pytest.raises(ValueError, match="no checkpoint to resume from") as told:
        guard.check(open_store(str(tmp_path)))
    assert isinstance(told.value, NothingToResume)


@pytest.mark.parametrize("layout", KINDS)
def test_guard_finds_a_checkpoint_behind_a_link(layout, tmp_path):
    name = place_checkpoint(tmp_path / "a", layout).relative_to(tmp_path / "a").parts[0]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).symlink_to(tmp_path / "a" / name)
    with pytest.raises(StartOverRefused, match="will not start at step 0"):
        loop(tmp_path / "b").resume()


def test_guard_ends_in_a_folder_of_links_to_itself(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "checkpoint-2")
    assert checkpoints_in_folder(tmp_path) == []
    place = place_checkpoint(tmp_path, "dcp")
    assert str(place) in {found.path for found in checkpoints_in_folder(tmp_path)}


def test_guard_ignores_the_staging_folder_of_an_unfinished_save(tmp_path):
    place_checkpoint(tmp_path, "hf-trainer").rename(tmp_path / "tmp-checkpoint-30")
    assert checkpoints_in_folder(tmp_path) == []
    place = place_checkpoint(tmp_path, "hf-trainer")
    assert [found.path for found in checkpoints_in_folder(tmp_path)] == [str(place)]
