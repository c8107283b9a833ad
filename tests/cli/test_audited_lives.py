"""``resilient audit`` and the records of lives: each is there, or was never to be."""

from __future__ import annotations

import json
import shutil

import pytest

from resilient.checkpoint.generations import claim, mark_committed, read_generation
from resilient.checkpoint.rollback import apply_rollback, plan_rollback, plan_undo
from resilient.format.keys import CheckpointId, generation_key
from resilient.storage.local import LocalStore
from tests.helpers.ledgers import Forger, Run, usual_run

FIRST, LOST, THIRD, LAST = map(generation_key, range(1, 5))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    usual_run(folder)
    return folder


@pytest.fixture
def repo(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def edit_the_cause(forger):
    text = (forger.folder / LAST).read_text()
    (forger.folder / LAST).write_text(text.replace('"test"', '"start"'))


def drop(key):
    return lambda forger: (forger.folder / key).unlink()


def drop_what_was_given_up(forger):
    """Of the second life nothing is left but the hole."""
    for one in (LOST, "ledger/g000002-000000000007.json"):
        (forger.folder / one).unlink()
    shutil.rmtree(forger.folder / "checkpoint-7-g2")


def drop_the_newest_that_saved_nothing_yet_its_mark(forger):
    mark_committed(LocalStore(forger.folder), 5)


def swap_for_another_runs(forger):
    other = forger.folder.parent / "other"
    usual_run(other)
    shutil.copy(other / LOST, forger.folder / LOST)


def swap_for_another_lives(forger):
    shutil.copy(forger.folder / FIRST, forger.folder / LOST)


def skip_more_than_there_is(forger):
    forger.write(LAST, forger.read(LAST) | {"skipped": 5})


PART = "its work is part of the result, and its start is unknown"
NOTHING = "it is unknown whether it trained, and from where"


@pytest.mark.parametrize(
    ("tamper", "where", "said"),
    [
        (drop(FIRST), FIRST, f"is missing: {PART}"),
        (drop(THIRD), THIRD, f"is missing: {PART}"),
        (drop(LAST), LAST, f"is missing: {PART}"),
        (drop(LOST), LOST, f"is missing: {NOTHING}"),
        (drop_what_was_given_up, LOST, f"is missing: {NOTHING}"),
        (
            drop_the_newest_that_saved_nothing_yet_its_mark,
            generation_key(5),
            f"is missing: {NOTHING}",
        ),
        (edit_the_cause, LAST, PART),
        (swap_for_another_runs, LOST, "belongs to run"),
        (swap_for_another_lives, LOST, "is the record of generation 1"),
        (skip_more_than_there_is, LAST, "is above the number of the generation"),
    ],
)
def test_a_record_that_is_missing_or_does_not_prove_is_a_flaw(tamper, where, said, repo, call):
    tamper(Forger(repo))
    outcome = call("audit", repo, "--json")
    assert outcome.status == 1, outcome.stdout
    flaw = json.loads(outcome.stdout)["flaws"][0]
    assert (flaw["key"], flaw["record"]) == (where, 0)
    assert said in flaw["problem"]
    shown = call("audit", repo)
    assert where in shown.stdout
    assert "NOT VERIFIED" in shown.stdout


def test_a_hole_of_any_size_is_one_flaw(repo, call):
    run = LocalStore(repo)
    claim(run, CheckpointId(4, 10), cause="test", clock=Run(repo).clock, above=10**9)
    key = generation_key(10**9 + 1)
    forger = Forger(repo)
    assert forger.read(key)["skipped"] == 10**9 - 4
    assert call("audit", repo).status == 0
    forger.write(key, {name: one for name, one in forger.read(key).items() if name != "skipped"})
    flaws = json.loads(call("audit", repo, "--json").stdout)["flaws"]
    assert [one["key"] for one in flaws] == [generation_key(5)]
    assert f"999999995 more up to generation {10**9}" in flaws[0]["problem"]


def test_moves_by_hand_and_lives_that_saved_nothing_leave_no_flaw(repo, call):
    run = Run(repo)
    apply_rollback(run.store, plan_rollback(run.store, CheckpointId(3, 6)), run.clock)
    assert call("audit", repo).status == 0
    apply_rollback(run.store, plan_undo(run.store), run.clock)
    run.begin(CheckpointId(4, 10))
    run.begin(CheckpointId(4, 10))
    run.train()
    run.save()
    assert read_generation(run.store, 8).skipped == 0
    assert call("audit", repo).status == 0


def test_a_number_that_folders_bear_already_is_left_out_and_told(tmp_path, call):
    """As where a near tier outlived the repository that it belonged to."""
    run = Run(tmp_path / "run")
    first = claim(run.store, None, cause="test", clock=run.clock, above=7)
    assert (first.number, first.skipped) == (8, 7)
    run.begin()
    run.train(3)
    run.save()
    assert call("audit", run.folder).status == 0


def test_a_copy_takes_the_records_of_lives_that_led_elsewhere_along(repo, tmp_path, call):
    there = tmp_path / "there"
    assert call("ckpt", "cp", "latest", there, "--repo", repo).status == 0
    assert {one.name for one in (there / "generations").glob("g*[0-9].json")} == {
        f"g00000{number}.json" for number in range(1, 5)
    }
    outcome = call("audit", there)
    assert outcome.status == 0, outcome.stdout
