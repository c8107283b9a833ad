"""DeepSpeed checkpoints with files of too few ranks or of several saves are reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.foreign_folders import alter, look, verdict
from tests.helpers.sharded_folders import STEP, write_zero

HERE = Path(__file__).parents[2] / "golden" / "transformers"
RANKS = 3
TAG = f"global_step{STEP}"
MODEL, RANK_1 = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
TELLS = {"ds_version": "0.19.8", "mp_world_size": 1}


@pytest.fixture
def engine(tmp_path):
    """Return a function that makes the folder of an engine that nobody's Trainer is around."""

    def make(stage, **told):
        folder = tmp_path / "run"
        folder.mkdir()
        for name in ("model.safetensors", "optimizer.pt"):
            (folder / name).touch()
        write_zero(folder, stage, RANKS, **{**TELLS, **told})
        for part in folder.glob("*/*optim_states.pt"):
            alter(part, lambda it: it["optimizer_state_dict"].update(partition_count=[RANKS]))
        return folder

    return make


@pytest.fixture
def trained(tmp_path):
    """Return a function that makes the same within a folder of the Trainer."""

    def make(stage, **told):
        source = next(HERE.glob("*gpt2_ddp2_all*/run/checkpoint-*"))
        folder = Path(shutil.copytree(source, tmp_path / f"checkpoint-{STEP}"))
        shutil.copy(folder / "rng_state_1.pth", folder / "rng_state_2.pth")
        place = {"last_epoch": STEP, "_step_count": STEP + 1}
        alter(folder / "scheduler.pt", lambda it: it.update(place))
        write_zero(folder, stage, RANKS, **{**TELLS, **told})
        return folder

    return make


def told(folder):
    return " ".join(verdict(folder).why)


def model(folder, rank=1):
    """Return whose model states ZeRO 3 leaves for a rank."""
    return folder / TAG / f"zero_pp_rank_{rank}_{MODEL}"


def counted(folder, step, pattern="*"):
    """Let parts of the optimizer have made another number of updates."""
    for part in (folder / TAG).glob(f"{pattern}optim_states.pt"):
        alter(part, lambda it: set_step(it["optimizer_state_dict"], step))


def set_step(state, step):
    base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    for one in base["state"].values():
        one["step"] = torch.tensor(float(step))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_that_is_whole_has_no_finding(engine, trained, stage):
    for folder in (engine(stage), trained(stage)):
        assert [one for one in look(folder).problems if "epoch" not in one.what] == []
        assert verdict(folder).answer == "yes"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_with_zero_3_the_model_s_states_of_every_rank_are_needed(engine, rank):
    folder = engine(3)
    model(folder, rank).unlink()
    assert verdict(folder).answer == "no"
    assert f"the model's states of rank {rank} are missing" in told(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_that_layers_were_cut_over_has_its_own(engine, stage):
    folder = engine(stage, mp_world_size=2)
    assert "the model's states of rank 0, model-parallel rank 1 are missing" in told(folder)
    found = " ".join(one.what for one in look(folder).problems)
    assert "optimizer's part of rank 2, model-parallel rank 1 is missing" in found


def test_model_states_of_any_rank_that_cannot_be_opened_are_told(engine):
    folder = engine(3)
    model(folder, 2).write_bytes(model(folder, 2).read_bytes()[:-100])
    assert verdict(folder).answer == "no"
    assert model(folder, 2).name in told(folder)


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("global_steps", 5, "no"),
        ("dp_world_size", 4, "no"),
        ("mp_world_size", 0, "no"),
        ("ds_version", "0.18.0", "partly"),
    ],
)
def test_model_states_of_another_save_are_told(engine, field, value, answer):
    folder = engine(3)
    alter(model(folder), lambda it: it.update({field: value}))
    (one,) = look(folder).problems
    assert one.place == f"{TAG}/{model(folder).name}"
    assert f"`{field}` is {value}, and that of others " in one.what
    assert verdict(folder).answer == answer


def test_parts_that_were_cut_for_another_number_of_ranks_are_told(engine):
    folder = engine(2)
    cut = {"partition_count": [RANKS + 1]}
    alter(folder / TAG / RANK_1, lambda it: it["optimizer_state_dict"].update(cut))
    assert f"{TAG}/{RANK_1}: its `partition_count` is 4, and that of others 3" in told(folder)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("step", [STEP - 2, STEP + 2])
def test_a_part_of_another_step_is_told(engine, stage, step):
    folder = engine(stage)
    counted(folder, step, "*rank_1_*")
    (one,) = look(folder).problems
    assert one.place.endswith(RANK_1)
    assert f"made {step} updates by step {STEP}" in one.what
    assert verdict(folder).answer == "no"


def test_an_optimizer_that_began_anew_is_a_loss_and_within_a_trainer_no_resume(engine, trained):
    for make, answer in ((engine, "partly"), (trained, "no")):
        folder = make(2)
        counted(folder, 2)
        assert verdict(folder).answer == answer


def test_updates_that_fp16_skipped_are_no_disagreement(engine):
    folder = engine(2, skipped_steps=2, global_steps=STEP + 2)
    folder = (folder / TAG).rename(folder / f"global_step{STEP + 2}").parent
    (folder / "latest").write_text(f"global_step{STEP + 2}")
    assert verdict(folder).answer == "yes"
    alter(folder / f"global_step{STEP + 2}" / MODEL, lambda it: it.update(skipped_steps=1))
    assert verdict(folder).answer == "partly"


def test_model_states_of_another_step_than_the_trainer_s_are_told(trained):
    folder = trained(1)
    alter(folder / TAG / MODEL, lambda it: it.update(global_steps=STEP - 2))
    assert f"{TAG}/{MODEL}: its model states are of step 5, and trainer_state.json of 7" in told(
        folder
    )
    assert verdict(folder).answer == "no"


def test_a_tag_of_another_name_is_a_loss_where_all_else_agrees(engine):
    folder = engine(1)
    (folder / TAG).rename(folder / "global_step9")
    (folder / "latest").write_text("global_step9")
    assert "are of step 7, and the tag `global_step9` of 9" in look(folder).problems[0].what
    assert verdict(folder).answer == "partly"
    (folder / "global_step9").rename(folder / "best")
    (folder / "latest").write_text("best")
    assert verdict(folder).answer == "yes"


def older(folder):
    """Leave the tag of an earlier step beside the one of the Trainer's."""
    tag = Path(shutil.copytree(folder / TAG, folder / "global_step5"))
    alter(tag / MODEL, lambda it: it.update(global_steps=5))
    for part in tag.glob("*optim_states.pt"):
        alter(part, lambda it: set_step(it["optimizer_state_dict"], 5))


@pytest.mark.parametrize("latest", ["global_step5", "global_step6", "", None])
def test_a_trainer_s_latest_that_is_not_of_its_step_is_told_with_what_mends_it(trained, latest):
    folder = trained(1)
    older(folder)
    assert verdict(folder).answer == "yes"
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_text(latest)
    found = verdict(folder)
    assert found.answer == "no"
    assert found.why[0].startswith("latest: it names ")
    assert found.command == f"resilient ckpt repair {folder}"


def test_a_trainer_around_an_older_engine_alone_is_told(trained):
    folder = trained(1)
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": STEP + 2}))
    # It may count the short steps at the ends of epochs, which such an engine leaves out.
    assert told(folder) == "the consistency of its files"
    assert verdict(folder).answer == "partly"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_that_is_the_copy_of_another_rank_s_is_told(engine, stage):
    folder = engine(stage)
    other = folder / TAG / RANK_1.replace("rank_1", "rank_0")
    shutil.copy(other, folder / TAG / RANK_1)
    assert "is the same as" in told(folder)
    assert verdict(folder).answer == "no"


def test_ranks_that_hold_nothing_but_filling_may_be_alike(engine):
    folder = engine(1)
    other = folder / TAG / RANK_1.replace("rank_1", "rank_0")
    alter(other, lambda it: blank(it["optimizer_state_dict"]))
    shutil.copy(other, folder / TAG / RANK_1)
    assert verdict(folder).answer == "yes"


def blank(state):
    for one in (*state["base_optimizer_state"]["state"].values(),):
        one["exp_avg"].zero_()
        one["exp_avg_sq"].zero_()
    for one in state["single_partition_of_fp32_groups"]:
        one.zero_()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engine_all_optimizer_parts_lost_stops_like_one_lost(engine, trained, stage):
    for make in (engine, trained):
        folder = make(stage)
        parts = sorted((folder / TAG).glob("*optim_states.pt"))
        parts[0].unlink()
        assert verdict(folder).answer == "no"
        for part in parts[1:]:
            part.unlink()
        assert verdict(folder).answer == "no"
        assert f"the optimizer's parts of all {RANKS} ranks are missing" in told(folder)


def test_engine_without_zero_has_its_optimizer_in_the_model_states(engine):
    folder = engine(1)
    for part in (folder / TAG).glob("*optim_states.pt"):
        part.unlink()
    weight = torch.nn.Parameter(torch.zeros(1, 4))
    held = torch.optim.AdamW([weight])
    weight.grad = torch.ones(1, 4)
    held.step()
    changes = {"optimizer": held.state_dict(), "param_shapes": None}
    alter(folder / TAG / MODEL, lambda it: it.update(changes))
    assert look(folder).optimizer.states == 1
    assert verdict(folder).answer == "yes"
