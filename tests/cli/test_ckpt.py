"""The checkpoint commands, in text and in JSON, on whole and on damaged repositories."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.helpers.cli_repositories import flip_bit, truncate_file, write_run, write_usual_run


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def model_of(repo, checkpoint):
    return repo / checkpoint / "model.r00000.safetensors"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ls", ("ls",)),
        ("ls-plain", ("ls", "--format", "plain")),
        ("ls-json", ("ls", "--json")),
        ("ls-quiet", ("ls", "-q")),
        ("inspect", ("inspect", "latest")),
        ("inspect-tensors", ("inspect", "step:20", "--tensors")),
        ("inspect-json", ("inspect", "latest~1", "--json", "--tensors")),
        ("inspect-unknown", ("inspect", "step:99")),
        ("verify-all", ("verify", "--all", "--level", "full")),
        ("verify-json", ("verify", "latest", "--json")),
    ],
)
def test_an_intact_repository_reads_as_in_the_transcript(name, arguments, repo, call, matches):
    matches(name, call("ckpt", *arguments, "--repo", repo), repo)


@pytest.mark.parametrize("end", ["", "/"])
def test_the_path_of_a_checkpoint_names_it_and_its_repository(end, repo, call, monkeypatch):
    by_reference = call("ckpt", "inspect", "step:20", repo, "--json")
    path = next(repo.glob("checkpoint-20-g*"))
    assert call("ckpt", "inspect", f"{path}{end}", "--json").stdout == by_reference.stdout
    assert call("ckpt", "verify", f"{path}{end}").status == 0
    monkeypatch.chdir(repo)
    assert (
        json.loads(call("ckpt", "inspect", path.name, "--json").stdout)["data"]
        == (json.loads(by_reference.stdout)["data"])
    )


@pytest.mark.parametrize(
    ("name", "damage", "tensor"),
    [
        ("flipped", flip_bit, "model/wte.weight"),
        ("flipped-header", lambda path: flip_bit(path, offset=20), " - "),
        ("short", lambda path: truncate_file(path, 300), "model/wte.weight"),
        ("empty", lambda path: truncate_file(path, 0), "model/head.bias"),
        ("missing", lambda path: path.unlink(), "model/head.bias"),
    ],
)
def test_damage_to_a_file_is_named_with_file_and_tensor(name, damage, tensor, repo, call, matches):
    damage(model_of(repo, "checkpoint-35-g2"))
    outcome = call("ckpt", "verify", "latest", repo)
    assert outcome.status == 1
    assert "model.r00000.safetensors" in outcome.stdout
    assert tensor in outcome.stdout
    assert "can resume from checkpoint-25-g2" in outcome.stdout
    matches(f"damage-{name}", outcome, repo)


def test_a_damaged_manifest_is_damage_and_not_a_crash(repo, call, matches):
    flip_bit(repo / "checkpoint-35-g2" / "manifest.json", offset=100)
    matches("damage-manifest", call("ckpt", "verify", "--all", repo), repo)
    listed = json.loads(call("ckpt", "ls", repo, "--json").stdout)
    assert listed["checkpoints"][0]["state"] == "damaged"
    assert listed["resume"] == "checkpoint-25-g2"


def test_a_listing_says_which_checkpoint_is_damaged_and_where_training_resumes(repo, call, matches):
    truncate_file(model_of(repo, "checkpoint-35-g2"), 300)
    (repo / "checkpoint-10-g1" / "manifest.json").unlink()
    matches("ls-damaged", call("ckpt", "ls", repo), repo)


def test_a_deleted_newest_manifest_is_reported_as_passed_over(repo, call, matches):
    (repo / "checkpoint-35-g2" / "manifest.json").unlink()
    matches("ls-passed-over", call("ckpt", "ls", repo), repo)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_deleted_newest_manifest_is_damage(repo, call, level):
    (repo / "checkpoint-35-g2" / "manifest.json").unlink()
    for what in ("--all", "latest"):
        outcome = call("ckpt", "verify", what, repo, "--level", level, "--json")
        assert outcome.status == 1
        (found,) = json.loads(outcome.stdout)["records"]
        assert found["file"] == "checkpoint-35-g2/manifest.json"
        assert "all files exist" in found["problem"]
        assert found["tensor"]
        assert "--undelete" in found["fix"]


def test_what_a_killed_save_left_is_told_and_is_no_damage(repo, call):
    folder = repo / "checkpoint-99-g2"
    folder.mkdir()
    (folder / "model.r00000.safetensors").write_bytes(b"half")
    outcome = call("ckpt", "verify", "--all", repo, "--json")
    assert outcome.status == 0
    (found,) = json.loads(outcome.stdout)["records"]
    assert (found["file"], found["severity"]) == ("checkpoint-99-g2/manifest.json", "warning")


def test_exit_code_3_when_nothing_intact_remains(repo, call, matches):
    for one in repo.glob("checkpoint-*/model.r00000.safetensors"):
        flip_bit(one)
    outcome = call("ckpt", "verify", "--all", repo)
    assert outcome.status == 3
    matches("damage-everything", outcome, repo)
    assert call("ckpt", "verify", repo).status == 3


def test_an_abandoned_intact_checkpoint_does_not_count_as_one_to_resume_from(repo, call):
    for one in repo.glob("checkpoint-*/model.r00000.safetensors"):
        if one.parent.name != "checkpoint-30-g1":
            flip_bit(one)
    assert call("ckpt", "verify", "--all", repo).status == 3


def test_exit_code_3_when_every_manifest_is_gone(repo, call):
    for one in repo.glob("checkpoint-*/manifest.json"):
        one.unlink()
    assert call("ckpt", "verify", "--all", repo).status == 3
    assert call("ckpt", "ls", repo).status == 0


def test_quick_does_not_see_a_flipped_bit_and_full_does(repo, call):
    flip_bit(model_of(repo, "checkpoint-35-g2"))
    assert call("ckpt", "verify", repo, "--level", "quick").status == 0
    assert call("ckpt", "verify", repo, "--level", "full").status == 1


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_exit_code_66_without_a_repository(command, tmp_path, call):
    outcome = call("ckpt", command, tmp_path / "nothing")
    assert (outcome.status, outcome.stdout) == (66, "")
    assert "[RES-REPO-404]" in outcome.stderr
    assert not (tmp_path / "nothing").exists(), "looking must not create"


def test_a_run_that_saved_nothing_yet_is_an_empty_list_and_nothing_to_verify(tmp_path, call):
    write_run(tmp_path / "run", [(None, [])])
    assert call("ckpt", "ls", tmp_path / "run").status == 0
    assert call("ckpt", "verify", tmp_path / "run").status == 66


def test_a_checkpoint_that_rotation_takes_away_meanwhile_is_not_called_damaged(repo, monkeypatch):
    from resilient.checkpoint.catalog import committed
    from resilient.storage.local import LocalStore
    from resilient_cli.survey import VerifyLevel, survey

    class Rotating(LocalStore):
        def stat(self, key):
            shutil.rmtree(repo / "checkpoint-10-g1", ignore_errors=True)
            return super().stat(key)

    store = Rotating(repo)
    steps = [
        one.checkpoint.step for one in survey(store, committed(store)[::-1], VerifyLevel.QUICK)
    ]
    assert steps == [20, 30, 25, 35]


def test_a_listing_asks_the_store_for_no_file_by_itself(repo, call, monkeypatch):
    from resilient.storage.local import LocalStore

    asked = []
    stat = LocalStore.stat
    monkeypatch.setattr(LocalStore, "stat", lambda self, key: asked.append(key) or stat(self, key))
    assert call("ckpt", "ls", repo).status == 0
    assert asked == []


@pytest.mark.parametrize(
    "place",
    [lambda repo: (repo,), lambda repo: ("-r", repo), lambda repo: ("--repo", repo)],
)
def test_the_repository_may_be_an_argument_or_an_option(place, repo, call):
    assert call("ckpt", "ls", *place(repo)).status == 0
    assert call("ckpt", "verify", "--all", *place(repo)).status == 0
    assert call("ckpt", "inspect", "latest", *place(repo)).status == 0


def test_the_repository_may_come_from_the_environment(repo, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_REPO", str(repo))
    assert call("ckpt", "ls").status == 0
    assert "checkpoint-20-g1" in call("ckpt", "inspect", "step:20").stdout


def test_all_takes_no_reference(repo, call):
    assert call("ckpt", "verify", "latest", repo, "--all").status == 2


def test_reading_changes_nothing(repo, call):
    before = {one: one.stat().st_mtime_ns for one in repo.rglob("*")}
    for arguments in (("ls",), ("inspect", "latest"), ("verify", "--all", "--level", "deep")):
        call("ckpt", *arguments, "--repo", repo)
    assert {one: one.stat().st_mtime_ns for one in repo.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--last", "2"), ["checkpoint-35-g2", "checkpoint-25-g2"]),
        (("--state", "abandoned"), ["checkpoint-30-g1"]),
        (("--state", "abandoned", "--state", "damaged"), ["checkpoint-30-g1", "checkpoint-20-g1"]),
        (("--state", "ok", "--last", "1"), ["checkpoint-35-g2"]),
        (("--tag", "release"), ["checkpoint-10-g1"]),
        (("--tag", "release", "--state", "damaged"), []),
    ],
)
def test_what_is_listed_can_be_chosen_and_what_resumes_is_of_all(options, shown, repo, call):
    flip = repo / "checkpoint-20-g1" / "model.r00000.safetensors"
    flip.unlink()
    call("ckpt", "tag", "step:10", "release", repo)
    everything = json.loads(call("ckpt", "ls", repo, "--json").stdout)
    found = json.loads(call("ckpt", "ls", repo, *options, "--json").stdout)
    assert [one["id"] for one in found["checkpoints"]] == shown
    assert call("ckpt", "ls", repo, *options, "-q").stdout.split() == shown
    assert found["hidden"] == 5 - len(shown)
    assert found["resume"] == everything["resume"]
    assert found["size_bytes"] == everything["size_bytes"]
    said = call("ckpt", "ls", repo, *options).stdout
    assert f"{len(shown)} shown, {5 - len(shown)} not chosen." in said
