"""Elements that are read by ranges are those that the library itself loads, in every layout."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.diff import foreign, native
from resilient.diff.tensor_reader import AHEAD_BYTES, Elements, ReadAhead
from resilient.format.regions import Region, whole
from resilient.layouts.detect import read_layout
from resilient.layouts.model import MODEL, OTHER, Piece, StorageFormat, Tensor, Unreadable
from resilient.storage.folder import DirectoryListing, open_folder
from resilient.storage.open import open_store
from tests.helpers.hf_runs import HERE, SHARED
from tests.helpers.sharded_folders import SHAPES, values, write_fsdp, write_zero

GOLDEN = Path(__file__).parents[2] / "golden"
DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32"),
]


def side(path):
    folder = open_folder(str(path))
    listing = folder.list()
    return foreign.open_foreign(folder, listing, read_layout(folder, listing))


def bits(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def held(found, block=7):
    """Return the bytes of each tensor, read a few elements at a time."""
    answers = {}
    for one in found.tensors:
        elements = Elements(found.folder, found.listing, one)
        steps = range(0, one.elements, block)
        parts = [elements.read(at, min(block, one.elements - at)) for at in steps]
        answers[one.name] = b"".join(part.tobytes() for part in parts)
    return answers


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_file_of_torch_is_read_as_torch_loads_it(tmp_path, is_zip):
    whole_ones = {
        name: torch.arange(30).reshape(5, 6).to(getattr(torch, name))
        for name in DTYPES
        if is_zip or not name.startswith(("float8", "uint16", "uint32"))
    }
    base = torch.randn(6, 10)
    views = {
        "row": base[2],
        "column": base[:, 3],
        "turned": base.t(),
        "inner": base[1:4, 2:9:3],
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "one_row": base[:1, ::2],
    }
    state = {**whole_ones, **views}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    found = held(side(tmp_path / "x.pt"))
    assert found == {name: bits(one) for name, one in loaded.items()}
    assert len(found) == len(state)


def test_big_endian_numbers_are_turned(tmp_path):
    (tmp_path / "x").write_bytes(np.array([1.5, -2.0], dtype=">f4").tobytes())
    piece = Piece(whole((2,)), "x", 0, 8, is_swapped=True)
    tensor = Tensor("x", MODEL, "F32", (2,), ("x",), (piece,))
    folder = open_folder(str(tmp_path))
    read = Elements(folder, folder.list(), tensor).read(0, 2)
    assert np.frombuffer(read.tobytes(), "<f4").tolist() == [1.5, -2.0]


@pytest.mark.parametrize("rows", [1, 5])
def test_a_model_in_shards_of_safetensors_is_read_whole(tmp_path, rows):
    first, second = {"a": torch.randn(rows, 3)}, {"b": torch.randn(2).bfloat16()}
    safetensors.torch.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    found = held(side(tmp_path))
    assert found == {name: bits(one) for name, one in (first | second).items()}


def check_fsdp(path):
    found = side(path)
    theirs_too = {}
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        metadata = dcp.FileSystemReader(path / name).read_metadata().state_dict_metadata
        tensors = {key: one for key, one in metadata.items() if hasattr(one, "size")}
        state = {
            key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in tensors.items()
        }
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=path / name, no_dist=True)
        theirs_too |= state
    assert held(found, 64) == {name: bits(one) for name, one in theirs_too.items()}
    assert max(len(one.pieces) for one in found.tensors) > 1
    return found


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded runs are not beside this clone")
@pytest.mark.parametrize("case", ["gpt2_fsdp1_sharded", "gpt2_fsdp2_sharded"])
def test_what_ranks_wrote_of_one_tensor_is_put_together(case):
    found = check_fsdp(SHARED / case / "run" / "checkpoint-8")
    assert found.order[0] == "transformer.wte.weight"
    assert len(found.order) == 28


@pytest.fixture
def trainer(tmp_path):
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    return Path(shutil.copytree(source, tmp_path / "checkpoint-7"))


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2), (3, 3), (1, 1)])
def test_what_an_engine_cut_is_made_whole_by_its_arithmetic(trainer, stage, ranks):
    write_zero(trainer, stage, ranks)
    found = side(trainer)
    assert found.notes == ()
    read = held(found, 3)
    for name in SHAPES:
        master = name if stage == 3 else f"state.{name}.fp32"
        for key, start in ((master, 0), (f"state.{name}.exp_avg", 100)):
            assert read[key] == bits(values(start)[name]), key
        assert read[f"state.{name}.step"] == bits(torch.tensor(7.0))
    assert found.order == tuple(SHAPES)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded runs are not beside this clone")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_real_engine_s_weights_are_those_that_were_gathered(stage):
    path = SHARED / f"gpt2_ds_z{stage}" / "run" / "checkpoint-8"
    found = side(path)
    read = held(found, 1000)
    gathered = safetensors.torch.load_file(path / "model.safetensors")
    for name in found.order:
        master = name if stage == 3 else f"state.{name}.fp32"
        assert read[master] == bits(gathered[name]), name


def test_a_part_of_an_engine_that_is_gone_is_told_and_the_rest_is_compared(trainer):
    write_zero(trainer, 1, 2)
    next(trainer.glob("*/*rank_1_mp_rank_00_optim_states.pt")).unlink()
    found = side(trainer)
    assert any("not of all" in one for one in found.notes)
    assert any(one.part == MODEL for one in found.tensors)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_state_of_fsdp_is_read_in_both_forms(trainer, kind):
    write_fsdp(trainer, kind)
    found = side(trainer)
    read = held(found)
    # Both write down whose state is whose, in the order of the parameters.
    assert found.order == tuple(SHAPES)
    prefix = "model." if kind == "sharded" else ""
    assert all(read[prefix + name] == bits(one) for name, one in values(0).items())


def test_a_checkpoint_of_ours_is_read_from_regions_and_older_checkpoints():
    store = open_store(str(GOLDEN / "format-2"))
    found = native.open_native(store, read_manifest(store, committed(store)[0]))
    read = held(found, 9_999)
    assert len({one.file for t in found.tensors for one in t.pieces}) > 2
    entries = {one.name: one for one in found.tensors}
    for name in ("wte.weight", "frozen", "half"):
        pieces = [
            store.get_range(f"checkpoint-2-g1/{one.file}", one.start, one.size_bytes)
            if "/" not in one.file
            else store.get_range(one.file, one.start, one.size_bytes)
            for one in entries[name].pieces
        ]
        assert read[name] == b"".join(pieces)
    # Both names of what is tied, as its model has them.
    assert read["lm_head.weight"] == read["wte.weight"]
    assert entries["odd.scalar"].part == OTHER


def test_a_slice_of_another_shape_than_the_index_says_is_refused(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"a": torch.ones(2, 3)}, checkpoint_id=tmp_path / "x", no_dist=True)
        dcp.save({"a": torch.ones(3, 2)}, checkpoint_id=tmp_path / "y", no_dist=True)
    shutil.copy(tmp_path / "y" / "__0_0.distcp", tmp_path / "x" / "__0_0.distcp")
    found = side(tmp_path / "x")
    with pytest.raises(Unreadable, match="differs from the index"):
        held(found)


class Counting:
    """A file of zeros that counts how often it is read."""

    url = "there"

    def __init__(self, size_bytes):
        self.listing = DirectoryListing({"x": size_bytes})
        self.reads = []

    def list(self):
        return self.listing

    def read(self, name, start, length):
        self.reads.append((start, length))
        return bytes(max(0, min(length, self.listing.sizes[name] - start)))


def test_a_thousand_small_reads_ask_the_store_a_few_times():
    counting = Counting(3 * AHEAD_BYTES + 5)
    near = ReadAhead(counting, counting.listing)
    for start in range(0, 3 * AHEAD_BYTES, AHEAD_BYTES // 300):
        assert len(near.read("x", start, 100)) == 100
    assert len(counting.reads) == 3
    assert near.read("x", 3 * AHEAD_BYTES, 100) == bytes(5)
    near.read("x", 0, AHEAD_BYTES)
    assert counting.reads[-1] == (0, AHEAD_BYTES)


def test_columns_of_a_piece_are_not_asked_for_one_by_one():
    counting = Counting(100 * 64 * 4)
    halves = [Piece(Region((0, at), (100, 32)), "x", at * 400, 100 * 32 * 4) for at in (0, 32)]
    tensor = Tensor("x", MODEL, "F32", (100, 64), ("x",), tuple(halves))
    Elements(counting, counting.listing, tensor).read(0, 6400)
    assert len(counting.reads) == 2


def piece(**told):
    return replace(Piece(whole((4,)), "x", 0, 16), **told)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (Tensor("x", MODEL, "F32", (4,), ()), "headers"),
        (Tensor("x", MODEL, "?", (4,), (), (piece(),)), "dtype"),
        (Tensor("x", MODEL, "F4", (4,), (), (piece(),)), "share a byte"),
        (Tensor("x", MODEL, "F32", (5,), (), (piece(),)), "do not cover it"),
        (Tensor("x", MODEL, "F32", (4,), (), (piece(), piece())), "do not cover it"),
        (Tensor("x", MODEL, "F32", (4,), (), (piece(first=1),)), "fewer bytes"),
        (Tensor("x", MODEL, "F32", (4,), (), (piece(size_bytes=99),)), "too early"),
        (Tensor("x", MODEL, "F32", (4,), (), (piece(strides=(1 << 40,)),)), "row-major"),
        (Tensor("x", MODEL, "F32", (4,), (), (piece(form=StorageFormat.MEMBER),)), "zip"),
    ],
)
def test_what_an_index_claims_is_held_against_what_is_there(tmp_path, tensor, why):
    (tmp_path / "x").write_bytes(bytes(16))
    folder = open_folder(str(tmp_path))
    with pytest.raises(Unreadable, match=why):
        Elements(folder, folder.list(), tensor).read(0, 4)
