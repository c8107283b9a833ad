"""``docs/parity.md`` has a line for every row of the specification, and its lines are true."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from resilient.train.arguments.validation import NAMES_NOT_YET, NOT_YET

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "parity.md"
SPECIFICATION = ROOT.parent / "shared" / "reference" / "training-system.md"

# Rows of each group, by the letter of their ids, in the order of the specification.
ROWS = {
    "L": 42,
    "A": 77,
    "S": 28,
    "C": 7,
    "K": 25,
    "O": 18,
    "H": 15,
    "D": 31,
    "P": 13,
    "G": 10,
    "X": 22,
    "R": 10,
    "N": 3,
    "T": 13,
    "M": 11,
    "B": 5,
    "U": 11,
    "V": 9,
    "W": 7,
    "Y": 8,
    "Z": 13,
    "E": 7,
}
IDS = [f"{letter}{number:02}" for letter, count in ROWS.items() for number in range(1, count + 1)]
REASON_WORDS_MIN = 5


def table(text):
    """Return the rows of the page: id, what, state, where, why."""
    cells = re.findall(r"^\| ([A-Z]\d\d) \|(.*)\|$", text, re.MULTILINE)
    return [(name, *(cell.strip() for cell in rest.split(" | "))) for name, rest in cells]


def works(text):
    """Return the works that the page says are open."""
    return set(re.findall(r"^\| (\w+) \| [^|]+ \|$", text, re.MULTILINE)) - {"work"}


@cache
def names_of_tests_in(path):
    """Return the names of the tests of a module, those in classes too."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.name.startswith("test_")
    }


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def missing_test(name):
    """Return whether no such test is here."""
    path, _, test = name.partition("::")
    if not (path.startswith("tests/") and (ROOT / path).is_file()):
        return True
    return not names_of_tests_in(path) if not test else test not in names_of_tests_in(path)


def missing_module(name):
    return not (ROOT / name).exists()


def wrong(row, known_works):
    """Return what is not true of a row, or nothing."""
    if len(row) != 5:
        return f"{row[0]} has {len(row)} cells"
    name, what, state, where, why = row
    if not what:
        return f"{name} does not say what it is"
    checks = {"done": wrong_done, "open": wrong_open, "reason": wrong_reason}
    if state not in checks:
        return f"{name} is `{state}`, and not done, open or reason"
    return checks[state](name, where, why, known_works)


def wrong_done(name, where, why, _):
    if not quoted(where) or not quoted(why):
        return f"{name} is done and names no module or no test"
    lost = [one for one in quoted(where) if missing_module(one)]
    lost += [one for one in quoted(why) if missing_test(one)]
    return f"{name} names what does not exist: {', '.join(lost)}" if lost else ""


def wrong_open(name, where, why, known_works):
    if where not in known_works:
        return f"{name} is open, and `{where}` is no work that the page names"
    return f"{name} is open and names a test" if why else ""


def wrong_reason(name, where, why, _):
    if where or len(why.split()) < REASON_WORDS_MIN:
        return f"{name} has no reason that explains it"
    files = [one for one in quoted(why) if one.startswith(("resilient/", "tests/"))]
    lost = [one for one in files if missing_module(one)]
    return f"{name} names what does not exist: {', '.join(lost)}" if lost else ""


def test_the_page_has_every_row_once_and_in_order():
    assert sum(ROWS.values()) == 385
    assert [row[0] for row in table(PAGE.read_text(encoding="utf-8"))] == IDS


def test_what_the_page_says_of_each_row_is_true():
    text = PAGE.read_text(encoding="utf-8")
    found = [wrong(row, works(text)) for row in table(text)]
    assert [one for one in found if one] == []


def test_every_work_that_the_page_names_has_rows():
    text = PAGE.read_text(encoding="utf-8")
    assert works(text) == {row[3] for row in table(text) if row[2] == "open"}


@pytest.mark.skipif(not SPECIFICATION.is_file(), reason="the specification is not beside this tree")
def test_the_rows_are_those_of_the_specification():
    text = SPECIFICATION.read_text(encoding="utf-8")
    assert re.findall(r"^\| ([A-Z]\d\d) \|", text, re.MULTILINE) == IDS


def test_what_is_refused_as_missing_is_not_called_done():
    refused = {*NOT_YET}.union(*NAMES_NOT_YET.values())
    rows = table(PAGE.read_text(encoding="utf-8"))
    done = {row[0]: quoted(row[1])[0] for row in rows if row[2] == "done" and quoted(row[1])}
    assert {name: what for name, what in done.items() if what in refused} == {}


THIS = "tests/unit/test_parity_page.py"
TEST = f"`{THIS}::test_the_page_has_every_row_once_and_in_order`"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (f"| L01 | a | done | `{THIS}` | {TEST} |", ""),
        (
            f"| L01 | a | done | `resilient/no.py` | {TEST} |",
            "what does not exist: resilient/no.py",
        ),
        (f"| L01 | a | done | `{THIS}` | `{THIS}::test_no` |", "what does not exist"),
        (f"| L01 | a | done | `{THIS}` | `tests/unit/test_no.py` |", "what does not exist"),
        (f"| L01 | a | done | `{THIS}` | `docs/parity.md` |", "what does not exist"),
        (f"| L01 | a | done | `{THIS}` |  |", "names no module or no test"),
        ("| L01 | a | open | loop |  |", ""),
        ("| L01 | a | open | someday |  |", "is no work"),
        (f"| L01 | a | open | loop | {TEST} |", "is open and names a test"),
        ("| L01 | a | reason |  | nothing of it exists in torch |", ""),
        ("| L01 | a | reason |  | no |", "has no reason"),
        ("| L01 | a | reason |  | five words and then `resilient/no.py` |", "does not exist"),
        ("| L01 | a | maybe |  |  |", "is `maybe`"),
        ("| L01 | a | done |", "cells"),
    ],
)
def test_a_line_that_is_not_true_is_found(row, said):
    (parsed,) = table(row)
    found = wrong(parsed, {"loop"})
    assert said in found
    assert bool(said) == bool(found)
