"""What is said to help against each thing that is wrong with a checkpoint."""

from __future__ import annotations

import pytest

from resilient.layouts.model import Problem, Remedy
from resilient.layouts.resumability import Alternatives, RepairOutcome, remedy


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem("a", "cut", is_fatal=True), "resilient ckpt repair '/my run'"),
        (Problem("a", "cut", cure=Remedy.COPY), "resilient ckpt repair '/my run' --from COPY"),
        (Problem("a", "cut", help="resilient ckpt scan {path}"), "resilient ckpt scan '/my run'"),
    ],
)
def test_a_command_names_the_place_as_a_shell_takes_it(problem, expected):
    assert remedy(problem, "/my run") == expected


@pytest.mark.parametrize("cure", [Remedy.UNKEPT, Remedy.NEEDLESS, Remedy.EARLIER])
def test_where_nothing_helps_that_is_said(cure):
    assert remedy(Problem("a", "so", cure=cure), "/run").startswith("none")


def test_what_was_saved_so_is_helped_by_another_step_where_one_is_whole():
    problem = Problem("a", "it has 3 NaN", is_fatal=True, cure=Remedy.EARLIER)
    others = Alternatives(sibling="/r/c 4")
    assert remedy(problem, "/r/c-8", others) == "resilient ckpt inspect '/r/c 4'"


def test_repair_that_needs_a_copy_is_named_with_it():
    problem = Problem("a", "it is missing", is_fatal=True)
    vain = Alternatives(repair=RepairOutcome.NONE)
    assert remedy(problem, "/r/c-8") == "resilient ckpt repair /r/c-8"
    assert remedy(problem, "/r/c-8", vain) == "resilient ckpt repair /r/c-8 --from COPY"


def test_severity_says_what_follows():
    found = [Problem("a", "b", is_fatal=True), Problem("a", "b", "the schedule"), Problem("a", "b")]
    assert [one.severity for one in found] == ["error", "warning", "note"]
