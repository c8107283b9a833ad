"""Hostile checkpoints, made for real: each is named, and nothing in it is run or followed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from resilient.layouts.pickle_names import Effect, effect_of
from resilient.layouts.pickle_reader import PickledGlobal
from resilient.layouts.security_scan import Risk, scan
from resilient.layouts.torch_zip import READ_MAX
from resilient.storage.folder import open_folder


class Bomb:
    """Runs a command when somebody unpickles it."""

    def __init__(self, call=os.system, *args):
        self.made = (call, args or ("exit 1",))

    def __reduce__(self):
        return self.made


class Unknown:
    """A class that nobody knows."""


def found_in(folder):
    folder = open_folder(str(folder))
    return scan(folder, folder.list())


def risks(folder):
    return [(one.risk, one.file) for one in found_in(folder)]


def harmful(folder):
    return [one for one in found_in(folder) if one.risk is not Risk.NOTE]


@pytest.fixture
def legacy(tmp_path):
    def save(value, name="model.bin"):
        torch.save(value, tmp_path / name, _use_new_zipfile_serialization=False)
        return tmp_path

    return save


def usual():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


def test_what_torch_and_safetensors_save_harms_nobody(tmp_path, legacy):
    torch.save(usual(), tmp_path / "state.pt")
    legacy(usual())
    torch.save(torch.get_rng_state(), tmp_path / "rng_state.pth")
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    np.savez(tmp_path / "arrays.npz", one=np.ones(3))
    pickle_of_plain = {"a": [1, 2.0, "x"], "b": OrderedDict(c=np.float64(1.0))}
    (tmp_path / "extra.pkl").write_bytes(pickle.dumps(pickle_of_plain))
    (tmp_path / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert found_in(tmp_path) == []


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "bomb",
    [
        Bomb(),
        Bomb(eval, "1"),
        Bomb(exec, "1"),
        Bomb(getattr, 1, "real"),
        Bomb(torch.hub.load, "a", "b"),
        Bomb(torch.storage._load_from_bytes, b""),
        Bomb(pickle.loads, b"N."),
        Bomb(np.load, "x"),
    ],
    ids=lambda one: getattr(one.made[0], "__name__", "call"),
)
def test_a_pickle_that_calls_something_is_found_in_both_formats(bomb, zipped, tmp_path):
    value = {"model": {"weight": torch.ones(2), "x": bomb}}
    torch.save(value, tmp_path / "model.bin", _use_new_zipfile_serialization=zipped)
    found = harmful(tmp_path)
    assert [one.file for one in found] == ["model.bin"]
    assert bomb.made[0].__name__ in found[0].what


def test_a_class_of_a_script_is_a_warning(tmp_path):
    torch.save({"x": Unknown()}, tmp_path / "model.pt")
    (found,) = found_in(tmp_path)
    assert (found.risk, found.file) == (Risk.WARNING, "model.pt")
    assert "test_scanning.Unknown" in found.what


def test_a_bomb_behind_the_first_pickle_is_found(tmp_path):
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(1) + pickle.dumps(Bomb()))
    assert (Risk.DANGER, "model.pkl") in risks(tmp_path)


def test_a_bomb_before_a_pickle_breaks_is_found_and_the_break_is_told(tmp_path):
    (tmp_path / "model.pkl").write_bytes(pickle.dumps([Bomb(), 1])[:-1] + b"\xff")
    assert [one.risk for one in found_in(tmp_path)] == [Risk.DANGER, Risk.WARNING]


@pytest.mark.parametrize("name", ["rng_state_0.pth", "weights", "notes.dat", "training_args.bin"])
def test_a_bomb_is_found_whatever_its_file_is_called(name, tmp_path):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    assert (Risk.DANGER, name) in risks(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_class_in_a_slice_of_a_distributed_checkpoint_is_found(tmp_path):
    dcp.save({"w": torch.ones(4), "extra": [1]}, checkpoint_id=tmp_path / "usual")
    assert harmful(tmp_path / "usual") == []
    dcp.save({"w": torch.ones(4), "extra": Unknown()}, checkpoint_id=tmp_path / "strange")
    found = [one for one in harmful(tmp_path / "strange") if one.file == "__0_0.distcp"]
    assert "Unknown" in found[0].what
    (tmp_path / "usual" / ".metadata").unlink()
    assert (Risk.WARNING, "__0_0.distcp") in risks(tmp_path / "usual")


def test_links_out_of_the_folder_are_found_and_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(pickle.dumps(Bomb()))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.bin").symlink_to(secret)
    os.mkfifo(inside / "pipe.bin")
    assert risks(inside) == [(Risk.DANGER, "model.bin"), (Risk.DANGER, "pipe.bin")]


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "/etc/passwd", "~/x", "a/../../b", "..\\x", "C:\\x", "file:///x"]
)
def test_an_index_that_leads_out_is_found(path, tmp_path):
    text = '{"weight_map": {"w": "%s"}}' % path.replace("\\", "\\\\")  # noqa: UP031
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    assert risks(tmp_path) == [(Risk.DANGER, "model.safetensors.index.json")]


def test_a_zip_that_leads_out_swells_or_says_a_thing_twice_is_found(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as opened:
        opened.writestr("../../out", b"x")
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("archive/data/0", bytes(100 << 20))
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as opened:
        opened.writestr("archive/data.pkl", b"N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            opened.writestr("archive/data.pkl", b"N.")
    found = found_in(tmp_path)
    assert [(one.risk, one.file) for one in found] == [(Risk.DANGER, f"{one}.pt") for one in "abc"]
    assert ["leads out" in found[0].what, "unpack" in found[1].what] == [True, True]


def test_a_bomb_in_a_compressed_member_is_found(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("archive/data.pkl", pickle.dumps(Bomb()))
        opened.writestr("archive/sub/other", pickle.dumps(Bomb(eval, "1"), 4))
    assert [one.risk for one in found_in(tmp_path)] == [Risk.DANGER] * 2


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
        ("model.safetensors", struct.pack("<Q", 20) + b'{"a":1,"a":2}       '),
        ("model.safetensors", b"\x01"),
        ("config.json", b"[" * 100_000 + b"]" * 100_000),
        ("config.json", b'{"a": 1, "a": 2}'),
        ("model.pt", b"PK\x03\x04 nothing"),
        ("model.bin", b"\x80\x04\x95"),
    ],
)
def test_what_breaks_readers_is_a_warning(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert risks(tmp_path) == [(Risk.WARNING, name)]


def spoiled_member(method):
    """Return a zip whose first member does not unpack, before one that is a bomb."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made:
        made.writestr("a/data.pkl", pickle.dumps(list(range(1000))))
        made.writestr("b/data.pkl", pickle.dumps(Bomb()))
    data = bytearray(stream.getvalue())
    at = struct.calcsize("<4s5H3I2H") + len("a/data.pkl")
    # Deflate: a stored block whose length and its complement disagree, as a fuzzer found it.
    data[at : at + 24] = b"\x00" * 24 if method == zipfile.ZIP_DEFLATED else b"\xff" * 24
    return bytes(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_member_that_does_not_unpack_is_a_warning_and_hides_no_other(method, tmp_path):
    (tmp_path / "model.pt").write_bytes(spoiled_member(method))
    assert {one for one, _ in risks(tmp_path)} == {Risk.DANGER, Risk.WARNING}


def test_an_encrypted_member_is_a_warning(tmp_path):
    data = bytearray(spoiled_member(zipfile.ZIP_STORED))
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(magic) + flags] |= 1
    (tmp_path / "model.pt").write_bytes(data)
    assert {one for one, _ in risks(tmp_path)} == {Risk.DANGER, Risk.WARNING}


def test_an_array_of_objects_is_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    assert risks(tmp_path) == [(Risk.WARNING, "x.npy")]


@pytest.mark.parametrize("name", ["a\x1b[2Jb.json", "a\u202eb.json", "a\nb.json"])
def test_a_name_that_talks_to_a_terminal_is_a_warning(name, tmp_path):
    (tmp_path / name).write_text("{}", encoding="utf-8")
    assert risks(tmp_path) == [(Risk.WARNING, name)]


def test_code_that_comes_along_is_a_note(tmp_path):
    (tmp_path / "modeling.py").write_text("", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.X"}}', "utf-8")
    assert risks(tmp_path) == [(Risk.NOTE, "config.json"), (Risk.NOTE, "modeling.py")]


@pytest.mark.parametrize(
    ("module", "name", "effect"),
    [
        ("torch._utils", "_rebuild_tensor_v2", Effect.REBUILDS),
        ("torch", "FloatStorage", Effect.REBUILDS),
        ("torch", "bfloat16", Effect.REBUILDS),
        ("torch", "hub.load", Effect.UNKNOWN),
        ("builtins", "set", Effect.REBUILDS),
        ("builtins", "set.__class__", Effect.RUNS),
        ("collections", "OrderedDict.__init__.__globals__", Effect.RUNS),
        ("os.path", "join", Effect.RUNS),
        ("transformers.training_args", "TrainingArguments", Effect.LIBRARY),
        ("transformers.training_args", "os.system", Effect.UNKNOWN),
        ("transformers.trainer_utils", "set_seed", Effect.UNKNOWN),
        ("mine", "Thing", Effect.UNKNOWN),
    ],
)
def test_what_a_name_can_do(module, name, effect):
    assert effect_of(PickledGlobal(module, name)) is effect


def test_memory_is_bounded_by_the_largest_pickle_and_a_huge_claim_is_not_believed(tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("archive/data.pkl", b"\x80\x04" + bytes(200 << 20))
    (tmp_path / "a.pt").write_bytes(data.getvalue())
    assert {one.risk for one in found_in(tmp_path)} == {Risk.DANGER, Risk.WARNING}


@pytest.mark.parametrize("seed", range(150))
def test_spoiled_files_are_judged_and_never_crash_the_scan(seed, tmp_path):
    random = Random(seed)
    file = tmp_path / random.choice(["model.pt", "model.bin", "model.pkl", "model.safetensors"])
    value = {"w": torch.ones(8), "x": [1, {"a": 2.0}], "b": Bomb()}
    if file.suffix == ".safetensors":
        save_file({"w": torch.ones(8)}, file)
    elif file.suffix == ".pkl":
        file.write_bytes(pickle.dumps([1, {"b": Bomb()}, "x" * 100]))
    else:
        torch.save(value, file, _use_new_zipfile_serialization=file.suffix == ".pt")
    data = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 8)):
        data[random.randrange(len(data))] = random.randrange(256)
    file.write_bytes(data[: random.choice([len(data), random.randrange(len(data))])])
    assert all(one.file == file.name for one in found_in(tmp_path))


@pytest.mark.slow
def test_a_large_pickle_is_read_to_its_end(tmp_path):
    torch.save({"perm": list(range(3_500_000))}, tmp_path / "sampler_state.pt")
    assert (tmp_path / "sampler_state.pt").stat().st_size > READ_MAX
    assert found_in(tmp_path) == []
    torch.save({"perm": "x" * (READ_MAX + 1), "behind": Bomb()}, tmp_path / "sampler_state.pt")
    torch.save(Bomb(), tmp_path / "z.pt")
    assert risks(tmp_path) == [(Risk.DANGER, "sampler_state.pt"), (Risk.DANGER, "z.pt")]


def test_a_directory_that_is_too_large_is_a_finding_and_hides_nothing(tmp_path):
    head = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, READ_MAX + 64, 64, 0)
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04" + bytes(READ_MAX + 124) + head)
    torch.save(Bomb(), tmp_path / "b.pt")
    assert risks(tmp_path) == [(Risk.DANGER, "b.pt"), (Risk.WARNING, "a.pt")]
