"""A run begins at step 0 only where no checkpoint of any layout lies, or on request."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from resilient import Checkpointer
from resilient.errors import NothingToResume, StartOverRefused
from resilient.start_guard import (
    LOOP,
    STOCK_TRAINER,
    TRAINER,
    StartGuard,
    checkpoints_in_folder,
    checkpoints_in_store,
)
from resilient.storage.open import open_store
from tests.helpers.hf_runs import HERE
from tests.unit.train.interop.test_taking_newest import flip_byte

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
    "lightning deepspeed": (
        "epoch=0-step=8.ckpt",
        {
            "latest": "checkpoint",
            "checkpoint/mp_rank_00_model_states.pt": "x",
            "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt": "x",
        },
    ),
    "megatron torch": (
        "iter_0000010",
        {"mp_rank_00/model_optim_rng.pt": "x", "mp_rank_01/model_optim_rng.pt": "x"},
    ),
    "step folder": ("epoch_3", {"model.pt": "x", "optimizer.pt": "x"}),
}
LIGHTNING = {"epoch=0-step=8.ckpt": "x"}
PLACES = {
    "csv logger": ("exp/version_0/checkpoints", LIGHTNING),
    "logger without a name": ("version_3/checkpoints", LIGHTNING),
    "wandb logger": ("project/1a2b3c4d/checkpoints", LIGHTNING),
    **{name: (name, LIGHTNING) for name in ("ckpt", "ckpts", "checkpoints", "my_checkpoints")},
    "nested": (
        "lightning_logs/version_0/checkpoints/epoch=0-step=8.ckpt",
        KINDS["lightning deepspeed"][1],
    ),
    "logger, sharded": (
        "exp/version_0/checkpoints/epoch=0-step=8.ckpt",
        KINDS["lightning deepspeed"][1],
    ),
    "beside": ("checkpoints/iter_0000010", KINDS["megatron torch"][1]),
    **{
        name: (".", {name: "x"})
        for name in (
            "resume.pth.tar",
            "checkpoint.pth.tar",
            "checkpoint_0010.pt.tar",
            "checkpoint.tar",
            "snapshot.pt",
            "latest.pt",
            "training_state.pt",
            "model_10.pth",
            "model-00020.pt",
            "last.ckpt",
            "net_epoch_3.pth",
            "resume.pth",
        )
    },
}


def place_checkpoint(folder, layout):
    """Write the file names of one layout, and return where they are."""
    name, files = KINDS[layout]
    for file, text in files.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / name


@pytest.mark.parametrize("place", PLACES)
def test_guard_sees_checkpoints_where_people_keep_them(place, tmp_path):
    folder, files = PLACES[place]
    for name in files:
        (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text("x")
    found = checkpoints_in_folder(tmp_path)
    assert len(found) == 1, found
    assert folder in found[0].path or folder == "."
    store = open_store(f"memory://guard-place-{len(place)}-{sorted(PLACES).index(place)}")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(tmp_path)), b"x")
    in_store = [one.path.removeprefix(f"{store.url}/") for one in checkpoints_in_store(store)]
    assert in_store == [one.path.removeprefix(f"{tmp_path}/") for one in found]


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
        ["models/bert/model.safetensors", "models/bert/config.json"],
        ["bert/pytorch_model.bin", "bert/config.json", "bert/training_args.bin"],
        ["finished_run/model.safetensors", "finished_run/trainer_state.json"],
        ["resnet50-0676ba61.pth", "vgg16.pth", "sam_vit_h_4b8939.pth"],
        ["train-000001.tar", "data/step_1/part-0.arrow", "data/train.pt"],
        ["other/checkpoints/epoch=0.ckpt", "other/run/version_0/checkpoints/epoch=0.ckpt"],
        ["step_1/data-00000.arrow", "epoch_3/config.json"],
        ["wandb/run-20250101_000000-abcd/files/config.yaml"],
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


@pytest.fixture
def trained(tmp_path):
    """Return a run's folder with two real checkpoints of Transformers, steps 7 and 8."""
    for step in (7, 8):
        shutil.copytree(HERE / "reg_sgd" / "run" / "checkpoint-7", tmp_path / f"checkpoint-{step}")
    state = tmp_path / "checkpoint-8" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 7', '"global_step": 8'))
    return tmp_path


def refused(folder, door=TRAINER):
    with pytest.raises(StartOverRefused) as told:
        StartGuard(door, (str(folder),)).check(open_store("memory://guard-empty"))
    return told.value


def test_guard_newest_is_damaged_names_the_newest_intact(trained):
    (trained / "checkpoint-8" / "trainer_state.json").write_text("{")
    told = refused(trained)
    intact = trained / "checkpoint-7"
    assert f"there are 2 checkpoints, the newest at `{trained}/checkpoint-8`" in told.message
    assert "is not intact: trainer_state.json" in told.message
    assert f"the newest intact one is `{intact}`" in told.message
    assert f"resilient train --resume {intact} SCRIPT" in told.hint
    assert f"trainer.train(resume_from_checkpoint='{intact}')" in told.hint
    assert "checkpoint-8" not in told.hint


def test_guard_damage_that_only_bytes_show_names_the_newest_intact(trained):
    flip_byte(trained / "checkpoint-8" / "rng_state.pth", b"data/0")
    told = refused(trained)
    assert "rng_state.pth" in told.message
    assert f"the newest intact one is `{trained / 'checkpoint-7'}`" in told.message


def test_guard_no_checkpoint_is_intact_names_the_newest_with_a_loss(trained):
    (trained / "checkpoint-7" / "trainer_state.json").write_text("{")
    (trained / "checkpoint-8" / "rng_state.pth").unlink()
    assert (
        f"to continue with that loss: resilient train --resume {trained}/checkpoint-8 SCRIPT"
        in refused(trained).hint
    )


def test_guard_no_checkpoint_is_resumable_hints_no_resume(trained):
    for step in (7, 8):
        (trained / f"checkpoint-{step}" / "trainer_state.json").write_text("{")
    told = refused(trained)
    assert "the newest intact" not in told.message
    assert f"resilient ckpt verify {trained}/checkpoint-8;" in told.hint
    assert f"--resume {trained}" not in told.hint


@pytest.mark.parametrize("door", [LOOP, STOCK_TRAINER])
def test_guard_loop_that_imports_nothing_hints_no_resume_of_it(door, trained):
    told = refused(trained, door)
    assert "--resume /" not in told.hint
    assert "load `" in told.hint


def test_guard_large_checkpoint_is_judged_by_its_headers(trained, monkeypatch):
    monkeypatch.setattr("resilient.start_guard._VERIFIED_BYTES_MAX", 0)
    flip_byte(trained / "checkpoint-8" / "rng_state.pth", b"data/0")
    assert "rng_state.pth" not in refused(trained).message


def test_guard_one_checkpoint_is_singular(tmp_path):
    place_checkpoint(tmp_path, "dcp")
    assert "there is a checkpoint at" in refused(tmp_path).message


@pytest.mark.parametrize("place", ["checkpoints", "ckpts", "exp/version_0/checkpoints"])
def test_guard_own_repository_below_names_the_repository(place, tmp_path):
    with loop(tmp_path / place) as checkpointer:
        checkpointer.resume()
        for step in (9, 10):
            checkpointer.save(step)
    told = refused(tmp_path)
    assert "checkpoint-10-g1" in told.message
    assert f"resilient train --repo {tmp_path / place} SCRIPT" in told.hint


def test_guard_folder_of_data_does_not_hide_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("resilient.start_guard._FILES_MAX", 40)
    monkeypatch.setattr("resilient.start_guard._FILES_OF_FOLDER_MAX", 10)
    for number in range(60):
        for folder in (".", "cache", "a/b"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / f"part-{number}.arrow").write_text("x")
    place = place_checkpoint(tmp_path, "dcp")
    assert [one.path for one in checkpoints_in_folder(tmp_path)] == [str(place)]


def test_guard_store_with_more_names_than_the_limit_lists_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr("resilient.start_guard._FILES_MAX", 10)
    store = open_store("memory://guard-many")
    for number in range(40):
        store.put(f"cache/part-{number}.arrow", b"x")
    store.put("step-10/__0_0.distcp", b"x")
    assert [one.path for one in checkpoints_in_store(store)] == [f"{store.url}/step-10"]
