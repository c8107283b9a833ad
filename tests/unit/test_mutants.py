"""Every mutant fits the code that it breaks, so that ``make mutants`` means something."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.__main__ import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_the_text_of_each_mutant_stands_once_in_the_code():
    texts = {one.file: (ROOT / one.file).read_text() for one in MUTANTS}
    stale = [one.name for one in MUTANTS if texts[one.file].count(one.old) != 1]
    assert stale == []


def test_each_mutant_has_a_name_of_its_own():
    names = [one.name for one in MUTANTS]
    assert len(names) == len(set(names))
