"""Weights in shards, and what the index beside them says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from resilient.layout_repair.plan import plan_layout_repair
from resilient.layouts.detect import read_layout
from resilient.layouts.model import MODEL
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import open_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{one}-of-00002.safetensors" for one in (1, 2))


@pytest.fixture
def whole(tmp_path):
    return Path(shutil.copytree(GOLDEN / "checkpoint-8", tmp_path / "checkpoint-8"))


@pytest.fixture
def sharded(whole):
    tensors = load_file(whole / "model.safetensors")
    (whole / "model.safetensors").unlink()
    names = sorted(tensors)
    mapped = {one: FIRST if at < 9 else SECOND for at, one in enumerate(names)}
    for shard in (FIRST, SECOND):
        held = {one: tensors[one] for one in names if mapped[one] == shard}
        save_file(held, whole / shard, metadata={"format": "pt"})
    total = sum(one.numel() * one.element_size() for one in tensors.values())
    write(whole, {"metadata": {"total_size": total}, "weight_map": mapped})
    return whole


def write(path, index):
    (path / INDEX).write_text(json.dumps(index))


def edit(path, of):
    index = json.loads((path / INDEX).read_text())
    of(index)
    write(path, index)


def look(path):
    folder = open_folder(str(path))
    found = read_layout(folder, folder.list())
    told = [f"{one.place}: {one.what}" for one in found.problems]
    return (
        assess_resumability(found, str(path)).answer,
        told,
        sum(one.part == MODEL for one in found.tensors),
    )


def test_whole_shards_are_whole(sharded):
    assert look(sharded) == ("yes", [], 28)


def test_shards_without_an_index_are_read_and_their_index_is_made(sharded):
    before = json.loads((sharded / INDEX).read_text())
    (sharded / INDEX).unlink()
    answer, told, count = look(sharded)
    assert (answer, count) == ("no", 28)
    assert told == [f"{INDEX}: it is missing, and its tool needs it to find the 2 shards"]
    plan = plan_layout_repair(str(sharded))
    assert plan.is_whole
    made = json.loads(plan.draft.read(INDEX, 0, 1 << 20))
    assert made["weight_map"] == before["weight_map"]
    assert made["metadata"]["total_size"] == before["metadata"]["total_size"]


@pytest.mark.parametrize("has_index", [True, False])
def test_a_tensor_in_two_shards_is_no_one_of_them(sharded, has_index):
    held, other = load_file(sharded / SECOND), load_file(sharded / FIRST)
    name = min(other)
    save_file({**held, name: other[name] + 1}, sharded / SECOND, metadata={"format": "pt"})
    if not has_index:
        (sharded / INDEX).unlink()
    answer, told, _ = look(sharded)
    assert answer == "no"
    assert f"{SECOND}: `{name}` is in `{FIRST}` too" in " ".join(told)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (lambda index: index["metadata"].update(total_size=5), "its `total_size` is 5, but"),
        (lambda index: index["weight_map"].popitem(), "lacks 1 of their tensors"),
        (
            lambda index: index["weight_map"].update({min(index["weight_map"]): SECOND}),
            "names the wrong shard for",
        ),
    ],
)
def test_an_index_that_says_else_than_its_shards_is_told_and_made_anew(sharded, of, why):
    edit(sharded, of)
    answer, told, count = look(sharded)
    assert (answer, len(told), count) == ("yes", 1, 28)
    assert told[0].startswith(INDEX)
    assert why in told[0]
    plan = plan_layout_repair(str(sharded))
    assert (plan.is_whole, plan.after) == (True, ())


def test_a_shard_that_no_index_names_is_told_and_left_out(sharded):
    shutil.copy(sharded / SECOND, sharded / "model-00003-of-00003.safetensors")
    answer, told, count = look(sharded)
    assert (answer, count) == ("yes", 28)
    assert "model-00003-of-00003.safetensors: no index names this shard" in told[0]
    plan = plan_layout_repair(str(sharded))
    assert (plan.is_whole, plan.after) == (True, ())


def test_an_index_beside_one_file_is_told_and_left_out(whole):
    write(whole, {"metadata": {}, "weight_map": {"a": FIRST}})
    answer, told, count = look(whole)
    assert (answer, count) == ("yes", 28)
    assert told == [
        f"{INDEX}: it is an index of shards, but nothing reads it: the weights are in one file"
    ]
    plan = plan_layout_repair(str(whole))
    assert (plan.is_whole, plan.after) == (True, ())
