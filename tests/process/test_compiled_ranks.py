"""Compiled replicas and shards: plain names in checkpoints, and the bits of an unbroken run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.compile_worker import KINDS, RANKS, STEPS, WORLDS
from tests.process.deepspeed_forks import run_forks

WORKER = Path(__file__).with_name("compile_worker.py")
COMPILED = [kind for kind in KINDS if kind != "plain"]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("compiled"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    run_forks(WORKER, folder, len(WORLDS))
    return folder


def seen(folder):
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(RANKS)]


def newest(folder):
    store = open_store(str(folder))
    return read_manifest(store, committed(store)[0])


def shapes(folder):
    return {one.name: (one.shape, one.dtype) for one in newest(folder).tensors}


@pytest.mark.parametrize("kind", COMPILED)
def test_ranks_train_compiled_under_plain_names(runs, kind):
    plain, compiled = seen(runs / "plain"), seen(runs / f"{kind}-unbroken")
    assert all(one["graphs"] > 0 for one in compiled)
    assert [one["graphs"] for one in plain] == [0, 0]
    assert all(one["names"] == plain[0]["names"] for one in compiled)
    own = {
        name: one for name, one in shapes(runs / f"{kind}-unbroken").items() if "rng" not in name
    }
    assert own == {name: one for name, one in shapes(runs / "plain").items() if "rng" not in name}


@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_run_that_was_killed_equals_an_unbroken_one(runs, kind):
    killed, unbroken = runs / f"{kind}-killed", runs / f"{kind}-unbroken"
    assert newest(killed).checkpoint.generation == 2, "it did die"
    assert differences(ending(killed), ending(unbroken)) == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_compiled_ranks_train_what_plain_ones_train(runs, kind):
    plain, compiled = seen(runs / "plain")[0], seen(runs / f"{kind}-unbroken")[0]
    for name in ("losses", "evaluations"):
        assert compiled[name] == pytest.approx(plain[name], rel=1e-5)


@pytest.mark.parametrize("run", ["from-fsdp-to-plain", "from-plain-to-fsdp"])
def test_a_run_goes_on_compiled_or_not(runs, run):
    strategy = "ddp" if run.endswith("plain") else "fsdp"
    assert newest(runs / run).world == {"size": RANKS, "strategy": strategy}
    assert newest(runs / run).checkpoint.generation == 2
    plain, found = seen(runs / "plain")[0], seen(runs / run)[0]
    assert (found["graphs"] > 0) == (strategy == "fsdp")
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
