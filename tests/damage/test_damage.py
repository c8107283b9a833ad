"""A slice of the damage matrix: what its page says is what the code says now.

``make damage`` does all of it, with the tools the checkpoints belong to.
"""

from __future__ import annotations

import pytest

from tests.damage.contradictions import kinds_of
from tests.damage.matrix import Bench
from tests.damage.page import BEYOND, read_page, words_of, wrong_help
from tests.damage.sharded import ALL

EVERY = 6
"""One damage of so many of each layout; over the layouts each comes at least once."""


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    made.close()


@pytest.mark.parametrize("number", range(len(ALL)), ids=[one.name for one in ALL])
def test_what_the_page_says_of_a_damage_is_what_is_said(bench, number):
    told = read_page()
    sample = ALL[number]
    for at, kind in enumerate(kinds_of(sample)):
        if (at + number) % EVERY == 0:
            cell = bench.cell(sample, kind, is_loaded=False)
            said = words_of(cell) if cell else None
            assert said == told.get((sample.name, kind.name)), (kind.name, cell)
            assert cell is None or not wrong_help(cell), (kind.name, cell)


def test_the_page_has_thirty_kinds_and_nothing_unseen_without_a_reason():
    told = read_page()
    assert len({kind for _, kind in told}) >= 30
    assert {one for one, (word, _) in told.items() if word == "**unseen**"} == set(BEYOND)
