"""Names and texts inside a checkpoint that talk to a terminal."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from resilient.layouts.security_scan import Risk, scan
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import write_slices

ESCAPE, TURN = "\x1b[2J\nresumable yes", "w\u202eteews"


def said(path):
    folder = open_folder(str(path))
    return [one for one in scan(folder, folder.list()) if "control characters" in one.what]


def safetensors(path, *names, **meta):
    head = {
        one: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]}
        for at, one in enumerate(names)
    }
    head = json.dumps({"__metadata__": meta, **head}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(4 * len(names)))


@pytest.mark.parametrize("name", [ESCAPE, TURN, "a\x9bb", "a\u2028b"])
def test_a_tensor_whose_name_talks_is_reported_and_shown_harmless(tmp_path, name):
    safetensors(tmp_path / "model.safetensors", "fine", name)
    (found,) = said(tmp_path)
    assert (found.risk, found.file) == (Risk.WARNING, "model.safetensors")
    assert found.what.isprintable()
    assert name.encode("unicode_escape").decode() in found.what


def test_what_stands_beside_the_tensors_is_looked_at_too(tmp_path):
    safetensors(tmp_path / "model.safetensors", "fine", format=ESCAPE)
    assert [one.file for one in said(tmp_path)] == ["model.safetensors"]


def test_names_in_files_of_torch_are_looked_at(tmp_path):
    torch.save({"state": {ESCAPE: torch.ones(2), TURN: torch.ones(2)}}, tmp_path / "optimizer.pt")
    (found,) = said(tmp_path)
    assert "and 1 more" in found.what


def test_names_in_an_index_of_slices_are_looked_at(tmp_path):
    write_slices({"model": {TURN: torch.ones(3)}}, tmp_path / "step-1")
    assert [one.file for one in said(tmp_path)] == ["step-1/.metadata"] or said(tmp_path / "step-1")


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("trainer_state.json", {"best_model_checkpoint": ESCAPE}),
        ("trainer_state.json", {"log_history": [{TURN: 1.0}]}),
        ("config.json", {"transformers_version": TURN}),
        ("model.safetensors.index.json", {"weight_map": {ESCAPE: "model.safetensors"}}),
    ],
)
def test_texts_that_are_shown_are_looked_at(tmp_path, name, document):
    (tmp_path / name).write_text(json.dumps(document))
    assert [one.file for one in said(tmp_path)] == [name]


def test_the_words_of_a_tokenizer_may_have_any_characters(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"vocab": {"\u200d": 1, "\n": 2}}))
    (tmp_path / "vocab.json").write_text(json.dumps({ESCAPE: 1}))
    assert said(tmp_path) == []


def test_letters_of_all_languages_are_fine(tmp_path):
    names = ("\u0441\u0445\u0435\u043c\u0430", "\u91cd\u307f", "poids_\xe9")
    safetensors(tmp_path / "model.safetensors", *names)
    assert said(tmp_path) == []
