"""Holes that a loss of power leaves in a file of weights."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from resilient.diff.foreign_verify import PAGE_BYTES, verify_foreign
from resilient.layouts.single_file import ALONE
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import look

ROWS, ROW = 64, 384  # a row is 1,536 bytes


def told(path):
    folder = open_folder(str(path))
    problems = verify_foreign(folder, folder.list(), look(path))
    return [one.what for one in problems if one.is_fatal and one.what != ALONE]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def weights(request, tmp_path):
    held = {
        "bias": torch.ones(ROWS, dtype=request.param),
        "weight": torch.rand(ROWS, ROW).add(1).to(request.param),
        "words": torch.ones(8, 4096, dtype=request.param),
    }
    safetensors.torch.save_file(held, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("page", [1, 2, 5])
@pytest.mark.parametrize("pages", [1, 3])
def test_pages_that_are_gone_are_found(weights, page, pages):
    assert told(weights) == []
    data = bytearray(weights.read_bytes())
    at, length = page * PAGE_BYTES, pages * PAGE_BYTES
    data[at : at + length] = bytes(length)
    weights.write_bytes(data)
    (found,) = told(weights)
    assert "bytes of zeros from byte" in found
    assert f"`{'weight'}`" in found


def test_a_file_that_lost_its_end_is_found(weights):
    data = bytearray(weights.read_bytes())
    cut = len(data) // 2 // PAGE_BYTES * PAGE_BYTES
    data[cut:] = bytes(len(data) - cut)
    weights.write_bytes(data)
    assert any(f"from byte {cut} of the file on" in one for one in told(weights))


@pytest.mark.parametrize(
    "rows", [slice(0, 8), slice(20, 40), slice(56, 64), slice(1, 64, 2), slice(0, 64)]
)
def test_rows_that_are_zero_on_purpose_are_none(tmp_path, rows):
    weight = torch.rand(ROWS, ROW).add(1)
    weight[rows] = 0
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": weight, "one": torch.ones(2000)}, path)
    assert told(path) == []


def test_a_row_of_zeros_that_is_a_page_of_the_file_is_none(tmp_path):
    path = tmp_path / "model.safetensors"
    weight = torch.rand(16, PAGE_BYTES // 4).add(1)
    weight[3:5] = 0
    path.write_bytes(aligned({"weight": weight}))
    assert told(path) == []


def aligned(held):
    """Return a file whose numbers begin where a page does."""
    size_bytes = sum(one.nbytes for one in held.values())
    for blanks in range(PAGE_BYTES):
        data = safetensors.torch.save(held, {"blanks": " " * blanks})
        if (len(data) - size_bytes) % PAGE_BYTES == 0:
            return data
    raise AssertionError("no file of these tensors is aligned")


def test_what_is_zero_on_purpose_and_a_page_of_an_aligned_file_is_none(tmp_path):
    path = tmp_path / "model.safetensors"
    padded = torch.rand(64, 12288).add(1)
    padded[:, 11264:] = 0
    path.write_bytes(aligned({"padded": padded}))
    assert told(path) == []
    bias = torch.ones(3 * 1024)
    bias[1024:2048] = 0
    path.write_bytes(aligned({"bias": bias}))
    assert told(path) == []


@pytest.mark.parametrize("columns", [slice(300, None), slice(0, 2500), slice(1000, 3000)])
def test_columns_that_are_zero_on_purpose_are_none(tmp_path, columns):
    weight = torch.rand(600, 4000).add(1)
    weight[:, columns] = 0
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": weight}, path)
    assert told(path) == []


def test_numbers_that_were_pruned_are_none(tmp_path):
    torch.manual_seed(0)
    weight = torch.rand(256, 1000).add(1) * (torch.rand(256, 1000) > 0.9)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": weight}, path)
    assert told(path) == []
