"""``resilient ckpt scan``: transcripts, exit codes, and checkpoints of other tools."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import resilient

FIXTURES = Path(resilient.__file__).parents[2] / "shared" / "fixtures" / "hf"


class Bomb:
    def __reduce__(self):
        return (os.system, ("exit 1",))


@pytest.fixture
def hostile(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Bomb()}))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x"}}', "utf-8")
    (folder / "code.py").write_text("", encoding="utf-8")
    (folder / "config.json").write_text('{"a": 1, "a": 2}', encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scan", ()),
        ("scan-json", ("--json",)),
        ("scan-plain", ("--format", "plain")),
        ("scan-quiet", ("-q",)),
    ],
)
def test_what_is_said_of_a_hostile_checkpoint(name, words, hostile, call, matches):
    outcome = call("ckpt", "scan", hostile, *words)
    assert outcome.status == 1
    matches(name, outcome, hostile)


def test_notes_alone_are_0_and_nothing_is_66(hostile, call, matches):
    for one in ("pytorch_model.bin", "model.safetensors.index.json", "config.json"):
        (hostile / one).unlink()
    outcome = call("ckpt", "scan", hostile)
    assert outcome.status == 0
    matches("scan-notes", outcome, hostile)
    assert call("ckpt", "scan", hostile / "nothing").status == 66


def test_a_warning_alone_is_1(hostile, call):
    assert call("ckpt", "scan", hostile / "config.json").status == 1


@pytest.mark.slow
@pytest.mark.skipif(not FIXTURES.is_dir(), reason="the fixtures of other tools are not here")
def test_what_other_tools_saved_harms_nobody(call):
    folders = sorted(one for one in FIXTURES.rglob("checkpoint-*") if one.is_dir())
    assert folders
    for one in folders:
        outcome = call("ckpt", "scan", one)
        assert outcome.status == 0, outcome.stdout
