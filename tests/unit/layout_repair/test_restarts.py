"""Whole weights restart a training whose sharded optimizer is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired

SHARED = Path(__file__).parents[4] / "shared" / "fixtures" / "hf"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the fixtures of Transformers")


@pytest.fixture
def sharded(tmp_path, request):
    source = SHARED / request.param / "run" / "checkpoint-4"
    path = Path(shutil.copytree(source, tmp_path / "run" / source.name))
    for one in [path, *path.rglob("*")]:
        one.chmod(0o755 if one.is_dir() else 0o644)
    return path


@pytest.mark.parametrize("sharded", ["gpt2_fsdp1_sharded", "gpt2_fsdp2_sharded"], indirect=True)
def test_lost_slice_of_fsdp_optimizer_leaves_the_weights(sharded):
    next((sharded / "optimizer_0").glob("*_1_0.distcp")).unlink()
    plan = plan_layout_repair(str(sharded))
    names = set(plan.draft.list().sizes)
    assert (plan.is_repaired, plan.verdict.answer) == (True, "partly")
    assert set(plan.losses) == {"the optimizer's state", "the schedule"}
    assert not any(one.startswith(("optimizer_0/", "scheduler")) for one in names)
    assert {"trainer_state.json", "rng_state_1.pth"} <= names


@pytest.mark.parametrize("sharded", ["gpt2_ds_z1", "gpt2_ds_z2"], indirect=True)
def test_lost_shard_of_deepspeed_leaves_a_model_to_begin_from(sharded):
    next((sharded / "global_step4").glob("*rank_1*optim_states.pt")).unlink()
    plan = plan_layout_repair(str(sharded))
    assert plan.is_repaired
    assert {"the optimizer's state", "the schedule", "random state"} <= set(plan.losses)
    made = write_repaired(plan, place_of(plan))
    assert made.name == "weights-4"
    assert json.loads((made / "repaired.json").read_text())["losses"]
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    held = AutoModelForCausalLM.from_pretrained(made)
    held.save_pretrained(made.with_name("again"))
    assert (made.with_name("again") / "model.safetensors").stat().st_size
