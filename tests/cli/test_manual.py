"""``resilient help``: one table for every exit code, an answer for every id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import resilient
from resilient.errors import EXIT_CODES
from resilient_cli.commands.help import errors, explanations

DOCS = Path(resilient.__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("help", ()),
        ("help-exit-codes", ("exit-codes",)),
        ("help-exit-codes-json", ("exit-codes", "--json")),
        ("help-75", ("75",)),
        ("help-errors", ("errors",)),
        ("help-errors-json", ("errors", "--json")),
        ("help-error", ("RES-CKPT-DAMAGED",)),
        ("help-error-json", ("RES-CKPT-DAMAGED", "--json")),
        ("help-refs", ("refs",)),
        ("help-storage", ("storage",)),
        ("help-environment", ("environment",)),
        ("help-environment-json", ("environment", "--json")),
        ("help-unknown", ("RES-FENCE",)),
    ],
)
def test_what_help_says(name, words, call, matches, tmp_path):
    outcome = call("help", *words)
    assert outcome.status == (2 if name == "help-unknown" else 0)
    matches(name, outcome, tmp_path)


def test_every_error_ends_in_a_code_of_the_table_and_is_explained():
    assert {one.exit_code for one in errors().values()} <= {one.number for one in EXIT_CODES}
    assert explanations().keys() == set(errors())


@pytest.mark.parametrize("code", explanations())
def test_every_id_is_answered_with_what_is_safe_and_what_is_next(code, call):
    said = json.loads(call("help", code.lower(), "--json").stdout)
    assert said["code"] == code
    assert said["exit"] == errors()[code].exit_code
    assert said["cause"]
    assert said["safe"]
    assert said["remedies"]


# A value that only pickle could save is in the script, where no command reaches.
BY_HAND = {"RES-STATE-UNSAVABLE"}


@pytest.mark.parametrize("code", explanations())
def test_what_is_next_is_a_command_where_there_is_one(code, call):
    first = json.loads(call("help", code, "--json").stdout)["remedies"][0]
    assert (first.split()[0] in {"resilient", "kubectl"}) == (code not in BY_HAND), first


def test_the_help_of_the_program_names_every_code_that_a_command_ends_in(call):
    said = " ".join(call("--help").stdout.split())
    for one in EXIT_CODES:
        if one.number < 130:
            assert f"{one.number} {one.brief}" in said


def test_help_of_a_command_is_that_command_s(call):
    assert call("help", "ckpt", "ls").stdout == call("ckpt", "ls", "--help").stdout


def test_the_page_of_exit_codes_is_the_table(call):
    rows = "".join(
        f"| {one.number} | {f'EX_{one.name}' if one.name else ''} | {one.meaning} "
        f"| {one.scheduler} |\n"
        for one in EXIT_CODES
    )
    assert rows in (DOCS / "exit-codes.md").read_text(encoding="utf-8"), rows


@pytest.mark.parametrize(
    "remedy",
    sorted(
        {one for each in explanations().values() for one in each.remedies if "resilient " in one}
    ),
)
def test_the_commands_that_are_recommended_exist(remedy, call):
    words = remedy[remedy.index("resilient ") :].partition(",")[0].split()[1:]
    if words[0] in ("COMMAND", "help"):
        return
    named = words[:2] if words[0] == "ckpt" else words[:1]
    outcome = call(*named, "--help")
    assert outcome.status == 0
    for option in (one for one in words if one.startswith("--") and one != "--help"):
        assert option in outcome.stdout
