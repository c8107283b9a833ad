"""``resilient ckpt cat``: one tensor, one value, one file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from drifting_runs import write_drifting_run

from resilient_cli.app import main

THEIRS = Path(__file__).parents[1] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"


@pytest.fixture
def run(tmp_path):
    write_drifting_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def output(capfdbinary):
    """Call the program and return its status and the bytes that it wrote."""

    def give(*words):
        status = main([str(one) for one in words])
        return status, capfdbinary.readouterr().out

    return give


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cat", ("model/first.weight",)),
        ("cat-json", ("model/first.weight", "--json", "--values", "2")),
        ("cat-section", ("config",)),
        ("cat-value", ("data.samples",)),
        ("cat-value-json", ("data.samples", "--json")),
        ("cat-unknown", ("model/first.wait",)),
    ],
)
def test_what_is_said_of_one_thing(name, words, run, call, matches):
    thing, *options = words
    matches(name, call("ckpt", "cat", "step:10", thing, run, *options), run)


def test_a_tensor_is_written_as_it_is_and_as_numpy_keeps_it(output):
    moments = torch.load(THEIRS / "optimizer.pt", weights_only=True)["state"]
    wanted = moments[7]["exp_avg"].numpy()
    status, data = output("ckpt", "cat", THEIRS, "optimizer/7.exp_avg", "--raw")
    assert (status, data) == (0, wanted.tobytes())
    _, data = output("ckpt", "cat", THEIRS, "optimizer/state.7.exp_avg", "--npy")
    read = np.load(io.BytesIO(data))
    assert read.dtype == np.float32
    assert np.array_equal(read, wanted)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("bfloat16", "<f4"), ("float8_e4m3fn", "<f4"), ("bool", "|b1"), ("complex64", "<c8")],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_npy_holds_every_dtype(tmp_path, output, dtype, kept, shape):
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    torch.save({"x": tensor}, tmp_path / "x.pt")
    _, data = output("ckpt", "cat", tmp_path / "x.pt", "x", "--npy")
    read = np.load(io.BytesIO(data))
    assert (read.dtype.str, read.shape) == (kept, shape)
    assert (read == 1).all()


def test_a_file_is_written_as_it_is(run, output):
    status, data = output("ckpt", "cat", THEIRS, "trainer_state.json")
    assert (status, data) == (0, (THEIRS / "trainer_state.json").read_bytes())
    _, data = output("ckpt", "cat", "step:10", "model.r00000.safetensors", run)
    assert data == (run / "checkpoint-10-g1" / "model.r00000.safetensors").read_bytes()


def test_the_end_of_a_name_is_enough_if_no_other_ends_so(tmp_path, call):
    torch.save({"model": {"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(2)}}}, tmp_path / "x.pt")
    found = call("ckpt", "cat", tmp_path / "x.pt", "model/b.w", "--json")
    assert json.loads(found.stdout)["name"] == "model/model.b.w"
    assert call("ckpt", "cat", tmp_path / "x.pt", "model/w").status == 66


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("model/none", "--raw"), 66),
        (("model/first.weight", "--raw", "--npy"), 2),
        (("../../secret",), 66),
    ],
)
def test_what_cannot_be_shown_has_the_exit_code_of_the_table(words, status, run, call):
    thing, *options = words
    assert call("ckpt", "cat", "latest", thing, run, *options).status == status


def test_bytes_are_not_for_a_terminal(run, call, monkeypatch):
    monkeypatch.setattr("resilient_cli.commands.catting._is_terminal", lambda: True)
    outcome = call("ckpt", "cat", "latest", "model/first.weight", run, "--raw")
    assert outcome.status == 2
    assert "> FILE" in outcome.stderr


def test_a_damaged_tensor_is_damage(tmp_path, call):
    torch.save({"x": torch.ones(9)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    at = data.index(b"PK\x03\x04", data.index(b"data/0") - 40)
    data[at : at + 4] = b"gone"
    (tmp_path / "x.pt").write_bytes(data)
    outcome = call("ckpt", "cat", tmp_path / "x.pt", "x")
    assert outcome.status == 1
    assert "RES-CKPT-DAMAGED" in outcome.stderr
