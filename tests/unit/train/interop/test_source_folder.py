"""An import opens plain files inside the folder and executes nothing."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.errors import IntegrityError
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.conversion import Naming, parts_of
from resilient.train.hf_interop.source_folder import SourceFolder
from tests.helpers.sharded_folders import STEP, write_fsdp, write_zero

LIBRARY = pathlib.Path(__file__).parents[4] / "resilient"
LINE = Naming((("lin.weight",), ("lin.bias",)), ())
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


def everything(folder):
    return parts_of(TransformersCheckpoint(folder), LINE, f"checkpoint-{STEP}-g1")


def outside(folder):
    """Return a directory beside the checkpoint with the file that a door leads to."""
    place = folder.parent / "outside"
    place.mkdir()
    return place


def lead_index(folder, name):
    """Have an index of weights name a file."""
    weights = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))
    return weights


@pytest.mark.parametrize("name", ["../outside/a.safetensors", "ABSOLUTE", "/dev/zero"])
def test_index_names_file_outside_is_refused(theirs, name):
    weights = lead_index(theirs, name.replace("ABSOLUTE", str(theirs.parent / "outside/a.st")))
    save_file(weights, outside(theirs) / "a.safetensors")
    with pytest.raises(IntegrityError, match="outside of the folder"):
        everything(theirs)


KINDS = {
    "model.safetensors": None,
    "optimizer.pt": None,
    "scheduler.pt": None,
    "rng_state.pth": None,
    "config.json": None,
    "trainer_state.json": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_link_out_of_folder_is_refused(theirs, name):
    if name == "config.json":
        (theirs / name).write_text("{}")
    (theirs / name).rename(outside(theirs) / name)
    (theirs / name).symlink_to(theirs.parent / "outside" / name)
    with pytest.raises(IntegrityError, match="a link that leads out"):
        everything(theirs)


def test_link_inside_folder_is_followed(theirs):
    (theirs / MODEL).rename(theirs / "blob.safetensors")
    (theirs / MODEL).symlink_to("blob.safetensors")
    assert everything(theirs)


@pytest.mark.parametrize("name", KINDS)
def test_pipe_in_folder_is_refused(theirs, name):
    (theirs / name).unlink(missing_ok=True)
    os.mkfifo(theirs / name)
    with pytest.raises(IntegrityError, match="a pipe"):
        everything(theirs)


@pytest.mark.parametrize("name", KINDS)
def test_link_to_device_is_refused(theirs, name):
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to("/dev/zero")
    with pytest.raises(IntegrityError, match="cannot be read"):
        everything(theirs)


def test_link_to_device_in_engine_folder_is_refused(theirs):
    file = write_zero(theirs, 1, 2) / "mp_rank_00_model_states.pt"
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(IntegrityError):
        everything(theirs)


def test_huge_document_is_refused(theirs):
    with (theirs / "trainer_state.json").open("r+b") as file:
        file.truncate(40 << 20)
    with pytest.raises(IntegrityError, match="a document of"):
        everything(theirs)


# GLOBAL pathlib.Path, then BUILD: what loads it sets an attribute of the class.
PATCH = b"cpathlib\nPath\n(dS'touched'\nI1\nsb}."
HUGE_MEMO = b"\x80\x04}r\xff\xff\xff\x3f."


def test_index_of_slices_patches_no_class(theirs):
    write_fsdp(theirs, "sharded")
    (theirs / "optimizer_0" / ".metadata").write_bytes(PATCH)
    with pytest.raises(IntegrityError):
        everything(theirs)
    assert not hasattr(pathlib.Path, "touched")
    assert not hasattr(pathlib.PurePosixPath, "touched")


def test_index_of_slices_takes_little_memory(theirs):
    write_fsdp(theirs, "sharded")
    (theirs / "optimizer_0" / ".metadata").write_bytes(HUGE_MEMO)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError):
        everything(theirs)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_index_of_slices_with_huge_tensor_takes_no_memory(theirs):
    write_fsdp(theirs, "sharded")
    file = theirs / "pytorch_model_fsdp_0" / ".metadata"
    index = pickle.loads(file.read_bytes())  # noqa: S301 - the test wrote it
    index.storage_meta = None
    told = index.state_dict_metadata["model.lin.weight"]
    told.size = told.chunks[0].sizes = torch.Size([1 << 44])
    told.chunks[0].offsets = torch.Size([0])
    moved = {
        (type(key)(key.fqn, torch.Size([0])) if key.fqn == "model.lin.weight" else key): value
        for key, value in index.storage_data.items()
    }
    index.storage_data = moved
    file.write_bytes(pickle.dumps(index))
    with pytest.raises(IntegrityError, match="more elements than its files have bytes"):
        everything(theirs)


def test_library_has_no_unpickler():
    """The standard library's unpickler executes; readers of torch's have rules of their own."""
    found = []
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            is_call = isinstance(node, ast.Attribute) and name in ("load", "loads")
            of = node.value.id if is_call and isinstance(node.value, ast.Name) else ""
            if name == "Unpickler" or of in ("pickle", "cPickle", "_pickle"):
                found.append(path.relative_to(LIBRARY).as_posix())
    # The state of torch's own rendezvous, which the nodes of one job write for each other.
    assert set(found) <= {"elastic/rendezvous/connect.py"}


@pytest.mark.parametrize("is_new", [False, True])
def test_folder_that_changes_is_refused(theirs, is_new):
    source = SourceFolder(theirs)
    source.require_unchanged()
    file = theirs / ("more.bin" if is_new else MODEL)
    file.write_bytes(b"1" if is_new else file.read_bytes())
    with pytest.raises(IntegrityError, match="changed while it was read"):
        source.require_unchanged()
    if not is_new:
        with pytest.raises(IntegrityError, match="changed while it was read"):
            source.read(MODEL)


def test_digest_covers_names_and_contents(theirs):
    whole = SourceFolder(theirs).digest()
    assert SourceFolder(theirs).digest() == whole
    (theirs / "README.md").write_text("about")
    assert SourceFolder(theirs).digest() == whole
    (theirs / "rng_state.pth").rename(theirs / "rng_state_0.pth")
    renamed = SourceFolder(theirs).digest()
    file = theirs / MODEL
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert len({whole, renamed, SourceFolder(theirs).digest()}) == 3


@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_as_torch_saved_them_are_taken(theirs, is_zip):
    weights = load_file(theirs / MODEL)
    (theirs / MODEL).unlink()
    file = theirs / "pytorch_model.bin"
    torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
    found = TransformersCheckpoint(theirs).weights()
    assert all(torch.equal(found[name], one) for name, one in weights.items())


def test_weights_in_several_files_of_torch_are_taken(theirs):
    weights = load_file(theirs / MODEL)
    (theirs / MODEL).unlink()
    places = {name: f"pytorch_model-{nth}.bin" for nth, name in enumerate(weights)}
    for name, file in places.items():
        torch.save({name: weights[name]}, theirs / file)
    index = theirs / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = TransformersCheckpoint(theirs).weights()
    assert all(torch.equal(found[name], one) for name, one in weights.items())


def test_weight_that_index_does_not_name_is_taken(theirs):
    weights = lead_index(theirs, "model-1.safetensors")
    save_file(weights, theirs / "model-1.safetensors")
    document = json.loads((theirs / INDEX).read_text())
    document["weight_map"].pop("lin.bias")
    (theirs / INDEX).write_text(json.dumps(document))
    assert set(TransformersCheckpoint(theirs).weights()) == set(weights)


def test_legacy_pickle_with_code_is_refused(theirs):
    (theirs / MODEL).unlink()
    (theirs / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")
    with pytest.raises(IntegrityError, match="cannot be read"):
        everything(theirs)
