"""``resilient audit`` on a whole ledger, and on one that was tampered with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.helpers.ledgers import Forger, Run, usual_run

FIRST, SECOND, LOST, THIRD, LAST = (
    "ledger/g000001-000000000002.json",
    "ledger/g000001-000000000004.json",
    "ledger/g000002-000000000007.json",
    "ledger/g000003-000000000006.json",
    "ledger/g000004-000000000010.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    usual_run(folder)
    return folder


@pytest.fixture
def repo(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "options"),
    [("audit", ()), ("audit-json", ("--json",)), ("audit-plain", ("--format", "plain"))],
)
def test_a_whole_ledger_is_proven(name, options, repo, call, matches):
    matches(name, call("audit", repo, *options), repo)


def test_no_torch_is_loaded(repo):
    program = (
        "import sys; from resilient_cli.app import main; "
        "assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, "audit", str(repo)], check=True)


def test_nothing_to_audit(tmp_path, call):
    assert call("audit", tmp_path / "nothing").status == 66
    run = Run(tmp_path / "run")
    run.begin()
    assert call("audit", tmp_path / "run").status == 66


def test_a_checkpoint_without_a_ledger_is_not_proven(repo, call):
    Forger(repo).write(
        "checkpoint-10-g4/manifest.json",
        Forger(repo).read("checkpoint-10-g4/manifest.json") | {"data": {"epoch": 1, "samples": 40}},
    )
    outcome = call("audit", repo)
    assert outcome.status == 1
    assert "was saved without a ledger" in outcome.stdout


def test_what_rotation_took_is_proven_all_the_same(repo, call):
    for one in repo.glob("checkpoint-[246]-*"):
        shutil.rmtree(one)
    assert call("audit", repo).status == 0


def edit_a_loss(forger):
    text = (forger.folder / SECOND).read_text()
    (forger.folder / SECOND).write_text(text.replace("0.25]", "0.24]"))


def edit_a_loss_under_a_new_seal(forger):
    fields = forger.read(SECOND)
    fields["records"][1][-1] = 0.24
    forger.write(SECOND, fields)


def edit_a_loss_under_new_links(forger):
    fields = forger.read(SECOND)
    fields["records"][1][-1] = 0.24
    forger.rechain(fields)
    forger.write(SECOND, fields)


def edit_a_loss_and_all_links_up_to_a_rotated_checkpoint(forger):
    shutil.rmtree(forger.folder / "checkpoint-4-g1")
    edit_a_loss_under_new_links(forger)


def drop_a_record(forger):
    fields = forger.read(SECOND)
    del fields["records"][0], fields["checks"][0]
    forger.write(SECOND, fields)


def drop_a_record_everywhere(forger):
    forger.forge(THIRD, lambda fields: fields["records"].pop(1))


def swap_records(forger):
    fields = forger.read(LAST)
    rows = fields["records"]
    rows[0], rows[1] = rows[1], rows[0]
    forger.write(LAST, fields)


def drop_a_segment(forger):
    (forger.folder / SECOND).unlink()


def duplicate_a_segment(forger):
    shutil.copy(forger.folder / FIRST, forger.folder / SECOND)


def duplicate_a_segment_under_a_new_name(forger):
    shutil.copy(forger.folder / FIRST, forger.folder / "ledger/g000001-000000000003.json")


def splice_another_runs_segment(forger):
    other = forger.folder.parent / "other"
    usual_run(other)
    shutil.copy(other / SECOND, forger.folder / SECOND)


def splice_another_runs_segment_with_our_names(forger):
    other = forger.folder.parent / "other"
    usual_run(other)
    ours, theirs = forger.read(SECOND), Forger(other).read(SECOND)
    forger.write(SECOND, theirs | {name: ours[name] for name in ("run_id", "opens")})


def change_a_range(forger):
    fields = forger.read(THIRD)
    fields["records"][1][4:6] = [8, 20]
    forger.write(THIRD, fields)


def change_a_range_everywhere(forger):
    def change(fields):
        fields["records"][0][4] += 4

    forger.forge(SECOND, change)


def train_a_range_twice_everywhere(forger):
    def change(fields):
        fields["records"][0][4] -= 8

    forger.forge(SECOND, change)


def cut_the_tail(forger):
    fields = forger.read(LAST)
    del fields["records"][-1], fields["checks"][-1]
    forger.rechain(fields)
    forger.write(LAST, fields)


def cut_the_last_segment(forger):
    (forger.folder / LAST).unlink()


def alter_the_generation(forger):
    forger.write(SECOND, forger.read(SECOND) | {"generation": 2})


def alter_the_generation_and_the_name(forger):
    fields = forger.read(THIRD) | {"generation": 2}
    forger.write("ledger/g000002-000000000006.json", fields)
    forger.write(LAST, forger.read(LAST) | {"previous": "ledger/g000002-000000000006.json"})


def alter_the_head_in_the_segment(forger):
    forger.write(SECOND, forger.read(SECOND) | {"head": "0" * 64})


def alter_the_head_in_the_newest_manifest(forger):
    key = "checkpoint-10-g4/manifest.json"
    fields = forger.read(key)
    fields["data"]["ledger"]["head"] = forger.read(THIRD)["head"]
    forger.write(key, fields)


def alter_the_head_in_an_older_manifest(forger):
    key = "checkpoint-4-g1/manifest.json"
    fields = forger.read(key)
    fields["data"]["ledger"]["head"] = "0" * 64
    forger.write(key, fields)


def go_on_from_another_checkpoint(forger):
    def change(fields):
        lost = forger.read(LOST)
        fields["previous"], fields["opens"] = LOST, lost["head"]

    forger.forge(THIRD, change)


def change_the_order_everywhere(forger):
    def change(fields):
        fields["records"][0][-1] = "0" * 64

    forger.forge(FIRST, change)


def say_that_the_rest_was_another_runs(forger):
    """Let the ledger begin later, so that what came before is not looked at."""

    def change(fields):
        fields["previous"] = ""

    forger.forge(SECOND, change)


@pytest.mark.parametrize(
    ("tamper", "where", "said"),
    [
        (edit_a_loss, (SECOND, 2), "is not the record that was chained here"),
        (edit_a_loss_under_a_new_seal, (SECOND, 2), "is not the record that was chained here"),
        (edit_a_loss_under_new_links, (SECOND, 0), "it was replaced"),
        (edit_a_loss_and_all_links_up_to_a_rotated_checkpoint, (SECOND, 0), "it was replaced"),
        (drop_a_record, (SECOND, 1), "is not the record that was chained here"),
        (drop_a_record_everywhere, (THIRD, 3), "come after step 4"),
        (swap_records, (LAST, 1), "is not the record that was chained here"),
        (drop_a_segment, (SECOND, 0), "is missing"),
        (duplicate_a_segment, (SECOND, 0), "holds the segment of checkpoint-2-g1"),
        (
            duplicate_a_segment_under_a_new_name,
            ("ledger/g000001-000000000003.json", 0),
            "holds the segment of checkpoint-2-g1",
        ),
        (splice_another_runs_segment, (FIRST, 0), "belongs to run"),
        (
            splice_another_runs_segment_with_our_names,
            (SECOND, 1),
            "the segment's own description",
        ),
        (change_a_range, (THIRD, 2), "is not the record that was chained here"),
        (change_a_range_everywhere, (SECOND, 1), "were trained never"),
        (train_a_range_twice_everywhere, (SECOND, 1), "were trained twice"),
        (cut_the_tail, ("checkpoint-10-g4/manifest.json", 0), "states that the ledger ends in"),
        (cut_the_last_segment, (LAST, 0), "is missing"),
        (alter_the_generation, (SECOND, 0), "holds the segment of checkpoint-4-g2"),
        (
            alter_the_generation_and_the_name,
            ("ledger/g000002-000000000006.json", 1),
            "the segment's own description",
        ),
        (alter_the_head_in_the_segment, (SECOND, 0), "its head is not the link"),
        (
            alter_the_head_in_the_newest_manifest,
            ("checkpoint-10-g4/manifest.json", 0),
            "states that the ledger ends in",
        ),
        (
            alter_the_head_in_an_older_manifest,
            ("checkpoint-4-g1/manifest.json", 0),
            "states that the ledger ends in",
        ),
        (go_on_from_another_checkpoint, (THIRD, 0), "generation 3 started from checkpoint-4-g1"),
        (change_the_order_everywhere, (FIRST, 1), "is not that of seed 7"),
        (say_that_the_rest_was_another_runs, (SECOND, 0), "starts"),
    ],
)
def test_each_tampering_is_found_and_named(tamper, where, said, repo, call):
    tamper(Forger(repo))
    outcome = call("audit", repo, "--json")
    assert outcome.status == 1, outcome.stdout
    answer = json.loads(outcome.stdout)
    assert not answer["proven"]
    flaw = answer["flaws"][0]
    assert (flaw["key"], flaw["record"]) == where, answer["flaws"]
    assert said in flaw["problem"]
    shown = call("audit", repo)
    assert shown.status == 1
    assert where[0] in shown.stdout
    assert "NOT VERIFIED" in shown.stdout
