"""Transformers resumes what a repair or a rebuild wrote, and saves it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from resilient.train.hf_interop.rebuild import rebuild_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers" / "gpt2_all" / "run"
STATE = "trainer_state.json"
OLD = ("train_batch_size", "stateful_callbacks", "num_input_tokens_seen", "best_global_step")


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(GOLDEN / "checkpoint-8", tmp_path / "run" / "checkpoint-8"))


def saved_again(path, out):
    """Resume with Transformers for one step, and return the state that it saves."""
    from tests.damage.repairs import quiet
    from tests.damage.samples import run_trainer

    with quiet():
        run_trainer(path, out, 9, save_strategy="steps", save_steps=1)
    return json.loads((out / "checkpoint-9" / STATE).read_text())


def of_older_version(path):
    held = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps({key: one for key, one in held.items() if key not in OLD}))


def without_control(path):
    held = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps({**held, "stateful_callbacks": {}}))


def cut(path):
    (path / STATE).write_text((path / STATE).read_text()[:900])


def lost(path):
    (path / STATE).unlink()


def optimizer_broken(path):
    (path / "optimizer.pt").write_bytes(b"")


DAMAGES = (of_older_version, without_control, cut, lost, optimizer_broken)


@pytest.mark.smoke
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_repaired_checkpoint_is_saved_again_by_transformers(checkpoint, tmp_path, damage):
    damage(checkpoint)
    plan = plan_layout_repair(str(checkpoint))
    made = write_repaired(plan, place_of(plan))
    assert saved_again(made, tmp_path / "out")["global_step"] == 9


def test_state_without_control_stops_the_next_save_of_transformers(checkpoint, tmp_path):
    without_control(checkpoint)
    with pytest.raises(KeyError, match="TrainerControl"):
        saved_again(checkpoint, tmp_path / "out")
    assert plan_layout_repair(str(checkpoint)).before[0].is_fatal


def test_rebuilt_checkpoint_is_saved_again_by_transformers(checkpoint, tmp_path):
    lost(checkpoint)
    made = rebuild_folder(checkpoint, tmp_path / "rebuilt" / "checkpoint-8")
    assert saved_again(Path(made.folder), tmp_path / "out")["global_step"] == 9
