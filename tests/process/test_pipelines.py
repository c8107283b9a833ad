"""Pipelines by real processes: cut, killed, resumed, and moved to other layouts and back.

A covering subset; ``make matrix`` runs every schedule and every mesh (test_strategies.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks
from tests.process.strategy_kinds import KINDS, MOVES, PIPELINES_IN_CI, worlds_of

WORKER = Path(__file__).with_name("strategies_worker.py")
LAYERS = ["blocks.0", "blocks.1", "blocks.2"]
pytestmark = [
    pytest.mark.timeout(900),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("pipelines"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_forks(WORKER, folder, len(worlds_of(PIPELINES_IN_CI)), *PIPELINES_IN_CI)
    return folder


@pytest.fixture
def seen(runs):
    """Return what each rank of a kind's unbroken run held and sent."""

    def read(kind):
        folder = runs / f"{kind}-unbroken"
        return [json.loads((folder / f"seen-{n}").read_text()) for n in range(KINDS[kind].ranks)]

    return read


def newest(folder):
    store = open_store(str(folder))
    return read_manifest(store, committed(store)[0])


@pytest.mark.parametrize("kind", ["pp", "pp_interleaved", "pp_ddp"])
def test_a_pipeline_that_was_killed_equals_an_unbroken_one(runs, kind):
    killed, unbroken = runs / f"{kind}-killed", runs / f"{kind}-unbroken"
    assert newest(killed).world == {"size": KINDS[kind].ranks, "strategy": KINDS[kind].strategy}
    assert newest(killed).checkpoint.generation == 2, "it did die"
    assert differences(ending(killed), ending(unbroken)) == []


@pytest.mark.parametrize("kind", ["pp_still", "pp_interleaved", "pp_ddp"])
def test_a_pipeline_trains_what_the_whole_model_trains(runs, seen, kind):
    ours, whole = seen(kind), seen(KINDS[kind].like)[0]
    for one in ours:
        assert one["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(whole["norms"], rel=1e-4)
        assert one["evaluations"] == pytest.approx(whole["evaluations"], rel=1e-5)
    exported = load_file(runs / f"{kind}-unbroken" / "exported" / "model.safetensors")
    like = runs / f"{KINDS[kind].like}-unbroken"
    expected = load_file(like / "exported" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, whole_tensor in expected.items():
        assert torch.allclose(exported[name], whole_tensor, atol=1e-5), name


def layers_of(names):
    return sorted({name.rpartition(".")[0] for name in names if not name.startswith("blocks")}) + [
        layer for layer in LAYERS if any(name.startswith(f"{layer}.") for name in names)
    ]


def test_each_rank_holds_its_stages_alone(seen):
    first, last = seen("pp")
    assert layers_of(first["names"]) == ["first", "blocks.0", "blocks.1"]
    assert layers_of(last["names"]) == ["head", "blocks.2"]
    assert first["held"] + last["held"] == first["total"] == last["total"]
    assert (first["moments"], last["moments"]) == (first["held"], last["held"])
    # Stages 0 and 2 are on the first rank, 1 and 3 on the second.
    first, last = seen("pp_interleaved")
    assert layers_of(first["names"]) == ["first", "blocks.1"]
    assert layers_of(last["names"]) == ["head", "blocks.0", "blocks.2"]
    # Of two pipelines each holds all.
    assert [one["names"] for one in seen("pp_ddp")[:2]] == [
        one["names"] for one in seen("pp_ddp")[2:]
    ]


def test_layers_are_computed_where_they_are_held(seen):
    first, last = seen("pp_still")
    assert [calls > 0 for calls in first["calls"]] == [True, True, False]
    assert [calls > 0 for calls in last["calls"]] == [False, False, True]
    assert first["calls"][0] == seen("one")[0]["calls"][0], "none is computed to know shapes"


@pytest.mark.parametrize("kind", ["pp", "pp_ddp"])
def test_each_tensor_is_written_once_and_where_it_lies(runs, kind):
    manifest = newest(runs / f"{kind}-unbroken")
    for one in manifest.tensors:
        if one.part in ("model", "optimizer"):
            elements = torch.Size(one.shape).numel()
            assert sum(stored.region.size for stored in one.regions) == elements, one.name
    writers = {
        one.name: {stored.file for stored in one.regions}
        for one in manifest.tensors
        if one.part == "model"
    }
    first, last = writers["model/first.weight"], writers["model/head.weight"]
    assert not first & last, "other ranks wrote them"


def test_stages_draw_random_numbers_of_their_own_and_go_on_with_them(runs):
    kept = ending(runs / "pp-unbroken")
    states = [one["cpu"] for name, one in kept.items() if name.startswith("stage_random")]
    assert len(states) == 2
    assert not torch.equal(*states)
    shared = [one["cpu"] for name, one in kept.items() if name.startswith("rng_state")]
    assert torch.equal(*shared), "they load and shuffle alike"


def held(runs, folder, kind, steps):
    """Return the digests of all that the ranks of a world held."""
    found = {}
    for rank in range(KINDS[kind].ranks):
        path = runs / folder / f"held-{kind}-{steps}-{rank}"
        for name, digest in json.loads(path.read_text()).items():
            assert found.setdefault(name, digest) == digest, name
    return found


def saved(folder):
    """Return the digests of what the newest checkpoint holds of the model and the optimizer."""
    kept = ending(folder)
    found = {f"model/{name}": one for name, one in kept["model"].items()}
    for name, state in kept["optimizer"]["state"].items():
        found |= {f"optimizer/state/{name}/{kind}": one for kind, one in state.items()}
    return {
        name: hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest()
        for name, one in found.items()
    }


@pytest.mark.parametrize("folder", list(MOVES))
def test_a_checkpoint_moves_between_layouts_bit_for_bit(runs, folder):
    moves = MOVES[folder]
    # The second trains nothing: what it holds is what the first has saved.
    (first, steps), (second, same) = moves[:2]
    assert steps == same
    assert held(runs, folder, first, steps) == held(runs, folder, second, same)
    assert held(runs, folder, *moves[-1]) == saved(runs / folder)
    assert {"model/first.weight", "optimizer/state/head.bias/exp_avg"} <= set(saved(runs / folder))
    worlds = [
        read_manifest(open_store(str(runs / folder)), one).world
        for one in committed(open_store(str(runs / folder)))
    ]
    strategies = [one["strategy"] for one in worlds]
    assert strategies[0] == KINDS[moves[-1][0]].strategy, "the last has gone on"
    assert newest(runs / folder).checkpoint.step == moves[-1][1]


@pytest.mark.parametrize("folder", list(MOVES))
def test_a_run_goes_on_in_another_layout_as_in_its_own(runs, seen, folder):
    # Of one rank, and of two: how many samples a step has differs with it.
    said = json.loads((runs / folder / "seen-0").read_text())["losses"]
    assert len(said) == 6
    assert said[:2] == pytest.approx(seen("one")[0]["losses"][:2], rel=1e-5)
