"""Each mutant fits the code that it breaks and a promise of docs/guarantees.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.mutants.__main__ import LISTS, MUTANTS

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()


def _paths(tests):
    return [word.partition("::")[0] for word in tests.split() if word.startswith("tests/")]


def test_text_of_each_mutant_stands_once_in_the_code():
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    stale = [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1]
    assert stale == []


def test_text_of_each_mutant_changes():
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []


def test_names_of_mutants_are_unique():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


def test_tests_of_each_mutant_exist():
    paths = {path for mutant in MUTANTS for path in _paths(mutant.tests)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_each_mutant_guards_a_promise_of_the_guarantees():
    named = set(re.findall(r"`(tests/[\w/]+\.py)", GUARANTEES))
    unguarded = [
        mutant.name
        for mutant in MUTANTS
        if not mutant.promise and named.isdisjoint(_paths(mutant.tests))
    ]
    assert unguarded == []


def test_each_promise_of_a_mutant_is_in_the_guarantees():
    promises = re.findall(r"^#+ (.+)$|^\| (P\d+) \|", GUARANTEES, re.MULTILINE)
    known = {"", *(text for pair in promises for text in pair)}
    assert {mutant.promise for mutant in MUTANTS} - known == set()


def test_each_list_of_mutants_is_run():
    modules = {path.stem for path in (ROOT / "tests" / "mutants").glob("*.py")}
    harness = {"__init__", "__main__", "fork_pool", "fork_server", "generated", "mutant"}
    assert modules - LISTS.keys() == harness
