"""What the commands say of bytes that a checkpoint has in folders of older ones."""

from __future__ import annotations

import json

import pytest

from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import flip_bit
from tests.helpers.manifests import begin, frozen_parts_of, save

MODEL = "model.r00000.safetensors"


@pytest.fixture
def repo(tmp_path):
    """Give three steps; what is frozen lies in the first."""
    store = LocalStore(tmp_path / "run")
    begin(store)
    for step in (1, 2, 3):
        bases = [CheckpointId(1, step - 1)] if step > 1 else []
        save(store, CheckpointId(1, step), bases=bases, parts=frozen_parts_of(step))
    return tmp_path / "run"


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_listing_tells_own_bytes_from_those_of_others_and_counts_none_twice(repo, call):
    listed = json.loads(call("ckpt", "ls", repo, "--json").stdout)
    third, second, first = listed["checkpoints"]
    assert first["own_bytes"] == first["size_bytes"] > 60_000
    assert second["own_bytes"] < 2000 < second["referred_bytes"] <= first["own_bytes"]
    manifests = sum(path.stat().st_size for path in repo.glob("*/manifest.json"))
    folders = sum(bytes_in(path) for path in repo.glob("checkpoint-*"))
    assert listed["size_bytes"] == folders - manifests
    assert third["size_bytes"] == third["own_bytes"] + third["referred_bytes"]


def test_inspect_says_where_files_lie(repo, call):
    told = json.loads(call("ckpt", "inspect", "2", repo, "--json").stdout)
    origins = {one["name"]: one["origin"] for one in told["files"]}
    assert origins[f"checkpoint-1-g1/{MODEL}"] == "checkpoint-1-g1"
    assert origins[MODEL] is None
    assert "stored in older checkpoints" in call("ckpt", "inspect", "2", repo).stdout
    assert "stored in older checkpoints" not in call("ckpt", "inspect", "1", repo).stdout


def test_damage_of_a_shared_file_is_told_for_each_that_needs_it(repo, call):
    flip_bit(repo / "checkpoint-1-g1" / MODEL, offset=20_000)
    outcome = call("ckpt", "verify", "--all", repo, "--json")
    assert outcome.status == 3
    told = json.loads(outcome.stdout)["checkpoints"]
    files = {one["id"]: one["findings"][0]["file"] for one in told}
    shared = f"checkpoint-1-g1/{MODEL}"
    assert files == {
        "checkpoint-1-g1": MODEL,
        "checkpoint-2-g1": shared,
        "checkpoint-3-g1": shared,
    }


def test_prune_says_what_stays_for_others_and_frees_what_it_says(repo, call):
    before = bytes_in(repo)
    planned = call("ckpt", "prune", repo, "--keep-last", "1", "--dry-run")
    assert "but other checkpoints need" in planned.stdout
    call("ckpt", "prune", repo, "--keep-last", "1", "--yes")
    assert bytes_in(repo) == before, "all of it is in the trash"
    call("ckpt", "prune", repo, "--undo")
    words = ("--keep-last", "1", "--grace", "0", "--yes", "--json")
    done = json.loads(call("ckpt", "prune", repo, *words).stdout)
    assert done["freed_bytes"] == before - bytes_in(repo) > 0
    first = next(one for one in done["deleted"] if one["id"] == "checkpoint-1-g1")
    assert first["still_needed_bytes"] == (repo / "checkpoint-1-g1" / MODEL).stat().st_size
    assert call("ckpt", "verify", "--all", repo, "--level", "deep").status == 0


def test_prune_says_why_files_stay_while_a_manifest_cannot_be_read(repo, call):
    flip_bit(repo / "checkpoint-2-g1" / "manifest.json", offset=100)
    told = call("ckpt", "prune", repo, "--keep-last", "2", "--grace", "0", "--yes").stdout
    assert "the dedup references of checkpoint-2-g1 are unknown" in told
    assert (repo / "checkpoint-1-g1" / MODEL).exists()
    assert not (repo / "checkpoint-1-g1" / "manifest.json").exists()
