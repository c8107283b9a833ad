"""Modules saved whole, programs of TorchScript, and slices in safetensors, as torch writes them."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resilient.layouts.single_file import ALONE
from tests.helpers.foreign_folders import look, verdict

STATE = {"a.weight": torch.arange(20.0).view(5, 4), "w": torch.arange(12.0).view(3, 4)}
AXES = {"a.weight": 0, "w": 1}


class Trap(nn.Linear):
    """A module whose pickle leaves a file behind in whoever loads it."""

    def __reduce__(self):
        return os.system, (': > "$MODULE_TRAP"',)


def model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


def shapes(contents):
    return {one.name: one.shape for one in contents.tensors}


def expected(made, root=""):
    return {f"{root}{name}": tuple(one.shape) for name, one in made.state_dict().items()}


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_module_that_was_saved_whole_is_named_and_its_weights_listed(tmp_path, is_zip):
    torch.save(made := model(), tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    found = look(tmp_path / "m.pt")
    assert (found.layout, shapes(found)) == ("torch-module", expected(made))
    told = verdict(tmp_path / "m.pt")
    assert told.answer == "no"
    assert "it is the module itself, and loading it runs what its pickle names" in told.why[0]
    assert told.command == f"resilient ckpt scan {tmp_path}/m.pt"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_traced", [True, False])
def test_a_program_of_torchscript_is_named_and_its_weights_listed(tmp_path, is_traced):
    made = model().eval()
    program = torch.jit.trace(made, torch.ones(2, 4)) if is_traced else torch.jit.script(made)
    torch.jit.save(program, tmp_path / "m.pt")
    found = look(tmp_path / "m.pt")
    assert (found.layout, shapes(found)) == ("torchscript", expected(made))
    told = verdict(tmp_path / "m.pt")
    assert told.answer == "no"
    assert "it is a TorchScript program" in told.why[0]


def test_a_module_inside_a_dictionary_has_its_weights_listed(tmp_path):
    torch.save({"net": (made := model()), "epoch": 3}, tmp_path / "m.pt")
    found = look(tmp_path / "m.pt")
    assert shapes(found) == expected(made, "net.")
    assert any("`net` in it is the module itself" in one.what for one in found.problems)


def test_a_module_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("MODULE_TRAP", str(tmp_path / "went-off"))
    torch.save(nn.Sequential(Trap(1, 1)), tmp_path / "m.pt")
    assert verdict(tmp_path / "m.pt").answer == "no"
    assert not (tmp_path / "went-off").exists()


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_scripts_call_pth_tar_is_a_file_of_torch(tmp_path, is_zip):
    value = {"epoch": 3, "state_dict": (made := model()).state_dict(), "best_acc1": 0.5}
    torch.save(value, tmp_path / "c.pth.tar", _use_new_zipfile_serialization=is_zip)
    found = look(tmp_path / "c.pth.tar")
    assert (found.epoch, shapes(found)) == (3, expected(made, "state_dict."))


def test_a_tar_of_the_first_torch_is_named_for_what_it_is(tmp_path):
    (tmp_path / "sys_info").write_bytes(b"x")
    with tarfile.open(tmp_path / "c.pth.tar", "w") as opened:
        opened.add(tmp_path / "sys_info", "sys_info")
    why = verdict(tmp_path / "c.pth.tar").why[0]
    assert "a tar file, as written by torch before 0.1.10" in why


def save_sliced(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}.meet", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(one.clone(), mesh, [Shard(AXES[name])])
        for name, one in STATE.items()
    }
    writer = dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sliced") / "step-9"
    torch.multiprocessing.spawn(save_sliced, (str(folder),), 2)
    return folder


def values(folder, tensor):
    """Return a tensor put together out of its boxes."""
    whole = torch.full(tensor.shape, float("nan"))
    for one in tensor.pieces:
        data = (Path(folder) / one.file).read_bytes()[one.start : one.start + one.size_bytes]
        box = torch.frombuffer(bytearray(data), dtype=torch.float32).view(one.region.lengths)
        at = zip(one.region.offsets, one.region.lengths, strict=True)
        whole[tuple(slice(begin, begin + length) for begin, length in at)] = box
    return whole


@pytest.mark.slow
def test_slices_in_safetensors_are_put_together_as_torch_does(sliced):
    found = look(sliced)
    assert (found.layout, found.world, found.versions) == (
        "dcp-safetensors",
        2,
        {"metadata": "1.0"},
    )
    assert {one.name for one in found.tensors} == STATE.keys()
    assert all(torch.equal(values(sliced, one), STATE[one.name]) for one in found.tensors)
    assert [one.what for one in found.problems if one.is_fatal] == [ALONE]


@pytest.mark.slow
def test_the_slices_of_a_rank_that_are_gone_are_missed(sliced, tmp_path):
    last = sliced / "shard-00002-model-00001-of-00001.safetensors"
    (tmp_path / last.name).write_bytes(last.read_bytes())
    told = verdict(tmp_path)
    assert told.answer == "no"
    assert "the files of rank 0 are missing" in told.why[0]


def test_slices_that_do_not_make_a_tensor_whole_are_told(sliced, tmp_path):
    for one in sliced.glob("*.safetensors"):
        moved = one.read_bytes().replace(b"[3, 0]", b"[4, 0]")
        (tmp_path / one.name).write_bytes(moved)
    assert "the pieces of `a.weight` do not cover it" in " ".join(verdict(tmp_path).why)
