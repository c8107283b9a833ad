"""States of random generators: the same stream, and how many draws apart."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch

from resilient.diff import rng
from resilient.diff.rng import (
    AHEAD_WORDS_MAX,
    compare,
    draws_between,
    of_numpy,
    of_philox,
    of_python,
    of_torch,
)


def python(seed, draws):
    generator = random.Random(seed)
    for _ in range(draws):
        generator.getrandbits(32)
    return of_python(generator.getstate())


def numpy(seed, draws):
    generator = np.random.RandomState(seed)
    generator.randint(0, 2**32, draws, dtype=np.uint32)
    _, key, position, has_gauss, gauss = generator.get_state()
    return of_numpy(key.astype("<u4").tobytes(), position, has_gauss, gauss)


def of_cpu(seed, draws):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        torch.rand(1, generator=generator)
    return of_torch(bytes(generator.get_state().numpy()))


@pytest.mark.parametrize("state", [python, numpy, of_cpu])
@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 2_000])
def test_draws_apart_are_counted_in_both_directions(state, draws):
    before, after = state(5, 10), state(5, 10 + draws)
    assert draws_between(before, after) == draws
    assert draws_between(after, before) == -draws


@pytest.mark.parametrize("state", [python, numpy, of_cpu])
def test_another_seed_is_another_stream(state, monkeypatch):
    monkeypatch.setattr(rng, "AHEAD_WORDS_MAX", 10_000)
    assert draws_between(state(5, 10), state(6, 10)) is None
    assert draws_between(state(5, 0), state(5, 11_000)) is None
    assert AHEAD_WORDS_MAX >= 1_000_000


def test_a_block_that_is_used_up_is_the_same_as_the_next_at_its_beginning():
    used_up = python(5, 624)
    fresh = random.Random(5)
    for _ in range(625):
        fresh.getrandbits(32)
    words = of_python(fresh.getstate()).words
    begun = rng.RngState(words, 0, used_up.rest)
    found = compare({(0, "python"): used_up}, {(0, "python"): begun})
    assert (found[0].same, found[0].draws) == (True, 0)


def test_a_cached_normal_makes_a_difference():
    one = random.Random(5)
    other = random.Random(5)
    one.gauss()
    other.getrandbits(32)
    states = [of_python(each.getstate()) for each in (one, other)]
    assert states[0].rest != states[1].rest
    generator = torch.Generator().manual_seed(5)
    before = of_torch(bytes(generator.get_state().numpy()))
    torch.randn(1, generator=generator)
    after = of_torch(bytes(generator.get_state().numpy()))
    assert before.rest != after.rest
    again = torch.Generator()
    again.set_state(generator.get_state())
    same = of_torch(bytes(again.get_state().numpy()))
    assert compare({(0, "cpu"): after}, {(0, "cpu"): same})[0].same


def test_philox_tells_its_distance():
    one, other, third = (
        of_philox(struct.pack("<QQ", *each)) for each in ((7, 100), (7, 164), (8, 100))
    )
    assert draws_between(one, other) == 64
    assert draws_between(one, third) is None
    assert compare({(0, "cuda 0"): one}, {(0, "cuda 0"): third})[0].same is False


def test_what_one_side_lacks_is_told():
    one = python(5, 0)
    found = compare({(0, "python"): one, (1, "python"): one}, {(0, "python"): one})
    assert [(each.rank, each.same, each.is_in) for each in found] == [
        (0, True, "both"),
        (1, None, "a"),
    ]


@pytest.mark.parametrize("value", [None, (3, (1, 2), None), (3, (-1,) * 625, None), [3], "x"])
def test_what_is_no_state_is_none(value):
    assert of_python(value) is None
    assert of_torch(b"12") is None
    assert of_philox(b"12") is None
    assert of_numpy(b"12", 0, 0, 0.0) is None
