"""What is no file, or lies elsewhere: named as what it is, and never opened."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from resilient.layout_repair.plan import plan_layout_repair
from resilient.layouts.security_scan import scan
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import look

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint-8"))


def problems_of(run):
    return {one.place: one for one in look(run).problems}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_a_pipe_is_named_and_nothing_waits_for_it(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    found = problems_of(run)[name]
    assert found.what == "it is a pipe, and was not opened"
    assert found.is_fatal, "its tool would wait for ever"


def test_a_random_state_that_is_a_socket_is_named(run, monkeypatch):
    (run / "rng_state.pth").unlink()
    monkeypatch.chdir(run)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("rng_state.pth")
        found = problems_of(run)["rng_state.pth"]
    assert found.what == "it is a socket, and was not opened"


def test_a_link_that_leads_out_is_named_as_one(run, tmp_path):
    for name in ("model.safetensors", "trainer_state.json"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
        assert problems_of(run)[name].what == "it is a link that leads out, and was not opened"


def test_a_device_is_reported_by_a_scan(run):
    (run / "optimizer.pt").unlink()
    (run / "optimizer.pt").symlink_to("/dev/zero")
    (run / "queue").unlink(missing_ok=True)
    os.mkfifo(run / "queue")
    folder = open_folder(str(run))
    said = {one.file: one.what for one in scan(folder, folder.list())}
    assert said["optimizer.pt"] == "a link that leads out"
    assert said["queue"] == "a pipe"


def test_what_is_missing_is_still_missing(run):
    (run / "optimizer.pt").unlink()
    assert problems_of(run)["optimizer.pt"].what == "it is missing"


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "..\\up", "C:\\x"])
def test_a_name_in_an_index_that_leads_out_is_not_called_missing(run, name):
    weights = (run / "model.safetensors").rename(run / "model-00001-of-00001.safetensors")
    mapped = {"transformer.wte.weight": weights.name, "transformer.wpe.weight": name}
    (run / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    found = problems_of(run)[name]
    assert found.what == "it is outside of the folder, and was not read"
    assert found.is_fatal


def test_a_repair_says_of_a_pipe_what_it_is(run):
    (run / "model.safetensors").unlink()
    os.mkfifo(run / "model.safetensors")
    assert "a pipe is not a file" in plan_layout_repair(str(run)).refused["model.safetensors"]
