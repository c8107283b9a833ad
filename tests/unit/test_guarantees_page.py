"""Each promise of docs/guarantees.md names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`")


def references(text):
    """Yield (file, test or nothing); a test with no file is in the one before it in its row."""
    for line in text.splitlines():
        file = ""
        for found in REFERENCE.finditer(line):
            file = found[1] or file
            if found[1] or found[2]:
                yield file, found[2] or ""


def problem_of(file, test):
    if not file:
        return f"::{test} comes before any file in its row"
    path = ROOT / file
    if not path.is_file():
        return f"{file} is not there"
    if test and not re.search(rf"^\s*def {test}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
        return f"{file} has no {test}"
    return ""


def test_every_test_that_the_page_names_is_there():
    named = list(references(PAGE.read_text(encoding="utf-8")))
    assert len(named) > 200
    assert [one for one in (problem_of(*each) for each in named) if one] == []


@pytest.mark.parametrize(
    "row",
    [
        "| `::test_every_test_that_the_page_names_is_there` |",
        "| `tests/unit/test_gone.py` |",
        "| `tests/unit/test_guarantees_page.py::test_gone` |",
        "| `tests/unit/test_guarantees_page.py`, `::test_gone` |",
    ],
)
def test_one_that_is_not_there_is_found(row):
    assert any(problem_of(*each) for each in references(row))
