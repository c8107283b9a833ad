"""What a person or a disk does to a checkpoint of another trainer, done to one of ours.

The cases of the list that were tried on a current release and ended in a crash or, worse, in a
run that went on with something else. Here each run ends with the bits of an unbroken one.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from resilient.checkpoint.catalog import committed, lineage, read_manifest
from resilient.checkpoint.verify import verify, verify_records
from resilient.errors import IncompatibleCheckpoint
from resilient.storage.local import LocalStore
from tests.unit.train.models import DieAfter, Dies, make_trainer

OPTIONS = {"max_steps": 6, "save_steps": 2, "logging_steps": 2}
NEWEST = "checkpoint-4-g1"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("unbroken"), **OPTIONS)
    trainer.train()
    return bits(trainer)


@pytest.fixture(scope="module")
def dead_after_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dead")
    trainer = make_trainer(folder, callbacks=[DieAfter(5)], **OPTIONS)
    with pytest.raises(Dies):
        trainer.train()
    assert [one.step for one in committed(LocalStore(folder))] == [4, 2]
    return folder


@pytest.fixture
def folder(dead_after_four, tmp_path):
    shutil.copytree(dead_after_four, tmp_path / "run")
    return tmp_path / "run"


def bits(trainer):
    state = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    moments = [
        (one["step"].clone(), one["exp_avg"].clone(), one["exp_avg_sq"].clone())
        for one in trainer.optimizer.state.values()
    ]
    return state, moments, trainer.state.global_step


def assert_same(found, expected):
    assert found[2] == expected[2]
    assert all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert all(map(torch.equal, one, other))


def delete(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


CASES = [
    ("trainer_state.json", delete),
    ("trainer_state.json", empty),
    ("optimizer.r00000.safetensors", delete),
    # The scheduler is in here.
    ("state.json", delete),
    ("rng_state_0.safetensors", delete),
    ("optimizer.r00000.safetensors", flip),
    ("model.r00000.safetensors", flip),
    ("model.r00000.safetensors", cut),
    ("model.r00000.safetensors", delete),
]


@pytest.mark.parametrize(("name", "damage"), CASES, ids=[f"{d.__name__}-{n}" for n, d in CASES])
def test_probe_what_was_done_to_the_newest_is_told_and_the_run_ends_with_the_same_bits(
    name, damage, folder, unbroken, capsys
):
    damage(folder / NEWEST / name)
    trainer = make_trainer(folder, **OPTIONS)
    trainer.train()
    assert_same(bits(trainer), unbroken)
    said = capsys.readouterr().err
    assert f"skipped {NEWEST}" in said
    assert name in said


def test_what_a_trainer_saves_contradicts_itself_nowhere(dead_after_four):
    store = LocalStore(dead_after_four)
    assert [finding for one in committed(store) for finding in verify(store, one, "deep")] == []
    assert verify_records(store, "deep") == []


def test_probe_an_optimizer_that_is_not_in_the_checkpoint_is_refused_and_not_begun_afresh(folder):
    """The part itself is gone, as after an export, and the checkpoint is whole."""
    from resilient.state_dict.resharding import absent_parts
    from resilient.state_dict.snapshot import Part

    manifest = read_manifest(LocalStore(folder), committed(LocalStore(folder))[0])
    with pytest.raises(IncompatibleCheckpoint, match="start from its initial state"):
        absent_parts(manifest, {"optimizer_of_another_name": Part(None)}, 0)


def test_probe_after_a_rollback_the_abandoned_higher_step_is_not_resumed(folder, unbroken):
    """Resume from an older step, die, and resume without saying from where."""
    options = {**OPTIONS, "save_steps": 1}
    with pytest.raises(Dies):
        make_trainer(folder, callbacks=[DieAfter(3)], **options).train(
            resume_from_checkpoint="checkpoint-2-g1"
        )
    store = LocalStore(folder)
    assert [one.folder for one in lineage(store).abandoned] == [NEWEST]
    assert lineage(store).candidates[0].folder == "checkpoint-3-g2"
    trainer = make_trainer(folder, **options)
    trainer.train()
    assert_same(bits(trainer), unbroken)


def test_probe_with_a_limit_of_one_a_kill_inside_the_save_leaves_one_to_resume_from(
    tmp_path, unbroken, monkeypatch
):
    """The process dies inside the second save, at each file in turn."""
    from resilient.testing.fault_store import Crash

    options = {**OPTIONS, "save_total_limit": 1}
    names = ("model.r", "optimizer.r", "rng_state_", "trainer_state", "state.json", "manifest")
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            for verb in ("put", "put_new"):
                patch.setattr(LocalStore, verb, dying(verb, name, Crash))
            with pytest.raises(BaseException, match=r"dead|Crash") as caught:
                make_trainer(folder, **options).train()
        assert "dead" in str(caught.value)
        assert [one.step for one in committed(LocalStore(folder))] == [2]
        trainer = make_trainer(folder, **options)
        trainer.train()
        assert_same(bits(trainer), unbroken)


def dying(verb, name, death):
    real = getattr(LocalStore, verb)

    def put(self, key, data):
        if key.startswith("checkpoint-4-") and name in key:
            raise death(f"dead at {key}")
        return real(self, key, data)

    return put


def test_trl_5150_shared_tensors_are_saved_once_and_shared_again(tmp_path):
    """Also safetensors#98: a model whose embedding is its head can be saved as it is."""
    from resilient import About, Part, open_checkpointer
    from tests.helpers.manifests import Values

    table = torch.arange(12.0).reshape(4, 3)
    state = {"embedding": table, "head": table, "rows": table[1:]}
    saving = open_checkpointer(str(tmp_path))
    saving.resume({})
    saving.save(1, {"model": Part(Values(**state))}, About())
    saving.close()
    target = Values()
    loading = open_checkpointer(str(tmp_path))
    loading.resume({"model": Part(target)})
    loading.close()
    assert target.state["embedding"] is target.state["head"]
    assert all(torch.equal(target.state[name], state[name]) for name in state)
    [file] = tmp_path.glob("checkpoint-1-g1/model.*")
    assert file.stat().st_size < 2 * table.nbytes + 300
