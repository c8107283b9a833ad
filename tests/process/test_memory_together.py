"""All ways to save memory in one run, on two ranks: they work, and a resume has the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks
from tests.process.memory_worker import LIVES, STEPS

WORKER = Path(__file__).with_name("memory_worker.py")
pytestmark = [
    pytest.mark.timeout(600),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("memory_together"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_forks(WORKER, folder, len(LIVES))
    return folder


def seen(folder):
    return [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("kind", "lives"), [("fsdp", 3), pytest.param("ddp", 2, marks=pytest.mark.smoke)]
)
def test_a_run_that_was_killed_equals_an_unbroken_one(runs, kind, lives):
    newest = committed(open_store(str(runs / f"{kind}-killed")))[0]
    assert (newest.step, newest.generation) == (STEPS, lives), "it did die"
    assert differences(ending(runs / f"{kind}-killed"), ending(runs / f"{kind}-unbroken")) == []


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_every_way_is_in_use_at_once(runs, kind):
    for rank in seen(runs / f"{kind}-unbroken"):
        assert rank["batch"] == 2, "the batch was cut"
        assert rank["dtypes"] == ["torch.bfloat16"]
        assert rank["kinds"] == (["DTensor"] if kind == "fsdp" else ["Parameter"])
        passes = len(rank["seen"]) * (2 if kind == "fsdp" else 1)
        assert rank["calls"] >= 2 * passes, "forward passes are made twice"


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_no_sample_is_left_out_or_repeated_where_the_batch_was_cut(runs, kind):
    """What follows the cut begins where the last whole step ended, and the epoch has 96."""
    ranks = seen(runs / f"{kind}-unbroken")
    after = [index for rank in ranks for indices in rank["seen"].values() for index in indices]
    assert len(after) == len(set(after))
    steps = sorted(map(int, ranks[0]["seen"]))
    assert steps == list(range(4 if kind == "fsdp" else 0, STEPS))
    sizes = {len(indices) for rank in ranks for indices in rank["seen"].values()}
    assert sizes == ({4} if kind == "fsdp" else {2, 4})
