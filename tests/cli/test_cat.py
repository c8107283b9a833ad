"""``resilient ckpt cat``: one tensor, one value, one file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from resilient_cli.app import main
from resilient_cli.commands.cat import split_ref_path
from tests.helpers.drifting_runs import write_drifting_run

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
    ("ref", "name"),
    [
        ("step:10", "config"),
        ("step:10", "model/first.weight"),
        ("latest", "data.samples"),
        ("latest~0", "trainer"),
        ("checkpoint-10-g1", "state.json"),
        ("10", "model/first.weight"),
        ("kept", "config"),
        ("@{0}", "config"),
        ("@2036-01-02T10:00", "config"),
        ("@2036-01-02T10:00:30+01:00", "config"),
    ],
)
def test_a_name_behind_a_colon_is_what_a_name_beside_it_is(ref, name, run, call):
    assert call("ckpt", "tag", "step:10", "kept", run).status == 0
    wanted = call("ckpt", "cat", ref, name, run)
    assert wanted.status == 0
    assert call("ckpt", "cat", f"{ref}:{name}", run) == wanted
    assert call("ckpt", "cat", f"{ref}:{name}", "-r", run) == wanted
    assert call("ckpt", "cat", ref, name, "-r", run) == wanted
    if ref not in ("10", "kept"):  # behind a slash these are folders
        assert call("ckpt", "cat", f"{run}/{ref}:{name}") == wanted
        assert call("ckpt", "cat", f"file://{run}/{ref}:{name}").status == 0


def test_a_path_with_a_name_behind_a_colon(tmp_path, output):
    wanted = (THEIRS / "trainer_state.json").read_bytes()
    assert output("ckpt", "cat", f"{THEIRS}:trainer_state.json") == (0, wanted)
    assert output("ckpt", "cat", f"file://{THEIRS}:trainer_state.json") == (0, wanted)
    assert output("ckpt", "cat", f"{THEIRS}:optimizer/7.exp_avg", "--raw")[0] == 0
    torch.save({"x": torch.ones(3)}, tmp_path / "a:b.pt")
    assert output("ckpt", "cat", tmp_path / "a:b.pt", "x")[0] == 0
    assert output("ckpt", "cat", f"{tmp_path}/a:b.pt")[0] == 2


def test_what_is_there_is_meant_though_it_has_a_colon(tmp_path, output, monkeypatch):
    torch.save({"x": torch.ones(3)}, tmp_path / "a:b.pt")
    monkeypatch.chdir(tmp_path)
    assert output("ckpt", "cat", "a:b.pt", "x")[0] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/run/checkpoint-5-g1:a/b", ("s3://b/run/checkpoint-5-g1", "a/b", True)),
        ("http://h:9000/run/step:5:a:b", ("http://h:9000/run/step:5", "a:b", True)),
        ("file:///run/best:loss:max:x", ("file:///run/best:loss:max", "x", True)),
        ("out/x.pt:model/w", ("out/x.pt", "model/w", True)),
        ("x.pt:model/w", ("x.pt", "model/w", False)),
        ("@2026-11-20:x", ("@2026-11-20", "x", False)),
        ("@2026-11-20T10:00:30:40", ("@2026-11-20T10:00:30", "40", False)),
        ("best:loss:min:min", ("best:loss:min", "min", False)),
        *((one, None) for one in ("latest", "step:10", "best:loss:max", "@2026-11-20T10:00:30")),
        *((one, None) for one in ("s3://bucket/run", "http://h:9000/run/latest", "x:", ":x", "")),
        *((one, None) for one in ("run/step:10", "run/best:loss:max", "run/@2026-11-20T10:00:30")),
    ],
)
def test_where_a_reference_ends(text, expected):
    assert split_ref_path(text) == expected


def test_a_reference_alone_says_nothing_of_what_to_show(run, call):
    outcome = call("ckpt", "cat", "latest", "-r", run)
    assert outcome.status == 2
    assert f"resilient ckpt inspect latest {run} --tensors" in outcome.stderr


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
    monkeypatch.setattr("resilient_cli.commands.cat._is_terminal", lambda: True)
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
