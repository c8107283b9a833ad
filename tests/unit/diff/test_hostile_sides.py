"""Checkpoints that claim more than they have are told and not followed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from resilient.diff import foreign
from resilient.diff.compare import compare
from resilient.diff.digests import plain_leaves, value_of
from resilient.layouts.detect import read_layout
from resilient.storage.folder import open_folder
from tests.helpers.hf_runs import HERE
from tests.helpers.sharded_folders import write_zero


def side(path):
    folder = open_folder(str(path))
    listing = folder.list()
    return foreign.open_foreign(folder, listing, read_layout(folder, listing))


def test_values_that_hold_each_other_a_million_times_are_walked_within_bounds(tmp_path):
    knot = [1]
    for _ in range(30):
        knot = [knot, knot]
    shutil.copytree(HERE / "gpt2_all" / "run" / "checkpoint-8", tmp_path / "checkpoint-8")
    torch.save({"base_lrs": knot, "last_epoch": 8}, tmp_path / "checkpoint-8" / "scheduler.pt")
    found = side(tmp_path / "checkpoint-8")
    assert any("scheduler.pt: more than" in one for one in found.notes)
    assert len(found.tensors) == 112


def test_an_element_that_is_shown_without_end_is_not_read_without_end(tmp_path):
    torch.save({"x": torch.zeros(1).expand(1 << 40), "y": torch.ones(2)}, tmp_path / "x.pt")
    found = compare(side(tmp_path / "x.pt"), side(tmp_path / "x.pt"))
    said = {one.name: (one.is_equal, one.why) for one in found.tensors}
    assert said["model/x"] == (None, "it has more elements than its files have bytes")
    assert said["model/y"] == (True, "")
    assert found.differs


@pytest.mark.parametrize("ranks", [1, 3, 1 << 60])
def test_an_engine_of_impossible_size_is_compared_as_it_lies(tmp_path, ranks):
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    trainer = Path(shutil.copytree(source, tmp_path / "checkpoint-7"))
    write_zero(trainer, 1, 2, dp_world_size=ranks)
    found = side(trainer)
    assert any("compared rank by rank" in one for one in found.notes)
    assert any(one.name.startswith("rank 0: ") for one in found.tensors)


def test_a_document_that_nests_without_end_is_refused():
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="more than 64 levels"):
        value_of(deep)


def test_values_with_tags_become_plain_ones():
    tree = {
        "a": {"$tuple": [1, {"$float": "inf"}]},
        "b": {"$dict": [[1, {"$bytes": "AP8="}]]},
        "c": {"$numpy": ["<f4", {"$tensor": "x"}]},
        "d": [{"lr": 0.5}, {"lr": 0.25}],
    }
    assert dict(plain_leaves(value_of(tree))) == {
        "a": [1, float("inf")], "b.1": b"\x00\xff", "d.0.lr": 0.5, "d.1.lr": 0.25,
    }  # fmt: skip
