"""ckpt verify and prune of one host's part of a near tier say what else it may be than damaged."""

from __future__ import annotations

import json

import pytest

from tests.helpers.cli_repositories import flip_bit, write_two_ranks

MODEL, OPTIMIZER = "model.r00000.safetensors", "optimizer.r00001.safetensors"


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "near"
    write_two_ranks(folder)
    return folder


def test_all_files_of_a_rank_that_are_missing_may_lie_on_another_host(repo, call):
    assert call("ckpt", "verify", repo).status == 0
    (repo / "checkpoint-10-g1" / OPTIMIZER).unlink()
    outcome = call("ckpt", "verify", repo)
    assert outcome.status == 3
    assert (
        "every file of rank 1 in checkpoint-10-g1 is missing, and all other files are intact"
        in outcome.stdout
    )
    assert "near tier" in outcome.stdout
    (said,) = json.loads(call("ckpt", "verify", "--json", repo).stdout)["checkpoints"]
    assert said["absent_ranks"] == [1]


@pytest.mark.parametrize("file", [MODEL, "state.json"])
def test_a_rank_with_some_of_its_files_is_plainly_damaged(file, repo, call):
    (repo / "checkpoint-10-g1" / file).unlink()
    outcome = call("ckpt", "verify", repo)
    assert outcome.status == 3
    assert "near tier" not in outcome.stdout


def test_damage_beside_what_is_missing_is_plainly_damage(repo, call):
    (repo / "checkpoint-10-g1" / OPTIMIZER).unlink()
    flip_bit(repo / "checkpoint-10-g1" / MODEL)
    assert "near tier" not in call("ckpt", "verify", repo).stdout


def test_one_hosts_part_is_not_pruned_and_that_is_explained(repo, call):
    near = repo / "checkpoint-10-g1"
    (near / OPTIMIZER).unlink()
    before = sorted(near.iterdir())
    outcome = call("ckpt", "prune", "--keep-last", "1", "--yes", repo)
    assert outcome.status == 1
    assert "Nothing was deleted: the newest, checkpoint-10-g1, is not verified" in outcome.stdout
    assert "every file of rank 1 in checkpoint-10-g1 is missing" in outcome.stdout
    assert "`near_total_limit`" in outcome.stdout
    assert sorted(near.iterdir()) == before
    (near / "state.json").unlink()
    plain = call("ckpt", "prune", "--keep-last", "1", "--yes", repo)
    assert (plain.status, "near tier" in plain.stdout) == (1, False)
