"""``resilient plan`` on the events of a run, on a repository, and on both."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from resilient.checkpoint.generations import claim
from resilient.storage.open import open_store
from tests.helpers.cli_repositories import TickingClock
from tests.helpers.told import RANK, SIZES, killed_run, line

PROMOTED = [
    line(
        *(13 + nth, "CheckpointPromoted"),
        **{"checkpoint": f"checkpoint-{nth}-g1", "took_seconds": 2.0, **RANK, "generation": 1},
    )
    for nth in range(2)
]


@pytest.fixture
def run(tmp_path):
    def write(more=()):
        (tmp_path / "events").mkdir(exist_ok=True)
        text = "\n".join([*killed_run(), *more])
        (tmp_path / "events" / "agent.jsonl").write_text(text + "\n", encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        ("plan", ("--notice", "30", "--every", "5m"), 0),
        ("plan-json", ("--json",), 0),
        ("plan-tight", ("--notice", "5", "--mtbf", "10m"), 1),
    ],
)
def test_what_a_run_should_do(name, options, status, run, call, matches):
    folder = run(PROMOTED if name == "plan-json" else ())
    outcome = call("plan", folder, *options)
    assert outcome.status == status
    matches(name, outcome, folder)


def test_a_slower_save_and_a_shorter_life_change_the_interval(run, call):
    def seconds(*options, more=()):
        said = json.loads(call("plan", run(more), "--json", *options).stdout)
        return said["tiers"][0]["interval"]["seconds"]

    slow = {"checkpoint": "checkpoint-9-g2", "stall_seconds": 8.0, "commit_seconds": 9.0}
    saves = [line(20 + nth, "CheckpointCommitted", **slow, **SIZES, **RANK) for nth in range(3)]
    assert seconds() < seconds(more=saves)
    assert seconds("--mtbf", "10m") < seconds("--mtbf", "10h")


def test_half_and_double_cost_more_than_the_best(run, call):
    said = json.loads(call("plan", run(), "--json").stdout)
    cost = {name: one["share"] for name, one in said["tiers"][0]["expected"].items()}
    assert cost["best"] < min(cost["half"], cost["double"])


def test_a_repository_alone_knows_its_failures_and_no_times(tmp_path, call):
    store = open_store(str(tmp_path))
    for cause in ("start", "failure", "failure"):
        claim(store, None, cause=cause, clock=TickingClock(0))
    outcome = call("plan", "--repo", tmp_path, "--json")
    said = json.loads(outcome.stdout)
    assert outcome.status == 0
    assert said["known"]["failures"]["failures"] == 2
    assert (said["tiers"], said["checkpoint"]) == ([], None)
    assert call("plan", "--repo", tmp_path, "--notice", "120").status == 1


@pytest.mark.parametrize(
    ("options", "status"),
    [((), 2), (("--every", "soon"), 78), (("--mtbf", "9steps"), 78), (("--mtbf", "auto"), 78)],
)
def test_what_says_nothing_is_refused(options, status, run, call):
    folders = [run()] if options else []
    outcome = call("plan", *folders, *options)
    assert (outcome.status, outcome.stdout) == (status, "")


def test_what_is_not_there_is_not_found(tmp_path, call):
    assert call("plan", tmp_path / "no").status == 66
    assert call("plan", "--repo", tmp_path / "no").status == 66


def test_no_torch_is_loaded(run):
    program = (
        "import sys; from resilient_cli.app import main; "
        "assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, "plan", str(run())], check=True)
