"""Runs of other tools, by the names in their folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from resilient.layouts.run_folder import checkpoints_of, pointed_at, referred, with_last
from resilient.storage.folder import DirectoryListing, open_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"


def run_of(*names):
    return checkpoints_of(DirectoryListing(dict.fromkeys(names, 10)))


def found(*names):
    return [(one.name, one.step, one.layout) for one in run_of(*names)]


TRAINER = ("trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state.pth")


def of_trainer(name):
    return [f"{name}/{one}" for one in TRAINER]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            [*of_trainer("checkpoint-9"), *of_trainer("checkpoint-10"), "runs/x/events.out"],
            [("checkpoint-10", 10, "hf-trainer"), ("checkpoint-9", 9, "hf-trainer")],
        ),
        # What the Trainer leaves when it is done, beside and around its checkpoints.
        (
            ["config.json", "model.safetensors", "trainer_state.json", *of_trainer("checkpoint-5")],
            [("checkpoint-5", 5, "hf-trainer")],
        ),
        (
            ["a/config.json", "a/model.safetensors", *of_trainer("a/checkpoint-5")],
            [("a/checkpoint-5", 5, "hf-trainer"), ("a", None, "hf-model")],
        ),
        # An engine in a checkpoint is a part of it; beside its tracker it is one.
        (
            [*of_trainer("checkpoint-8"), "checkpoint-8/global_step8/mp_rank_00_model_states.pt"],
            [("checkpoint-8", 8, "hf-trainer")],
        ),
        (
            ["latest", *(f"global_step{one}/mp_rank_00_model_states.pt" for one in (7, 12))],
            [("global_step12", 12, "deepspeed"), ("global_step7", 7, "deepspeed")],
        ),
        (
            [
                f"out/checkpoints/checkpoint_{one}/{name}"
                for one in (0, 1)
                for name in ("optimizer.bin", "random_states_0.pkl", "model.safetensors")
            ],
            [
                ("out/checkpoints/checkpoint_1", None, "accelerate"),
                ("out/checkpoints/checkpoint_0", None, "accelerate"),
            ],
        ),
        (
            ["v/checkpoints/epoch=1-step=20.ckpt", "v/checkpoints/last.ckpt", "v/hparams.yaml"],
            [
                ("v/checkpoints/epoch=1-step=20.ckpt", 20, "file"),
                ("v/checkpoints/last.ckpt", None, "file"),
            ],
        ),
        (
            ["step-10/.metadata", "step-10/__0_0.distcp", "step-20/.metadata"],
            [("step-20", 20, "dcp"), ("step-10", 10, "dcp")],
        ),
        # Parts, data and what a tool hides are none.
        (
            [
                *("rng.pt", "optimizer.pt", ".git/step_5.pt", ".cache/a/checkpoint_1.ckpt"),
                *("best.pt", "epoch_3.pt", "model-step-40.pth"),
            ],
            [
                ("model-step-40.pth", 40, "file"),
                ("epoch_3.pt", None, "file"),
                ("best.pt", None, "file"),
            ],
        ),
        # A metric is no step, an epoch orders, and a date and a stamp of time are whole.
        (
            ["epoch=1-val_loss=0.95.ckpt", "epoch=9-val_loss=0.12.ckpt"],
            [
                ("epoch=9-val_loss=0.12.ckpt", None, "file"),
                ("epoch=1-val_loss=0.95.ckpt", None, "file"),
            ],
        ),
        (
            ["val_loss=2.95-epoch=1.ckpt", "val_loss=1.12-epoch=9.ckpt"],
            [
                ("val_loss=1.12-epoch=9.ckpt", None, "file"),
                ("val_loss=2.95-epoch=1.ckpt", None, "file"),
            ],
        ),
        (
            ["model-1700000000009.pt", "model-1800000000001.pt", "model_best_0.95.pt"],
            [
                ("model-1800000000001.pt", None, "file"),
                ("model-1700000000009.pt", None, "file"),
                ("model_best_0.95.pt", None, "file"),
            ],
        ),
        (
            ["checkpoint_2_90000.pt", "checkpoint_5_100000.pt", "rng_state_0.pth"],
            [
                ("checkpoint_5_100000.pt", None, "file"),
                ("checkpoint_2_90000.pt", None, "file"),
            ],
        ),
        # One checkpoint, and no run.
        (TRAINER, []),
        (["latest", "notes.txt"], []),
    ],
)
def test_a_run_is_listed_by_its_names_newest_first(names, wanted):
    assert found(*names) == wanted


def names_of(reference, kept, latest=()):
    return [one.name for one in referred(reference, kept, latest)]


def test_references_mean_what_they_do_in_a_repository():
    kept = run_of("model.safetensors", *of_trainer("checkpoint-5"), *of_trainer("checkpoint-10"))
    assert names_of("latest", kept) == ["checkpoint-10"]
    assert names_of("latest~1", kept) == ["checkpoint-5"]
    assert names_of("step:5", kept) == names_of("checkpoint-5", kept) == ["checkpoint-5"]
    for reference in ("latest~2", "step:6", "best:x"):
        assert names_of(reference, kept) == []


def test_the_latest_is_what_a_tracker_names_and_of_each_run_its_own():
    kept = run_of(*(x for name in ("a/7", "a/9", "a/11", "b/4") for x in of_trainer(name)))
    assert names_of("latest", kept, {"a/9"}) == ["a/9", "b/4"]
    assert names_of("latest~1", kept, {"a/9"}) == ["a/7"]
    assert names_of("step:11", kept) == ["a/11"]


def made(place, names):
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    folder = open_folder(str(place))
    return folder, folder.list()


ENGINE = [f"global_step{one}/mp_rank_00_model_states.pt" for one in (5, 10)]
ITERATIONS = [f"iter_00000{one}/{name}" for one in (12, 24) for name in ("common.pt", ".metadata")]


@pytest.mark.parametrize("depth", ["", "a/"])
@pytest.mark.parametrize(
    ("names", "pointer", "tag", "wanted"),
    [
        (ENGINE, "latest", "global_step5", "global_step5"),
        (ENGINE, "latest", "global_step7", None),
        (ENGINE, "latest", "./global_step10/", "global_step10"),
        (["step-7.ckpt", "step-9.ckpt"], "latest", "step-7", "step-7.ckpt"),
        (ITERATIONS, "latest_checkpointed_iteration.txt", "12", "iter_0000012"),
        (ITERATIONS, "latest_checkpointed_iteration.txt", "13", None),
    ],
)
def test_what_a_tracker_names_is_told(tmp_path, depth, names, pointer, tag, wanted):
    made(tmp_path, [f"{depth}{one}" for one in names])
    (tmp_path / depth / pointer).write_text(f"{tag}\n")
    folder, listing = made(tmp_path, [])
    told = pointed_at(folder, listing, checkpoints_of(listing))
    assert told.latest == ({f"{depth}{wanted}"} if wanted else set())
    assert told.stale == ({} if wanted else {f"{depth}{pointer}": tag})


def test_a_tracker_that_names_what_is_no_checkpoint_of_a_known_layout_is_not_stale(tmp_path):
    folder, _ = made(tmp_path, ["iter_0000500/mp_rank_00/model_optim_rng.pt", "model_final.pt"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    listing = folder.list()
    assert pointed_at(folder, listing, checkpoints_of(listing)).stale == {}


def test_the_best_is_that_of_its_own_run(tmp_path):
    for name in ("a", "b"):
        shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / name)
    (tmp_path / "b" / "checkpoint-8" / "trainer_state.json").write_text("{}")
    folder, listing = made(tmp_path, [])
    assert pointed_at(folder, listing, checkpoints_of(listing)).best == {"a/checkpoint-8"}


@pytest.mark.parametrize("staged", ["tmp-checkpoint-18", "checkpoint-18.tmp", "checkpoint-18"])
def test_latest_is_no_unfinished_save(staged):
    files = of_trainer(staged)
    mark = [] if staged != "checkpoint-18" else ["checkpoint-18/checkpoint-is-incomplete.txt"]
    kept = run_of(*of_trainer("checkpoint-6"), *of_trainer("checkpoint-12"), *files, *mark)
    assert names_of("latest", kept) == ["checkpoint-12"]
    assert names_of(staged, kept) == [staged]
    assert [one.name for one in kept if one.is_unfinished] == [staged]


@pytest.mark.parametrize("out", ["repaired", "elsewhere/fixed"])
def test_latest_is_one_checkpoint_after_a_repair(out):
    copy = [*of_trainer(f"{out}/checkpoint-12"), f"{out}/checkpoint-12/repaired.json"]
    kept = run_of(*of_trainer("checkpoint-6"), *of_trainer("checkpoint-12"), *copy)
    assert names_of("latest", kept) == ["checkpoint-12"]
    assert names_of("latest~1", kept) == ["checkpoint-6"]
    alone = run_of(*of_trainer("checkpoint-12"), "checkpoint-12/repaired.json")
    assert names_of("latest", alone) == ["checkpoint-12"]


def test_latest_is_one_file_after_a_repair():
    kept = run_of("epoch=1-step=20.ckpt", "repaired/epoch=1-step=20.ckpt")
    assert names_of("latest", kept) == ["epoch=1-step=20.ckpt"]


def lightning_run(folder, steps):
    for nth, (name, step) in enumerate(steps.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save({"pytorch-lightning_version": "2.6", "global_step": step}, file)
        os.utime(path, (1_700_000_000 + nth, 1_700_000_000 + nth))
    place = open_folder(str(folder))
    listing = place.list()
    kept = with_last(place, listing, checkpoints_of(listing))
    return kept, pointed_at(place, listing, kept).latest


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        (
            {"epoch=1-step=8.ckpt": 8, "last.ckpt": 16},
            [("last.ckpt", 16), ("epoch=1-step=8.ckpt", 8)],
        ),
        (
            {"epoch=1-step=8.ckpt": 8, "epoch=3-step=16.ckpt": 16, "last.ckpt": 16},
            [("last.ckpt", 16), ("epoch=1-step=8.ckpt", 8)],
        ),
        (
            {"last.ckpt": 8, "last-v1.ckpt": 16, "step=4.ckpt": 4},
            [("last-v1.ckpt", 16), ("last.ckpt", 8), ("step=4.ckpt", 4)],
        ),
        ({"last.ckpt/meta.pt": 16, "last.ckpt/.metadata": 0}, [("last.ckpt", 16)]),
    ],
)
def test_latest_of_lightning_is_last_with_its_step(tmp_path, steps, order):
    kept, latest = lightning_run(tmp_path, steps)
    for back, wanted in enumerate(order):
        (one,) = referred(f"latest~{back}", kept, latest)
        assert (one.name, one.step) == wanted
