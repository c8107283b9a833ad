"""ckpt bisect: the first checkpoint at which a command fails, as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from resilient.checkpoint.catalog import ancestry, committed
from resilient.storage.local import LocalStore
from resilient_cli.commands.bisect import BisectResult, Verdict, bisect_sequence
from tests.helpers.cli_repositories import write_run, write_usual_run

JUDGE = """
import os, sys
step = int(sys.argv[1].rpartition("checkpoint-")[2].split("-")[0])
assert sys.argv[1] == os.path.join(os.environ["RESILIENT_REPO"], os.environ["RESILIENT_CHECKPOINT"])
assert os.path.isfile(os.path.join(sys.argv[1], "manifest.json"))
print("looked at", step)
"""


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


@pytest.fixture
def judge(tmp_path):
    """Return the words of a command that ends as an expression of the step says."""

    def words(expression):
        path = tmp_path / "judge.py"
        path.write_text(f"{JUDGE}sys.exit({expression})\n", encoding="utf-8")
        return ("--", sys.executable, path, "{}")

    return words


def bisect(call, repo, *words):
    return call("ckpt", "bisect", "step:10", "latest", "--repo", repo, *words)


def test_it_reads_as_in_the_transcripts(repo, judge, call, matches):
    matches("bisect", bisect(call, repo, *judge("step >= 25")), repo)
    matches("bisect-json", bisect(call, repo, "--json", *judge("step >= 35")), repo)
    unsure = judge("125 if step in (20, 25) else step >= 35")
    matches("bisect-unsure", bisect(call, repo, *unsure), repo)
    matches("bisect-unsure-json", bisect(call, repo, "--json", *unsure), repo)
    assert bisect(call, repo, "-q", *unsure).stdout == ""
    assert bisect(call, repo, "-q", *judge("step >= 20")).stdout == "checkpoint-20-g1\n"


def test_the_way_of_an_abandoned_checkpoint_is_its_own(repo, judge, call):
    store = LocalStore(repo)
    ways = {one.folder: [two.folder for two in ancestry(store, one)] for one in committed(store)}
    older = ["checkpoint-20-g1", "checkpoint-10-g1"]
    assert ways["checkpoint-30-g1"] == ["checkpoint-30-g1", *older]
    assert ways["checkpoint-35-g2"] == ["checkpoint-35-g2", "checkpoint-25-g2", *older]
    words = ("checkpoint-10-g1", "checkpoint-30-g1", "-r", repo, "--json", *judge("step >= 30"))
    found = json.loads(call("ckpt", "bisect", *words).stdout)
    assert (found["first_bad"], found["between"]) == ("checkpoint-30-g1", 3)


def test_a_damaged_checkpoint_is_not_shown_to_the_command(repo, judge, call):
    next((repo / "checkpoint-20-g1").glob("model*")).unlink()
    outcome = bisect(call, repo, "--json", *judge("1 if step == 20 else step >= 25"))
    found = json.loads(outcome.stdout)
    assert (outcome.status, found["unknown"]) == (1, ["checkpoint-20-g1"])
    unseen = {"checkpoint": "checkpoint-20-g1", "verdict": "unknown", "status": None}
    assert unseen in found["tried"]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("0", "checkpoint-35-g2 must be bad but is good: the command ended with 0"),
        ("1", "checkpoint-10-g1 must be good but is bad: the command ended with 1"),
        ("125", "checkpoint-10-g1 must be good but is unknown: the command cannot decide"),
        ("127", "ended with 127: it was not found or cannot be executed"),
        ("os.kill(os.getpid(), 9)", "ended with -9 at checkpoint-10-g1, probably by a signal"),
        ("139", "ended with 139 at checkpoint-10-g1, probably by a signal"),
    ],
)
def test_what_says_nothing_is_refused(repo, judge, call, expression, said):
    outcome = bisect(call, repo, *judge(expression))
    assert (outcome.status, outcome.stdout) == (2, "")
    assert said in outcome.stderr


def test_ends_that_no_training_joins_and_a_command_that_is_not_there_are_refused(repo, judge, call):
    for ends in (("checkpoint-30-g1", "latest"), ("latest", "step:10"), ("latest", "latest")):
        outcome = call("ckpt", "bisect", *ends, "-r", repo, *judge("0"))
        assert outcome.status == 2
        assert "is not an ancestor of" in outcome.stderr
    outcome = bisect(call, repo, "--", "/nowhere/judge")
    assert (outcome.status, "cannot run `/nowhere/judge`" in outcome.stderr) == (2, True)
    assert call("ckpt", "bisect", "step:10", "latest", "-r", repo).status == 2
    assert call("ckpt", "bisect", "a", "b", "--", "true").status == 2


def test_the_real_program_keeps_what_the_command_writes_out_of_the_answer(repo, judge):
    words = ("ckpt", "bisect", "step:10", "latest", "-r", repo, "--json", *judge("step >= 25"))
    command = [sys.executable, "-m", "resilient_cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert json.loads(done.stdout)["first_bad"] == "checkpoint-25-g2"
    assert sorted(done.stderr.splitlines()) == [f"looked at {n}" for n in (10, 20, 25, 35)]


def test_dozens_take_a_few_runs_of_the_command(tmp_path, judge, call):
    write_run(tmp_path / "long", [(None, list(range(1, 65)))])
    words = ("step:1", "latest", "-r", tmp_path / "long", "--json", *judge("step >= 40"))
    found = json.loads(call("ckpt", "bisect", *words).stdout)
    assert found["first_bad"] == "checkpoint-40-g1"
    assert (found["between"], len(found["tried"])) == (64, 8)


def judging(change, unknown=()):
    """Return a judge of numbers, and what it was asked."""
    asked = []

    def judge(one, left):
        assert left >= 1
        asked.append(one)
        if one in unknown:
            return Verdict.UNKNOWN
        return Verdict.BAD if one >= change else Verdict.GOOD

    return judge, asked


@pytest.mark.parametrize("count", range(2, 40))
def test_every_change_is_found_with_few_questions(count):
    for change in range(1, count):
        judge, asked = judging(change)
        assert bisect_sequence(range(count), judge) == BisectResult(change - 1, change, ())
        assert len(asked) <= (count - 2).bit_length()
        assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("unknown", [{4}, {3, 4, 5}, {1, 2, 3, 4, 5, 6, 7, 8}, {2, 7}])
def test_what_nothing_is_known_of_is_told_where_it_matters(unknown):
    known = [one for one in range(10) if one not in unknown]
    for change in range(1, 10):
        judge, _ = judging(change, unknown)
        good = max(one for one in known if one < change)
        bad = min(one for one in known if one >= change)
        expected = BisectResult(good, bad, tuple(range(good + 1, bad)))
        assert bisect_sequence(range(10), judge) == expected
