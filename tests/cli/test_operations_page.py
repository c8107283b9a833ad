"""docs/operations.md is true: one box as it stands there, and each command of it is one."""

from __future__ import annotations

import re
import shutil

import pytest

from resilient.errors import EXIT_CODES, PERMANENT
from resilient_cli.app import load
from resilient_cli.command_tree import COMMANDS
from tests.helpers.pages import commands_of, paste_on_a_new_machine, section, shell_of
from tests.process.gangs import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_on_one_box_what_is_pasted_ends_with_a_run_that_was_resumed(tmp_path):
    work, said = paste_on_a_new_machine(shell_of(section(PAGE, "One box")), tmp_path)
    assert (work / ".venv" / "bin" / "resilient").is_file()
    assert "it ended with 75" in said
    assert re.search(r"resumed from checkpoint-\d+-g1 ", said)
    assert "trained to step 2000" in said
    assert "Verified up to checkpoint-2000-g2" in said
    assert (work / "run.html").stat().st_size > 10_000
    assert "1 intact, 0 damaged" in said
    shutil.rmtree(work / ".venv")  # a gigabyte


def is_one(words):
    """Say whether there is such a command with such options; what it works on may be missing."""
    ours, _, theirs = (list(part) for part in cut(words, "--"))
    table, name = COMMANDS, ours.pop(0)
    while name in table and (below := commands_below(name, table[name])):
        table, name = below, ours.pop(0) if ours else ""
    if name not in table:
        return name == ""
    if name == "train":
        ours = cut(ours, next((one for one in ours if one.endswith(".py")), None))[0]
    found = table[name] if hasattr(table[name], "params") else load(name, table[name])
    options = {"--help"}
    options.update(option for one in found.params for option in one.opts + one.secondary_opts)
    used = {one.partition("=")[0] for one in ours if re.match("-[^0-9]", one)}
    return used <= options and (not theirs or is_one(theirs))


def commands_below(name, one):
    """Return the commands of a group, some of which are loaded; nothing for a command."""
    below = getattr(one, "commands", {})
    return below or (hasattr(one, "module") and getattr(load(name, one), "commands", {}))


def cut(words, at):
    """Return what stands before a word, the word, and what stands behind it."""
    place = words.index(at) if at in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


@pytest.mark.parametrize("words", commands_of(PAGE), ids=" ".join)
def test_each_command_of_the_page_is_one(words):
    assert is_one(words)


def test_what_is_no_command_would_be_seen():
    assert not is_one(["ckpt", "prune", "--keep-everything"])
    assert len(commands_of(PAGE)) > 50


@pytest.mark.parametrize(
    ("page", "row"),
    [
        (
            "operations.md",
            r"^\| ([\d, ]+) \| ends with this code, because another start would end the same way",
        ),
        ("kubernetes.md", r"^\| ([\d, ]+) \| fails at once: another start would end the same way"),
        ("operations.md", r"RestartPreventExitStatus=([\d ]+)`"),
    ],
)
def test_what_ends_a_run_for_good_is_that_of_the_table(page, row):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(row, text, re.MULTILINE)
    assert [int(one) for one in found.replace(",", " ").split()] == list(PERMANENT)


def test_the_page_says_what_to_do_about_each_exit_code():
    rows = re.findall(r"^\| (\d+) \| ", section(PAGE, "Events and what to do"), re.MULTILINE)
    assert [int(one) for one in rows] == [one.number for one in EXIT_CODES]
