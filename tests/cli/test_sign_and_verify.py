"""Signatures and the deep level at the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.cli_repositories import flip_bit, write_usual_run

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers" / "reg_sgd" / "run" / "checkpoint-7"
SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of no other use


@pytest.fixture
def repo(tmp_path, monkeypatch):
    for name in ("KEY", "KEY_FILE"):
        monkeypatch.delenv(f"RESILIENT_SIGNING_{name}", raising=False)
    monkeypatch.delenv("RESILIENT_REQUIRE_SIGNATURE", raising=False)
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def test_what_is_not_signed_is_refused_where_that_is_asked_for(repo, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    assert call("ckpt", "verify", repo).status == 0
    outcome = call("ckpt", "verify", repo, "--require-signature", "--level", "quick")
    assert outcome.status == 77
    assert "checkpoint-35-g2 is not signed, and a signature is required" in outcome.stdout
    assert "UNSIGNED" in outcome.stdout
    assert "DAMAGED" not in outcome.stdout
    assert "Its data is intact" in outcome.stderr
    assert "resilient ckpt sign checkpoint-35-g2" in outcome.stderr
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "1")
    assert call("ckpt", "verify", repo).status == 77
    listed = call("ckpt", "ls", repo).stdout
    assert "UNSIGNED" in listed
    assert "DAMAGED" not in listed


def test_verify_required_signature_damage_stays_damage(repo, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "1")
    flip_bit(repo / "checkpoint-35-g2" / "model.r00000.safetensors")
    outcome = call("ckpt", "verify", repo, "--json")
    told = json.loads(outcome.stdout)
    assert (outcome.status, told["damaged"], told["unsigned"]) == (3, 1, 0)


def test_verify_required_signature_refuses_checkpoint_of_other_tool(call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "1")
    outcome = call("ckpt", "verify", GOLDEN)
    assert outcome.status == 77
    assert "is a checkpoint of another tool, which has no signature" in outcome.stderr


@pytest.mark.parametrize("word", ["true", "yes", "ON", " 1"])
@pytest.mark.parametrize("command", [("ckpt", "verify"), ("audit",)])
def test_requirement_any_true_word_refuses_unsigned(repo, call, monkeypatch, word, command):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    plain = call(*command, repo)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", word)
    outcome = call(*command, repo)
    assert "is not signed" in outcome.stdout + outcome.stderr
    assert "is not signed" not in plain.stdout + plain.stderr


@pytest.mark.parametrize("command", [("ckpt", "verify"), ("audit",), ("train",)])
def test_requirement_unknown_word_is_refused(repo, call, monkeypatch, command):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "2")
    arguments = ["--repo", repo, __file__] if command == ("train",) else [repo]
    outcome = call(*command, *arguments)
    assert outcome.status == 78
    assert "RESILIENT_REQUIRE_SIGNATURE='2' is not accepted: expected one of 1, true" in (
        outcome.stderr
    )


READERS = {
    "cat": ("cat", "latest:state.json"),
    "diff": ("diff", "latest~1", "latest"),
    "tag": ("tag", "latest", "release"),
    "rollback": ("rollback", "latest~1"),
    "cp": ("cp", "latest", "{other}"),
    "inspect": ("inspect", "latest"),
    "export": ("export", "latest", "--format", "safetensors", "--out", "{out}"),
    "export-hf": ("export", "latest", "--out", "{out}"),
    "repair": ("repair", "latest"),
    "rebuild": ("repair", "latest", "--rebuild", "{out}"),
}


@pytest.mark.parametrize("name", READERS)
def test_reading_command_refuses_unsigned(repo, call, monkeypatch, tmp_path, name):
    other, out = tmp_path / "other", tmp_path / "out"
    words = [one.format(other=other, out=out) for one in READERS[name]]
    before = sorted(path.name for path in repo.rglob("*"))
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "true")
    outcome = call("ckpt", *words, "--repo", repo)
    assert outcome.status == 77, outcome.stderr
    assert "is not signed, and a signature is required" in outcome.stderr
    assert "resilient ckpt sign checkpoint-" in outcome.stderr
    assert sorted(path.name for path in repo.rglob("*")) == before
    assert not other.exists() or not list(other.rglob("manifest.json"))
    assert not out.exists()


@pytest.mark.parametrize("name", ["cat", "diff", "tag", "rollback", "cp", "inspect"])
def test_reading_command_takes_signed(repo, call, monkeypatch, tmp_path, name):
    other, out = tmp_path / "other", tmp_path / "out"
    words = [one.format(other=other, out=out) for one in READERS[name]]
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    for ref in ("latest", "latest~1"):
        assert call("ckpt", "sign", ref, repo).status == 0
    plain = call("ckpt", *words, "--repo", repo, "--json")
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "true")
    for made in (tmp_path / "out", tmp_path / "other"):
        shutil.rmtree(made, ignore_errors=True)
    if name == "rollback":
        assert call("ckpt", "undo", repo).status == 0
    outcome = call("ckpt", *words, "--repo", repo, "--json")
    assert (outcome.status, plain.status) == (0, 0), outcome.stderr


def test_report_page_draws_no_unsigned_tensor(repo, call, monkeypatch, tmp_path):
    page = tmp_path / "page.html"
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "yes")
    outcome = call("report", repo, "-o", page, "--tensors", "latest")
    assert outcome.status == 77, outcome.stderr
    assert not page.exists()


def test_maintenance_reads_unsigned(repo, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", "on")
    assert "is not signed" in call("ckpt", "verify", repo).stdout
    assert call("ckpt", "prune", repo, "--keep-last", "1", "--dry-run").status == 0
    assert call("ckpt", "sign", "latest", repo).status == 0
    assert call("ckpt", "cat", "latest:state.json", "--repo", repo).status == 0


def test_a_checkpoint_is_signed_by_hand_and_then_taken(repo, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    signed = call("ckpt", "sign", "step:25", repo, "--json")
    assert signed.status == 0
    assert json.loads(signed.stdout)["id"] == "checkpoint-25-g2"
    outcome = call("ckpt", "verify", "step:25", repo, "--require-signature")
    assert outcome.status == 0
    outcome = call("ckpt", "verify", "--all", repo, "--require-signature")
    assert outcome.status == 1
    assert "can resume from checkpoint-25-g2" in outcome.stdout
    assert SECRET not in signed.stdout + signed.stderr + outcome.stdout + outcome.stderr


def test_another_key_is_called_so(repo, call, monkeypatch, tmp_path):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    assert call("ckpt", "sign", "latest", repo).status == 0
    monkeypatch.delenv("RESILIENT_SIGNING_KEY")
    key = tmp_path / "signing.key"
    key.write_text("another key of enough bytes\n")
    monkeypatch.setenv("RESILIENT_SIGNING_KEY_FILE", str(key))
    outcome = call("ckpt", "verify", repo, "--require-signature")
    assert "was signed with another key" in outcome.stdout
    assert call("ckpt", "sign", "latest", repo).status == 0
    assert call("ckpt", "verify", repo, "--require-signature").status == 0


@pytest.mark.parametrize("arguments", [("verify", "--require-signature"), ("sign",)])
def test_without_a_key_the_configuration_is_wrong(arguments, repo, call):
    outcome = call("ckpt", *arguments, "--repo", repo)
    assert (outcome.status, outcome.stdout) == (78, "")
    assert "RESILIENT_SIGNING_KEY_FILE=signing.key" in outcome.stderr


def test_what_is_damaged_is_not_signed(repo, call, monkeypatch):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", SECRET)
    flip_bit(repo / "checkpoint-35-g2" / "model.r00000.safetensors")
    outcome = call("ckpt", "sign", "latest", repo)
    assert outcome.status == 1
    assert "cannot sign checkpoint-35-g2" in outcome.stderr
    assert not list(repo.glob("checkpoint-35-g2/signature-*"))


def test_a_launch_that_nobody_could_check_is_refused_before_it_begins(repo, call, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    outcome = call("train", "--require-signature", "--dry-run", script)
    assert outcome.status == 78
    assert "there is no key to check it with" in outcome.stderr


def test_a_damaged_record_is_a_row_of_its_own(repo, call):
    record = repo / "generations" / "g000002.json"
    flip_bit(record, offset=30)
    outcome = call("ckpt", "verify", "--all", repo)
    assert outcome.status == 1
    assert "generations/g000002.json" in outcome.stdout
    assert "fix: none here: resume continues from the next older checkpoint" in outcome.stdout
    document = json.loads(call("ckpt", "verify", "--all", repo, "--json").stdout)
    assert [one["file"] for one in document["records"]] == ["generations/g000002.json"]
    assert call("ckpt", "verify", "--all", repo, "--level", "quick").status == 0


def test_deep_finds_a_tag_that_names_what_is_gone(repo, call):
    assert call("ckpt", "tag", "step:10", "old", repo).status == 0
    (repo / "checkpoint-10-g1" / "manifest.json").unlink()
    assert "names checkpoint-10-g1" not in call("ckpt", "verify", repo).stdout
    outcome = call("ckpt", "verify", repo, "--level", "deep")
    assert "names checkpoint-10-g1, which no longer exists" in outcome.stdout
    assert "fix: resilient ckpt untag old" in outcome.stdout
