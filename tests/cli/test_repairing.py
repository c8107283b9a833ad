"""ckpt repair: what it mends, what it says of what it cannot, and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.cli_repositories import flip_bit, truncate_file, write_usual_run

NEWEST = "checkpoint-35-g2"
MODEL = "model.r00000.safetensors"
OPTIMIZER = "optimizer.r00000.safetensors"


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder, parity=1)
    return folder


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_mends_and_reads_as_in_the_transcript(repo, call, matches):
    whole = contents(repo)
    (repo / NEWEST / MODEL).unlink()
    matches("repair-verify", call("ckpt", "verify", "latest", repo), repo)
    matches("repair-dry-run", call("ckpt", "repair", "latest", repo), repo)
    both = call("ckpt", "repair", "latest", repo, "--apply", "--dry-run")
    matches("repair-dry-run", both, repo)
    assert not (repo / NEWEST / MODEL).exists()
    matches("repair", call("ckpt", "repair", NEWEST, repo, "--apply"), repo)
    assert contents(repo) == whole
    matches("repair-nothing", call("ckpt", "repair", "latest", repo), repo)
    assert call("ckpt", "verify", "--all", repo).status == 0


def test_what_was_damaged_is_kept_beside_it_until_the_checkpoint_is_pruned(repo, call, matches):
    whole = contents(repo)
    flip_bit(repo / NEWEST / MODEL)
    flip_bit(repo / NEWEST / "manifest.json", offset=40)
    damaged = contents(repo)
    matches("repair-kept", call("ckpt", "repair", "latest", repo, "--apply"), repo)
    kept = {path: data for path, data in contents(repo).items() if path not in whole}
    assert {path.name.split("-", 2)[2] for path in kept} == {MODEL, "manifest.json"}
    assert all(path.parent.name == NEWEST for path in kept)
    assert set(kept.values()) == {damaged[path] for path in whole if damaged[path] != whole[path]}
    assert {**whole, **kept} == contents(repo)
    assert call("ckpt", "verify", "--all", repo).status == 0


def test_inspect_says_what_may_be_lost(repo, call):
    outcome = call("ckpt", "inspect", "latest", repo)
    shares = "model.r00000.safetensors, optimizer.r00000.safetensors, state.json, "
    assert f"any 1 file of {shares}parity-0-0.r00000.parity may be lost" in outcome.stdout


def test_as_json_it_says_the_same(repo, call, matches):
    flip_bit(repo / NEWEST / MODEL)
    matches("repair-json", call("ckpt", "repair", "--json", "--apply", "--repo", repo), repo)
    assert call("ckpt", "repair", "-q", "--repo", repo).stdout == ""


def test_too_much_damage_is_told_tensor_by_tensor_and_nothing_is_changed(repo, call, matches):
    flip_bit(repo / NEWEST / MODEL)
    truncate_file(repo / NEWEST / OPTIMIZER, 300)
    before = contents(repo)
    outcome = call("ckpt", "repair", NEWEST, repo)
    assert outcome.status == 1
    matches("repair-lost", outcome, repo)
    assert contents(repo) == before


def test_without_parity_it_says_what_is_lost_and_what_can_be_salvaged(plain, call, matches):
    flip_bit(plain / NEWEST / MODEL)
    before = contents(plain)
    outcome = call("ckpt", "repair", "latest", plain)
    assert outcome.status == 1
    matches("repair-salvage", outcome, plain)
    assert contents(plain) == before


def test_with_nothing_left_to_resume_from_it_ends_with_3(plain, call, matches):
    for folder in plain.glob("checkpoint-*"):
        (folder / "state.json").unlink()
    outcome = call("ckpt", "repair", "latest", plain, "--json")
    assert outcome.status == 3
    answer = json.loads(outcome.stdout)
    assert answer["parts"] == {"model": False, "optimizer": False}
    assert len(answer["whole_tensors"]) == 6
    assert json.loads(outcome.stderr)["code"] == "RES-CKPT-NONE-INTACT"


def test_another_repository_is_as_good_as_parity(plain, tmp_path, call):
    copy = tmp_path / "copy"
    shutil.copytree(plain, copy)
    whole = contents(plain)
    for name in (MODEL, OPTIMIZER, "state.json"):
        (plain / NEWEST / name).unlink()
    flip_bit(copy / NEWEST / MODEL, offset=-1)
    outcome = call("ckpt", "repair", NEWEST, plain, "--from", copy, "--apply")
    assert outcome.status == 1, "its model is damaged as well"
    assert (plain / NEWEST / OPTIMIZER).exists()
    assert not (plain / NEWEST / MODEL).exists()
    flip_bit(copy / NEWEST / MODEL, offset=-1)
    flip_bit(plain / NEWEST / "manifest.json", offset=40)
    assert call("ckpt", "repair", NEWEST, plain, "--from", copy, "--apply").status == 0
    assert {path: data for path, data in contents(plain).items() if path in whole} == whole


def test_lost_parity_is_damage_although_training_can_resume(repo, call, matches):
    (repo / NEWEST / "parity-0-0.r00000.parity").unlink()
    outcome = call("ckpt", "verify", "latest", repo)
    assert outcome.status == 1
    assert f"can resume from {NEWEST}" in outcome.stdout
    matches("repair-parity-lost", outcome, repo)
    assert call("ckpt", "repair", "latest", repo, "--apply").status == 0
    assert call("ckpt", "verify", "latest", repo).status == 0


def test_a_deleted_manifest_comes_back_only_on_demand(repo, call, matches):
    whole = contents(repo)
    (repo / NEWEST / "manifest.json").unlink()
    outcome = call("ckpt", "repair", NEWEST, repo)
    assert outcome.status == 66
    matches("repair-gone", outcome, repo)
    assert call("ckpt", "repair", "latest", repo).stdout.startswith("checkpoint-25-g2 is intact")
    assert call("ckpt", "repair", "latest", repo, "--undelete").status == 2
    assert call("ckpt", "repair", NEWEST, repo, "--undelete", "--apply").status == 0
    assert contents(repo) == whole


def test_both_manifests_damaged_is_a_loss_that_is_told(repo, call, matches):
    truncate_file(repo / NEWEST / "manifest.json", 100)
    truncate_file(repo / NEWEST / "manifest.copy.json", 100)
    outcome = call("ckpt", "repair", NEWEST, repo)
    assert outcome.status == 1
    matches("repair-manifest-lost", outcome, repo)


def test_where_nothing_is_there_is_nothing_to_repair(tmp_path, call):
    assert call("ckpt", "repair", "latest", tmp_path / "nothing").status == 66


def test_weights_that_lost_their_state_get_a_new_one(tmp_path, call):
    theirs = Path(__file__).parents[1] / "golden" / "transformers" / "reg_sgd" / "run"
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(theirs / "checkpoint-7", folder)
    (folder / "trainer_state.json").unlink()
    outcome = call("ckpt", "repair", folder, "--rebuild", tmp_path / "new")
    assert outcome.status == 1, outcome.stderr
    assert "Step 7 is in" in outcome.stdout
    assert "yes with loss of" in outcome.stdout
    assert "the first epoch starts again" in outcome.stdout
    refused = call("ckpt", "repair", folder, "--rebuild", tmp_path / "none", "--dry-run")
    assert refused.status == 2, refused.stderr
    assert not (tmp_path / "none").exists()
    (folder / "optimizer.pt").unlink()
    outcome = call("ckpt", "repair", folder, "--rebuild", tmp_path / "newer", "--json")
    assert outcome.status == 1
    said = json.loads(outcome.stdout)
    judged = json.loads(call("ckpt", "verify", tmp_path / "newer", "--json").stdout)
    assert (said["step"], said["resumable"]) == (7, judged["resumable"])
    assert said["resumable"]["answer"] == "partly"
    assert "optimizer" in said["lost"]


@pytest.mark.filterwarnings("ignore")  # of the peers
def test_a_lost_random_state_does_not_lose_the_place_that_the_state_holds(tmp_path, call):
    theirs = Path(__file__).parents[1] / "golden" / "transformers" / "gpt2_all" / "run"
    assert call("ckpt", "import", theirs / "checkpoint-8", tmp_path / "ours").status == 0
    (file,) = (tmp_path / "ours").glob("checkpoint-8-g1/rng_state_0.*")
    file.unlink()
    told = call("ckpt", "repair", "latest", tmp_path / "ours")
    assert told.status == 3
    assert "cannot be computed from seed and step" in told.stdout
    new = tmp_path / "new"
    outcome = call("ckpt", "repair", "latest", tmp_path / "ours", "--rebuild", new, "--json")
    said = json.loads(outcome.stdout)
    assert (set(said["lost"]), outcome.status) == ({"random state"}, 1)
    assert said["resumable"]["answer"] == "partly"
    assert "place in the data" in said["known"]
    state, whole = (
        json.loads((one / "trainer_state.json").read_text(encoding="utf-8"))
        for one in (new, theirs / "checkpoint-8")
    )
    for name in ("global_step", "epoch", "train_batch_size", "log_history"):
        assert state[name] == whole[name], name


def test_inspect_says_whether_training_can_go_on_and_what_to_run(plain, call):
    outcome = call("ckpt", "inspect", "latest", plain)
    assert outcome.status == 0
    assert "resumable  yes" in outcome.stdout
    (plain / NEWEST / OPTIMIZER).unlink()
    outcome = call("ckpt", "inspect", NEWEST, plain)
    assert outcome.status == 1
    assert f"no, because {OPTIMIZER}: missing" in outcome.stdout
    assert f"ckpt repair {NEWEST}" in outcome.stdout.splitlines()[-1]
