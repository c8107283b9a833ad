"""Layers cut over ranks, on a stream: one mean over the tokens of a step, resumed to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks
from tests.process.tensor_stream_worker import DIE_AFTER, EVAL_ROWS, KILLED, KINDS, WORLDS
from tests.unit.train.token_models import LENGTH, Sentences

WORKER = Path(__file__).with_name("tensor_stream_worker.py")
CUT = [kind for kind in KINDS if kind.startswith("tp")]
# Two passes of 20 rows.
TOKENS = 2 * 20 * LENGTH
pytestmark = [
    pytest.mark.timeout(600),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("tensor streams"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor-streams")
    run_forks(WORKER, folder, len(WORLDS))
    return folder


def seen(runs, kind):
    folder = runs / f"{kind}-unbroken"
    return [json.loads((folder / f"seen-{n}.json").read_text()) for n in range(KINDS[kind][0])]


def weights(runs, kind):
    return load_file(runs / f"{kind}-unbroken" / "exported" / "model.safetensors")


def assert_trained_alike(runs, kind, other):
    ours, theirs = seen(runs, kind)[0], seen(runs, other)[0]
    for name in ("losses", "norms", "evaluations"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
    expected = weights(runs, other)
    assert weights(runs, kind).keys() == expected.keys()
    for name, weight in weights(runs, kind).items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-9), name


@pytest.mark.parametrize("kind", ["tp", "tp_ddp", "tp_fsdp"])
def test_a_step_has_one_mean_over_its_tokens_however_it_is_cut(runs, kind):
    assert len(seen(runs, "alone")[0]["losses"]) == 6
    assert_trained_alike(runs, kind, "alone")


def test_means_of_each_group_are_averaged_when_told(runs):
    assert_trained_alike(runs, "tp_ddp_each", "ddp_each")
    whole, each = (seen(runs, kind)[0]["losses"] for kind in ("tp_ddp", "tp_ddp_each"))
    assert each != pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("kind", CUT)
def test_ranks_of_a_group_see_the_same_samples_and_all_agree(runs, kind):
    found = seen(runs, kind)
    assert found[0]["kinds"] == ["DTensor"]
    assert all(one == found[0] for one in found)
    assert found[0]["tokens"] == seen(runs, "alone")[0]["tokens"] == TOKENS
    rows = Sentences(EVAL_ROWS)
    assert found[0]["labels"] == [rows[index]["labels"].tolist() for index in range(EVAL_ROWS)]


@pytest.mark.parametrize("kind", KILLED)
def test_a_run_that_was_killed_in_a_stream_equals_an_unbroken_one(runs, kind):
    killed, unbroken = runs / f"{kind}-killed", runs / f"{kind}-unbroken"
    last = committed(open_store(str(killed)))[0]
    assert last.generation == 2, "it did die"
    assert DIE_AFTER % 3 == 2, "in the middle of the second pass"
    assert differences(ending(killed), ending(unbroken)) == []


def test_ranks_of_a_group_draw_the_same_random_numbers_in_a_trial_too(runs):
    expected, found = (weights(runs, kind) for kind in ("tp_dropout", "tp_trial"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert seen(runs, "tp_trial")[0]["losses"] == seen(runs, "tp_dropout")[0]["losses"]
