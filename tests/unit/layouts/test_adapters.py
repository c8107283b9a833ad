"""Adapters of PEFT in a checkpoint: their files, their names, and lost files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from resilient.layouts.incomplete import unfinished
from resilient.layouts.weights import adapter_files, peft_names, read_weights
from resilient.storage.folder import open_folder

MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAME = "base_model.model.transformer.h.0.c_attn.lora_A.weight"
LORA = {"peft_type": "LORA", "target_modules": ["c_attn"]}


def write(folder, name=NAME, config=LORA):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(2, 2)}, folder / MODEL)
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config))


def read(path):
    folder = open_folder(str(path))
    return read_weights(folder, folder.list())


def test_adapter_files_prefer_safetensors_and_skip_steps():
    names = [
        *(MODEL, "adapter_model.bin", "mine/adapter_model.bin"),
        *(f"checkpoint-4/{MODEL}", f"other/{MODEL}", "other/trainer_state.json"),
        f"deep/er/{MODEL}",
    ]
    assert adapter_files(names) == {"": MODEL, "mine/": "mine/adapter_model.bin"}


def test_read_weights_of_all_adapters_have_the_folder_before_the_name(tmp_path):
    write(tmp_path)
    write(tmp_path / "second")
    tensors, problems = read(tmp_path)
    assert [(one.name, *one.files) for one in tensors] == [
        (NAME, MODEL),
        (f"second/{NAME}", f"second/{MODEL}"),
    ]
    assert problems == []


def test_read_weights_of_a_whole_model_come_before_adapters(tmp_path):
    write(tmp_path / "second")
    save_file({"lin.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert [one.name for one in read(tmp_path)[0]] == ["lin.weight"]


@pytest.mark.parametrize("lost", ["", "second"])
def test_adapter_without_its_weights_is_not_resumable(tmp_path, lost):
    for place in ("", "second"):
        write(tmp_path / place)
    (tmp_path / lost / MODEL).unlink()
    (problem,) = read(tmp_path)[1]
    assert (problem.place, problem.is_fatal) == ((f"{lost}/" if lost else "") + MODEL, True)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("h.0.c_attn.lora_A.weight", LORA, "none of its weights has the prefix"),
        (NAME, {**LORA, "target_modules": ["q_proj"]}, "name no module of 1 of 1 weights"),
        (NAME, {**LORA, "target_modules": ".*c_attn"}, None),
        ("h.0.c_attn.lora_A.weight", None, None),
        ("prompt_embeddings", {"peft_type": "PROMPT_TUNING"}, None),
    ],
    ids=["prefix", "targets", "expression", "no configuration", "prompts"],
)
def test_names_of_an_adapter_are_compared_with_its_configuration(tmp_path, name, config, said):
    write(tmp_path / "mine", name, config)
    problems = read(tmp_path)[1]
    assert [said in one.what for one in problems] == ([True] if said else [])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("transformer.h.0.c_attn.lora_A.weight", 1),
        (f"module.{NAME}", 1),
        ("model.layers.0.c_attn.lora_A.weight", 2),
        ("transformer.h.0.another.lora_A.weight", 0),
    ],
)
def test_peft_names_need_the_modules_of_the_configuration(name, count):
    renames = peft_names([name], LORA)
    assert len(renames) == count
    assert all(one[name].startswith("base_model.") for one in renames)


def test_unfinished_save_with_a_named_adapter_does_not_lack_weights(tmp_path):
    folder = tmp_path / "checkpoint-4"
    write(folder / "mine")
    (problem,) = unfinished(str(folder), open_folder(str(folder)).list(), ())
    assert "weights" not in problem.what
    assert "optimizer.pt" in problem.what
