"""Runs of other tools, by the names in their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.layouts.runs import checkpoints_of, pointed_at, referred
from resilient.storage.folder import Listing, open_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"


def run_of(*names):
    return checkpoints_of(Listing(dict.fromkeys(names, 10)))


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
                ("out/checkpoints/checkpoint_1", 1, "accelerate"),
                ("out/checkpoints/checkpoint_0", 0, "accelerate"),
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
        # One checkpoint, and no run.
        (TRAINER, []),
        (["latest", "notes.txt"], []),
    ],
)
def test_a_run_is_listed_by_its_names_newest_first(names, wanted):
    assert found(*names) == wanted


def test_references_mean_what_they_do_in_a_repository():
    kept = run_of("model.safetensors", *of_trainer("checkpoint-5"), *of_trainer("checkpoint-10"))
    named = {
        one: referred(one, kept)
        for one in ("latest", "latest~1", "latest~2", "step:5", "step:6", "checkpoint-5", "best:x")
    }
    assert {one: kept and kept.name for one, kept in named.items()} == {
        "latest": "checkpoint-10",
        "latest~1": "checkpoint-5",
        "latest~2": None,
        "step:5": "checkpoint-5",
        "step:6": None,
        "checkpoint-5": "checkpoint-5",
        "best:x": None,
    }


def test_what_a_run_points_at_is_told(tmp_path):
    folder = open_folder(str(GOLDEN / "gpt2_all" / "run"))
    listing = folder.list()
    kept = checkpoints_of(listing)
    assert [one.step for one in kept] == sorted((one.step for one in kept), reverse=True)
    assert set(pointed_at(folder, listing, kept).values()) == {"best"}
    for number, name in (("12", "iter_0000012"), ("global_step7", "global_step7")):
        place = tmp_path / name
        (place / name).mkdir(parents=True)
        is_engine = name.startswith("g")
        for one in ("mp_rank_00_model_states.pt",) if is_engine else ("common.pt", ".metadata"):
            (place / name / one).touch()
        pointer = "latest" if is_engine else "latest_checkpointed_iteration.txt"
        (place / pointer).write_text(f"{number}\n")
        inside = open_folder(str(place))
        there = inside.list()
        assert pointed_at(inside, there, checkpoints_of(there)) == {name: "latest"}
