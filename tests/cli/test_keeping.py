"""tag, untag and prune, as text, as JSON and in front of a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import TickingClock, flip_bit, truncate_file, write_usual_run


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def names(repo):
    return [one.folder for one in committed(LocalStore(repo))]


WAYS = ("min", "max")
POLICY = ("--keep-last", "1", "--keep-best", "loss:1", "--keep-every", "10")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prune-dry-run", ("prune", *POLICY, "--dry-run")),
        ("prune-dry-run-json", ("prune", *POLICY, "--dry-run", "--json")),
        ("prune-yes", ("prune", "--keep-last", "2", "--yes")),
        ("prune-at-once", ("prune", "--keep-last", "2", "--yes", "--grace", "0")),
        ("prune-nothing-to-undo", ("prune", "--undo")),
        ("prune-empty-policy", ("prune", "--yes")),
        ("prune-not-confirmed", ("prune", "--keep-last", "2")),
        ("tag", ("tag", "best:loss", "release")),
        ("tag-json", ("tag", "latest", "release", "--json")),
        ("untag-unknown", ("untag", "release")),
    ],
)
def test_it_reads_as_in_the_transcript(name, arguments, repo, call, matches):
    matches(name, call("ckpt", *arguments, "--repo", repo), repo)


def test_a_tag_is_shown_is_a_reference_and_protects(repo, call, matches):
    assert call("ckpt", "tag", "step:10", "release", repo).status == 0
    matches("ls-tagged", call("ckpt", "ls", repo), repo)
    assert "checkpoint-10-g1" in call("ckpt", "inspect", "release", "-r", repo).stdout
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--yes").status == 0
    assert names(repo) == ["checkpoint-35-g2", "checkpoint-10-g1"]
    undone = call("ckpt", "untag", "release", repo)
    assert "resilient ckpt tag checkpoint-10-g1 release" in undone.stdout
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--yes", "-q").stdout == (
        "checkpoint-10-g1\n"
    )
    assert names(repo) == ["checkpoint-35-g2"]


def test_a_dry_run_deletes_nothing_and_its_plan_is_what_is_then_done(repo, call):
    before = {one: one.stat().st_mtime_ns for one in repo.rglob("*")}
    planned = json.loads(call("ckpt", "prune", repo, *POLICY, "--dry-run", "--json").stdout)
    assert {one: one.stat().st_mtime_ns for one in repo.rglob("*")} == before
    done = json.loads(call("ckpt", "prune", repo, *POLICY, "--yes", "--json").stdout)
    (prune,) = {
        one["prune"] for one in json.loads(call("ckpt", "ls", repo, "--json").stdout)["trash"]
    }
    undo = f"resilient ckpt prune file://{repo} --undo {prune}"
    assert (planned["prune"], planned["undo"]) == (None, None), "nothing to take back"
    assert done == {**planned, "done": True, "prune": prune, "undo": undo}
    assert set(names(repo)) == {one["id"] for one in done["kept"]}
    assert done["later_bytes"] == sum(one["size_bytes"] for one in done["deleted"]) > 0
    assert (done["freed_bytes"], done["grace_seconds"]) == (0, 86400)


def test_what_was_pruned_is_listed_in_the_trash_and_comes_back(repo, call, matches):
    before = {path: path.read_bytes() for path in repo.rglob("*") if path.is_file()}
    listed = call("ckpt", "ls", repo).stdout
    assert call("ckpt", "prune", repo, "--keep-last", "2", "--yes").status == 0
    matches("ls-trash", call("ckpt", "ls", repo), repo)
    trash = json.loads(call("ckpt", "ls", repo, "--json").stdout)["trash"]
    assert [one["id"] for one in trash] == [f"checkpoint-{step}-g1" for step in (30, 20, 10)]
    assert len({one["since"] for one in trash}) == 1
    assert call("ckpt", "inspect", "step:20", repo).status == 66
    matches("prune-undo-dry-run", call("ckpt", "prune", repo, "--undo", "--dry-run"), repo)
    assert len(names(repo)) == 2
    matches("prune-undo-json", call("ckpt", "prune", repo, "--undo", "--json"), repo)
    assert {path: path.read_bytes() for path in repo.rglob("*") if path.is_file()} == before
    assert call("ckpt", "ls", repo).stdout == listed


def test_an_undo_that_is_given_twice_leaves_an_older_prune_alone(repo, call, matches, monkeypatch):
    call("ckpt", "prune", repo, "--keep-last", "4", "--yes")
    clock = "resilient_cli.commands.prune.SystemClock"
    monkeypatch.setattr(clock, lambda: TickingClock(120))
    done = json.loads(call("ckpt", "prune", repo, "--keep-last", "2", "--yes", "--json").stdout)
    newer = done["prune"]
    matches("ls-two-prunes", call("ckpt", "ls", repo), repo)
    assert call("ckpt", "prune", repo, "--undo", "--dry-run", "--json").stdout.count(newer) == 1
    matches("prune-undo-named", call("ckpt", "prune", repo, "--undo", newer), repo)
    there = names(repo)
    assert len(there) == 4
    for words in ((repo, newer), (newer, repo), (newer, "-r", repo), ("-r", repo, newer)):
        again = call("ckpt", "prune", "--undo", *words)
        assert names(repo) == there
    matches("prune-undo-again", again, repo)
    matches("prune-undo-newest", call("ckpt", "prune", "--undo", repo), repo)
    assert len(names(repo)) == 5


def test_a_prune_whose_time_is_over_is_not_told_as_taken_back(repo, call):
    over = "20251231T000000000-20260101T000000000"
    outcome = call("ckpt", "prune", repo, "--undo", over)
    assert outcome.status == 66
    assert "its time is over" in outcome.stderr


def test_what_cannot_come_back_is_told_and_the_others_do(repo, call, matches):
    call("ckpt", "prune", repo, "--keep-last", "2", "--yes")
    (repo / "checkpoint-20-g1" / "state.json").unlink()
    outcome = call("ckpt", "prune", "--undo", repo)
    assert outcome.status == 1
    matches("prune-undo", outcome, repo)
    assert len(names(repo)) == 4


def test_the_trash_is_emptied_on_demand_and_by_the_next_prune_after_its_time(repo, call, matches):
    call("ckpt", "prune", repo, "--keep-last", "2", "--yes")
    for step in (10, 20):
        (mark,) = (repo / f"checkpoint-{step}-g1").glob("manifest.trashed-*")
        mark.rename(mark.with_name("manifest.trashed-20251231T000000000-20260101T000000000.json"))
    plan = json.loads(call("ckpt", "prune", repo, "--keep-last", "2", "--dry-run", "--json").stdout)
    assert plan["emptied"] == ["checkpoint-20-g1", "checkpoint-10-g1"]
    assert plan["freed_bytes"] > 0
    assert call("ckpt", "prune", repo, "--keep-last", "2", "--yes").status == 0
    assert not [*repo.glob("checkpoint-10-g1/*"), *repo.glob("checkpoint-20-g1/*")]
    assert call("ckpt", "prune", repo, "--empty-trash").status == 2, "nobody is there"
    matches("prune-empty-trash", call("ckpt", "prune", repo, "--empty-trash", "--yes"), repo)
    assert {one.name for one in repo.glob("checkpoint-*")} == set(names(repo))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "no policy was given"),
        (("--keep-last", "0", "--yes"), 2, "greater than or equal to 1"),
        (
            ("--keep-best", "loss:x", "--yes"),
            2,
            "hint: resilient ckpt prune --keep-best loss:3:min",
        ),
        (("--keep-tag", "nosuchtag", "--yes"), 2, "no tag `nosuchtag`"),
        (("--keep-last", "1"), 2, "no terminal is there to confirm it"),
        (("--keep-last", "1", "--json"), 2, "no terminal is there to confirm it"),
        (("--keep-last", "1", "--yes", "--grace", "soon"), 2, "--grace 'soon' is not a duration"),
        (("--keep-last", "1", "--undo"), 2, "excludes policies"),
        (("--empty-trash", "--undo"), 2, "excludes policies"),
        (("--undo", "20260101"), 2, "is not the id of a prune"),
        (("20260102T000000000-20260103T000000000", "--keep-last", "1"), 2, "only `--undo` takes"),
    ],
)
def test_what_prune_refuses_deletes_nothing(arguments, status, said, repo, call):
    outcome = call("ckpt", "prune", repo, *arguments)
    assert outcome.status == status
    assert said in outcome.stderr
    assert len(names(repo)) == 5


@pytest.mark.parametrize(("level", "damage"), [("quick", truncate_file), ("full", flip_bit)])
def test_prune_says_no_while_the_newest_is_damaged(level, damage, repo, call):
    file = repo / "checkpoint-35-g2" / "model.r00000.safetensors"
    damage(file, 300) if damage is truncate_file else damage(file)
    outcome = call("ckpt", "prune", repo, "--keep-last", "1", "--yes", "--level", level)
    assert outcome.status == 1
    assert "Nothing was deleted: the newest, checkpoint-35-g2, is not verified" in outcome.stdout
    assert len(names(repo)) == 5


def test_prune_without_a_repository_is_not_found(tmp_path, call):
    assert call("ckpt", "prune", tmp_path / "no", "--keep-last", "1", "--yes").status == 66
    assert call("ckpt", "tag", "latest", "a", tmp_path / "no").status == 66


def test_a_damaged_tag_is_named_by_ls_and_holds_prune(repo, call):
    call("ckpt", "tag", "step:10", "release", repo)
    flip_bit(repo / "tags" / "release.json", offset=20)
    listed = call("ckpt", "ls", repo)
    assert "tag release points to no checkpoint: resilient ckpt untag release" in listed.stdout
    held = call("ckpt", "prune", repo, "--keep-last", "1", "--yes")
    assert held.status == 1
    assert "a tag cannot be read" in held.stdout
    assert call("ckpt", "untag", "release", repo).status == 0
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--yes").status == 0


@pytest.mark.parametrize(("answer", "status", "left"), [("n", 1, 5), ("y", 0, 1)])
def test_in_front_of_a_terminal_the_plan_is_shown_and_asked_about(answer, status, left, repo):
    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "resilient_cli",
        "ckpt",
        "prune",
        str(repo),
        "--keep-last",
        "1",
    ]
    process = subprocess.Popen(
        command, stdin=follower, stderr=follower, stdout=subprocess.PIPE, text=True
    )
    os.close(follower)
    try:
        os.write(leader, f"{answer}\n".encode())
        out, _ = process.communicate(timeout=60)
        asked = os.read(leader, 10_000).decode()
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert process.returncode == status
    assert "Put 4 in the trash?" in asked
    assert "checkpoint-10-g1  -" in out
    assert len(names(repo)) == left


def test_weeks_months_years_and_a_length_are_policies(repo, call):
    for option in ("--keep-weekly", "--keep-monthly", "--keep-yearly"):
        plan = call("ckpt", "prune", repo, option, "1", "--dry-run", "--json")
        kept = json.loads(plan.stdout)["kept"]
        assert "checkpoint-35-g2" in [one["id"] for one in kept]
        assert any("the newest of" in why for one in kept for why in one["reasons"]), option
    plan = call("ckpt", "prune", repo, "--keep-within", "1m", "--dry-run", "--json")
    kept = [one["id"] for one in json.loads(plan.stdout)["kept"]]
    assert kept == ["checkpoint-35-g2", "checkpoint-25-g2"]
    wrong = call("ckpt", "prune", repo, "--keep-within", "soon", "--yes")
    assert (wrong.status, "`keep_within`='soon'" in wrong.stderr) == (78, True)


def test_the_best_is_named_with_and_without_a_count(repo, call):
    least, most = (call("ckpt", "inspect", f"best:loss:1:{one}", repo, "-q") for one in WAYS)
    assert least.stdout != most.stdout
    for way, wanted in zip(WAYS, (least, most), strict=True):
        assert call("ckpt", "inspect", f"best:loss:{way}", repo, "-q").stdout == wanted.stdout
    outcome = call("ckpt", "inspect", "best:loss:largest", repo)
    assert outcome.status == 2
    assert "'loss:largest' is not METRIC" in outcome.stderr
    assert "hint: resilient ckpt inspect best:loss:min" in outcome.stderr


@pytest.mark.parametrize("where", ["before", "behind"])
def test_yes_goes_anywhere_and_to_any_command(call, repo, where):
    words = ["ckpt", "prune", repo, "--keep-last", "1"]
    words = ["--yes", *words] if where == "before" else [*words, "--yes"]
    assert call(*words).status == 0
    assert len(call("ckpt", "ls", repo, "-q").stdout.split()) == 1
    assert call("ckpt", "ls", repo, "--yes").status == 0
