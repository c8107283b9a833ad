"""What one tensor looks like is what torch says of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from resilient.diff import foreign, tensor_reader
from resilient.diff.tensor_stats import summarize
from resilient.layouts.detect import read_layout
from resilient.storage.folder import open_folder


def side(path):
    folder = open_folder(str(path))
    listing = folder.list()
    return foreign.open_foreign(folder, listing, read_layout(folder, listing))


def test_a_tensor_is_summed_up_as_torch_does(tmp_path, monkeypatch):
    monkeypatch.setattr("resilient.diff.tensor_stats.BLOCK_ELEMENTS", 7)
    monkeypatch.setattr(tensor_reader, "AHEAD_BYTES", 64)
    whole = torch.randn(50, dtype=torch.float64) + 1e6
    whole[::9] = 0
    spoilt = whole.clone()
    spoilt[[3, 20]] = float("nan")
    spoilt[[4]] = float("-inf")
    torch.save({"whole": whole, "spoilt": spoilt, "ints": torch.arange(5)}, tmp_path / "x.pt")
    there = side(tmp_path / "x.pt")
    tensors = {one.name: one for one in there.tensors}
    found = summarize(there, tensors["whole"], 3, lambda *_: None)
    assert found.first == tuple(whole[:3].tolist())
    assert (found.low, found.high) == (float(whole.min()), float(whole.max()))
    wanted = (whole.mean(), whole.std(correction=0), whole.norm())
    assert (found.mean, found.deviation, found.norm) == pytest.approx(tuple(map(float, wanted)))
    assert found.zeros == int((whole == 0).sum())
    found = summarize(there, tensors["spoilt"], 8, lambda *_: None)
    finite = spoilt[spoilt.isfinite()]
    assert (found.nans, found.infinite, found.low) == (2, 1, float(finite.min()))
    assert found.mean == pytest.approx(float(finite.mean()))
    assert np.isnan(found.first[3])
    assert summarize(there, tensors["ints"], 9, lambda *_: None).first == (0, 1, 2, 3, 4)
