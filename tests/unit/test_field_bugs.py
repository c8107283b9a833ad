"""Every pain of the list of the field has a test that bears its number, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
ROWS = [*range(1, 41)]
TRIED = 15


def section(title: str) -> str:
    """Return the text of one section of the page."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", GUARANTEES, re.MULTILINE | re.DOTALL)
    assert match, title
    return match[1]


def rows() -> dict[str, tuple[str, str]]:
    """Return report and proof by number."""
    found = re.findall(r"^\| (\w+) \| (.+?) \| (.+) \|$", section("Field bugs"), re.MULTILINE)
    return {number: (report, proof) for number, report, proof in found if number != "no"}


def named_in(proof: str) -> list[tuple[str, str]]:
    """Return (file, test) of every test that a row names."""
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", proof)


def test_every_row_of_the_list_is_in_the_table():
    numbers = {int(number) for number in rows() if number.isdecimal()}
    assert numbers == set(ROWS)
    assert len([number for number in rows() if re.fullmatch(r"P\d+", number)]) == TRIED


def test_every_row_names_a_test_or_says_why_not():
    bare = [
        number
        for number, (_, proof) in rows().items()
        if not named_in(proof) and not proof.startswith("cannot occur: ")
    ]
    assert bare == []


def test_every_test_that_a_row_names_is_there():
    gone = [
        f"{file}::{test}"
        for _, proof in rows().values()
        for file, test in named_in(proof)
        if not (ROOT / file).is_file()
        or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert gone == []


def test_every_number_of_a_report_is_in_the_name_of_its_test_or_beside_it():
    """A report that a row names is named by one of its tests, or by that test's file."""
    unnamed = []
    for number, (report, proof) in rows().items():
        texts = [(ROOT / file).read_text(encoding="utf-8") for file, _ in named_in(proof)]
        unnamed += [
            (number, issue)
            for issue in re.findall(r"#(\d+)", report)
            if texts and not any(issue in text for text in [*texts, proof])
        ]
    assert unnamed == []
