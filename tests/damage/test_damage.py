"""A slice of the damage matrix: what its page says is what the code says now.

``make damage`` does all of it, with the tools the checkpoints belong to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from kinds import KINDS
from matrix import Bench
from page import BEYOND, read_page, words_of
from samples import SAMPLES

EVERY = 3
"""One damage of so many of each layout; over the layouts each comes at least once."""


@pytest.fixture(scope="module")
def bench():
    made = Bench(SAMPLES)
    yield made
    made.close()


@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=[one.name for one in SAMPLES])
def test_what_the_page_says_of_a_damage_is_what_is_said(bench, number):
    told = read_page()
    sample = SAMPLES[number]
    for at, kind in enumerate(KINDS):
        if (at + number) % EVERY == 0:
            cell = bench.cell(sample, kind, is_loaded=False)
            said = words_of(cell) if cell else None
            assert said == told.get((sample.name, kind.name)), (kind.name, cell)


def test_the_page_has_thirty_kinds_and_nothing_unseen_without_a_reason():
    told = read_page()
    assert len({kind for _, kind in told}) >= 30
    assert {one for one, (word, _) in told.items() if word == "**unseen**"} == set(BEYOND)
