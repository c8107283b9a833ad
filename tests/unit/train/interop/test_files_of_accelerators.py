"""What was saved on an accelerator is read where there is none."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from resilient.train.hf_interop.readers import load_torch

ON_CPU, ON_GPU = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"


def saved_on_gpu(value):
    """Return the bytes that a process with a GPU would have saved: its pickle says `cuda:0`."""
    here, there = io.BytesIO(), io.BytesIO()
    torch.save(value, here)
    with zipfile.ZipFile(here) as source, zipfile.ZipFile(there, "w") as target:
        for one in source.infolist():
            data = source.read(one)
            if one.filename.endswith("data.pkl"):
                assert ON_CPU in data
                data = data.replace(ON_CPU, ON_GPU)
            target.writestr(one.filename, data)
    there.seek(0)
    return there


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is an accelerator")
def test_tensors_of_a_gpu_come_to_the_cpu():
    held = {"state": {0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(7.0)}}}
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(saved_on_gpu(held), weights_only=True)
    read = load_torch(saved_on_gpu(held), "optimizer.pt")["state"][0]
    assert read["exp_avg"].device.type == "cpu"
    assert torch.equal(read["exp_avg"], torch.arange(3.0))
    assert read["step"] == 7
