"""The random numbers that a stage's layers draw: its own, and apart from the process's."""

from __future__ import annotations

import torch

from resilient.strategies.pipeline.runtime import PipelineRank, StageRandom


def stream(number, seed=5):
    torch.manual_seed(seed)
    return StageRandom(PipelineRank(torch.device("cpu"), number, (0, 1), None, (number,), None))


def drawn(random):
    with random.drawing():
        return torch.rand(4).tolist()


def test_stages_draw_different_numbers_and_who_shares_a_stage_the_same():
    assert drawn(stream(0)) != drawn(stream(1))
    assert drawn(stream(1)) == drawn(stream(1))
    assert drawn(stream(1)) != drawn(stream(1, seed=6)), "replicas draw others"


def test_a_stream_goes_on_where_it_was_and_the_process_s_own_is_left_alone():
    random = stream(0)
    before = torch.get_rng_state()
    first, second = drawn(random), drawn(random)
    assert first != second
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_goes_on_in_another_life():
    random = stream(0)
    drawn(random)
    kept = {name: one.clone() for name, one in random.state_dict().items()}
    expected = drawn(random)
    other = stream(1, seed=9)
    other.load_state_dict(kept)
    assert drawn(other) == expected
