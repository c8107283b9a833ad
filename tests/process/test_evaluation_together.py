"""What several ranks evaluate is what one evaluates, however outputs are gathered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.process import evaluation_worker
from tests.process.gangs import run_gang_to_end


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    return one == other


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    # In a process of its own: a fork of this one, for a loader, may hold locks of other threads.
    folder = tmp_path_factory.mktemp("alone")
    run_gang_to_end(1, Path(evaluation_worker.__file__), folder)
    return torch.load(folder / "found-0.pt", weights_only=False)


@pytest.mark.smoke
def test_one_rank_counts_every_sample_once(alone):
    for (name, size), (_, _, (predictions, labels)) in alone.items():
        if name != "apart":
            assert labels.tolist() == [index % 3 for index in range(size)]
            assert predictions[0].shape == (size, 3)
            assert predictions[1][0].shape == (size, 5, 3)
            assert predictions[1][1]["pooled"].dtype == np.float32
    assert [len(one) for one in alone["apart", 19][2][1]] == [4, 4, 4, 4, 3]
    assert alone["objects", 19][2][0][2] == [f"label {index % 3}" for index in range(19)]


def test_metrics_get_inputs_and_losses_when_they_are_asked_for(alone):
    metrics, [((_, _, inputs, losses), _)], _ = alone["with more", 19]
    assert inputs.shape == (19, 5, 3)
    assert losses.mean() == pytest.approx(metrics["eval_loss"])


def test_metrics_of_batches_are_asked_for_once_at_the_end(alone):
    metrics, judged, _ = alone["by batch", 19]
    assert [told for _, told in judged] == [False] * 4 + [True]
    assert [len(losses) for (*_, losses), _ in judged] == [4, 4, 4, 4, 3]
    assert metrics["eval_calls"] == 5


def test_a_stream_is_evaluated_as_a_dataset_with_a_length_is(alone):
    for size in evaluation_worker.SIZES:
        metrics, _, output = alone["a stream", size]
        assert equal(
            (metrics["eval_loss"], output),
            (alone["plain", size][0]["eval_loss"], alone["plain", size][2]),
        )
        assert len(alone["a stream by batch", size][1]) == len(alone["by batch", size][1])


def test_ranks_that_evaluate_together_see_what_one_sees(alone, tmp_path):
    run_gang_to_end(3, Path(evaluation_worker.__file__), tmp_path)
    for rank in range(3):
        found = torch.load(tmp_path / f"found-{rank}.pt", weights_only=False)
        assert [name for name in alone if not equal(found[name], alone[name])] == []
