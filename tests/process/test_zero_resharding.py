"""Saved by DeepSpeed in any stage by any number of ranks, loaded in any other: equal to the bit."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.process.deepspeed_forks import run_forks
from tests.process.resharding import Odd
from tests.process.zero_reshard_worker import LAYOUTS, SAVERS, STAGES_SAVED, savers_for

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
WORKER = Path(__file__).with_name("zero_reshard_worker.py")
pytestmark = [
    pytest.mark.timeout(600),
    # All tests read what one gang of each size found.
    pytest.mark.xdist_group("zero resharding"),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """The folder where every world has saved and loaded."""
    folder = tmp_path_factory.mktemp("worlds")
    run_forks(WORKER, folder, len(LAYOUTS))
    return folder


@pytest.fixture(scope="module")
def loaded(worlds):
    """What differs, by (what saved, rank), for each that loaded."""
    found = defaultdict(dict)
    for size in LAYOUTS:
        for rank in range(size):
            for line in (worlds / f"found-{size}-{rank}").read_text().splitlines():
                saver, loader, wrong = json.loads(line)
                found[loader][saver, rank] = wrong
    return found


@pytest.mark.parametrize("loader", SAVERS)
def test_every_layout_loads_what_others_saved_to_the_bit(loaded, loader):
    layout, _, ranks = loader.rpartition("-")
    expected = {
        (saver, rank) for saver in savers_for(layout, int(ranks)) for rank in range(int(ranks))
    }
    assert loaded[loader] == {key: [] for key in expected}


def test_ds_2898_a_stage_of_one_world_size_is_loaded_in_every_other(loaded):
    pairs = [
        (saver, loader)
        for loader in STAGES_SAVED
        for saver in STAGES_SAVED
        if saver.split("-")[1] != loader.split("-")[1]
    ]
    assert len(pairs) == 192
    assert all(loaded[loader][saver, 0] == [] for saver, loader in pairs)


@pytest.mark.parametrize("loader", ["single-1", "ddp-2", "fsdp-3"])
def test_ds_5405_no_conversion_comes_before_others_load_what_a_stage_saved(loaded, loader):
    ranks = int(loader.split("-")[1])
    found = [loaded[loader][saver, rank] for saver in STAGES_SAVED for rank in range(ranks)]
    assert found == [[]] * (16 * ranks)


def test_ds_6691_every_rank_writes_its_partitions_and_nobody_what_pads_them(worlds):
    expected = {f"model/{name}": tuple(one.shape) for name, one in Odd(1).state_dict().items()}
    for saver in ("zero1-4", "zero2-3", "zero3-4"):
        store = open_store(str(worlds / saver))
        manifest = read_manifest(store, committed(store)[0])
        weights = {one.name: one for one in manifest.tensors if one.part == "model"}
        assert {name: one.shape for name, one in weights.items()}.items() <= expected.items()
        assert expected.keys() - weights.keys() == {"model/head.weight"}, "tied: stored once"
        moments = [one for one in manifest.tensors if one.name.endswith("large.weight/exp_avg")]
        for one in (weights["model/large.weight"], *moments):
            ranks = {region.file.split(".")[1] for region in one.regions}
            assert len(ranks) == int(saver[-1]), "each rank has written its own"
            assert sum(region.region.size for region in one.regions) == math.prod(one.shape)


def test_ds_7546_a_run_that_changed_its_layout_steps_on_as_if_it_had_not(loaded):
    """The last load of each stage is followed by a step, held against one of a plain model."""
    assert all(
        loaded[loader][savers_for(*at(loader))[-1], rank] == []
        for loader in STAGES_SAVED
        for rank in range(at(loader)[1])
    )


def at(loader):
    layout, ranks = loader.split("-")
    return layout, int(ranks)
