"""What any version of the format wrote is read by every later release, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.verify import verify
from resilient.format.keys import CheckpointId
from resilient.state_dict.resharding import load
from resilient.storage.local import LocalStore

FOLDER = Path(__file__).parent
from tests.golden.make import Held, golden_state  # noqa: E402 - the writer stands beside its output

VERSIONS = [1, 2]
FROZEN = "checkpoint-1-g1/model.r00001.safetensors"


@pytest.fixture
def store(version):
    return LocalStore(FOLDER / f"format-{version}")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_repository_is_intact(store):
    assert lineage(store).candidates == (CheckpointId(1, 2), CheckpointId(1, 1))
    for checkpoint in lineage(store).candidates:
        assert verify(store, checkpoint, "deep") == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_golden_state_comes_back_as_it_was_saved(store, step, rank, version):
    proved = read(store, CheckpointId(1, step))
    expected = golden_state(step, rank, version)
    target = {name: type(part)(Held(None), part.scope) for name, part in expected.items()}
    load(proved.manifest, proved.files, target, rank)
    for name, part in expected.items():
        assert_same(target[name].stateful.state, part.stateful.state)
    model = target["model"].stateful.state
    assert model["wte.weight"] is model["lm_head.weight"], "tied weights are tied again"


def assert_same(found, expected) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("version", [2])
def test_the_second_version_knows_files_of_older_checkpoints(store):
    manifest = read(store, CheckpointId(1, 2)).manifest
    assert manifest.format_version == 2
    assert manifest.file(FROZEN).origin == CheckpointId(1, 1)
    (frozen,) = [one for one in manifest.tensors if one.name == "model/frozen"]
    assert {one.file for one in frozen.regions} == {FROZEN}


@pytest.mark.parametrize("version", [1])
def test_a_shard_is_a_valid_safetensors_file_for_others(store):
    safetensors = pytest.importorskip("safetensors.torch")
    shards = [
        safetensors.load_file(
            FOLDER / "format-1/checkpoint-2-g1" / f"model.r0000{rank}.safetensors"
        )
        for rank in (0, 1)
    ]
    rows = [tensor for shard in shards for key, tensor in shard.items() if "wte" in key]
    assert torch.equal(torch.cat(rows), golden_state(2, 0, 1)["model"].stateful.state["wte.weight"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_human_readable_document_is_plain_json(version):
    text = (FOLDER / f"format-{version}/checkpoint-2-g1/trainer_state.json").read_text()
    assert json.loads(text) == {"global_step": 2}
