"""How a tensor's numbers are spread is what counting them one by one says."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from resilient.diff import foreign, tensor_reader, tensor_stats
from resilient.diff.tensor_stats import (
    CELLS_MAX,
    HistogramAccumulator,
    HistogramBins,
    alike,
    histogram,
)
from resilient.layouts.detect import read_layout
from resilient.layouts.model import Unreadable
from resilient.storage.folder import open_folder

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int8", "uint8", "bool", "complex64"),
)


def side(path):
    folder = open_folder(str(path))
    listing = folder.list()
    return foreign.open_foreign(folder, listing, read_layout(folder, listing))


def spread(path, tensors, **options):
    torch.save(tensors, path / "x.pt")
    there = side(path / "x.pt")
    return {one.name: histogram(there, one, **options) for one in there.tensors}


def numbers_of(tensor):
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return [float(one) for one in whole.to(torch.float64).flatten()]


def of(values, block=10**9, *, is_whole=False):
    cells = HistogramAccumulator(is_whole=is_whole)
    for start in range(0, len(values), block):
        cells.add(np.array(values[start : start + block], np.float64))
    return cells.result()


def check_bars(bars, values):
    """Hold counts against the numbers themselves: each is in the cell that its edges say."""
    width = Fraction(2) ** bars.exponent
    cells = Counter(math.floor(Fraction(one) / width) for one in values)
    assert {bars.first + nth: count for nth, count in enumerate(bars.counts) if count} == cells


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_counted_number_by_number(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_stats, "BLOCK_ELEMENTS", 13)
    torch.manual_seed(3)
    tensor = (torch.randn(100) * 40).clamp(-100, 100).to(getattr(torch, name))
    found = spread(tmp_path, {"x": tensor})["x"]
    values = numbers_of(tensor)
    check_bars(found.bars, values)
    powers = Counter(math.frexp(one)[1] - 1 for one in values if one)
    assert dict(found.powers) == powers
    assert (found.elements, found.seen) == (100, 100)
    assert found.summary.zeros == values.count(0.0)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        assert found.bars.exponent >= 0


def test_what_is_no_number_is_counted_apart(tmp_path):
    tensor = torch.tensor([1.0, math.nan, 2.0, math.inf, -math.inf, math.nan])
    found = spread(tmp_path, {"x": tensor, "none": torch.full((4,), math.nan)})
    assert (found["x"].summary.nans, found["x"].summary.infinite) == (2, 2)
    assert sum(found["x"].bars.counts) == sum(n for _, n in found["x"].powers) == 2
    assert found["none"].bars.counts == found["none"].powers == ()
    assert found["none"].summary.nans == 4


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 9,
        [3.7] * 5,
        [-1e-320, 5e-324, 0.0],
        [1.7e308, -1.7e308, 1.0, -1e-300],
        [1e9 + one / 1024 for one in range(100)],
        [0.0, 0.0, 1e-9, 0.0, 4.0, -1e3, 1e-30],
    ],
    ids=["zeros", "one", "smallest", "largest", "far from zero", "growing"],
)
def test_the_range_is_found_on_the_way_whatever_comes_first(values):
    found = of(values)
    check_bars(found, values)
    assert len(found.counts) <= CELLS_MAX
    for block in (1, 2):
        assert of(values, block) == found
        assert of(values[::-1], block) == found


def test_far_from_zero_small_differences_are_seen():
    values = [1 + one / 4096 for one in range(64)]
    assert len([one for one in of(values).at_most(64).counts if one]) >= 32


def test_a_picture_has_few_bars_and_every_number():
    values = list(np.random.default_rng(1).normal(size=5000))
    bars = of(values).at_most(64)
    assert 32 <= len(bars.counts) <= 64
    check_bars(bars, values)
    assert bars.edge(0) <= min(values) < bars.edge(1)


def test_two_tensors_share_their_cells():
    wide, narrow = [one / 8 for one in range(-800, 800)], [one / 5000 for one in range(50)]
    found = [tensor_stats.Histogram(1, 1, None, of(one), ()) for one in (wide, narrow)]
    one, other = alike(found)
    assert one.exponent == other.exponent
    check_bars(one, wide)
    check_bars(other, narrow)
    assert alike([]) == ()


def test_cells_far_apart_keep_their_sign():
    bars = HistogramBins(-1074, -3, (1, 0, 0, 2)).coarser(900)
    assert (bars.first, bars.counts) == (-1, (1, 2))


def test_a_very_large_tensor_is_looked_at_here_and_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_stats, "BLOCK_ELEMENTS", 10)
    told = []
    tensor = torch.arange(1000, dtype=torch.float32)
    found = spread(
        tmp_path, {"x": tensor}, on_progress=lambda *one: told.append(one), blocks_max=5
    )["x"]
    assert (found.elements, found.seen) == (1000, 50)
    assert (found.summary.low, found.summary.high) == (0, 999)
    assert told[-1] == (5, 5)


def test_memory_does_not_grow_with_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_stats, "BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(tensor_reader, "AHEAD_BYTES", 1 << 14)
    torch.save({"x": torch.randn(1 << 21)}, tmp_path / "x.pt")
    there = side(tmp_path / "x.pt")
    histogram(there, there.tensors[0], blocks_max=2)
    tracemalloc.start()
    try:
        found = histogram(there, there.tensors[0], blocks_max=10**6)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.seen == 1 << 21
    assert peak < 2 << 20


def test_what_is_damaged_is_told(tmp_path):
    torch.save({"x": torch.randn(2_000_000)}, tmp_path / "x.pt")
    there = side(tmp_path / "x.pt")
    with (tmp_path / "x.pt").open("r+b") as file:
        file.truncate(5_000_000)
    with pytest.raises(Unreadable, match="ends too early"):
        histogram(there, there.tensors[0])
