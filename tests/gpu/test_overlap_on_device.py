"""Overlapped saves of state on a CUDA device: page-locked memory and a stream of their own."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.format.keys import CheckpointId
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values
from tests.helpers.one_rank import open_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_checkpoint_holds_the_bits_of_the_moment_while_the_device_trains_on():
    model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": Part(model), "optimizer": Part(NamedOptimizer(model, optimizer))}
    batch, store = torch.randn(512, 4096, device="cuda"), MemoryStore()
    checkpointer = open_one(store)
    checkpointer.resume({})
    moments = {}
    for step in range(1, 6):
        model(batch).square().mean().backward()
        checkpointer.before_update()
        optimizer.step()
        optimizer.zero_grad()
        moments[step] = model.weight.detach().clone()
        checkpointer.save(step, parts, CheckpointInfo(), overlap=True)
    checkpointer.close()
    for step, moment in moments.items():
        target, reader = Values(), open_one(store)
        reader.load_part(CheckpointId(1, step), "model", Part(target))
        reader.close()
        assert torch.equal(target.state["weight"], moment.cpu())


def test_memory_that_a_file_outgrows_is_unlocked_and_the_next_is_locked():
    weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
    checkpointer = open_one(MemoryStore())
    checkpointer.resume({})
    for step in (1, 2):
        longer = torch.nn.Parameter(torch.ones(step << 20, device="cuda"))
        optimizer = torch.optim.SGD([longer], lr=0.1)
        parts = {"model": Part(Values(weight=longer, other=weight)), "optimizer": Part(optimizer)}
        checkpointer.save(step, parts, CheckpointInfo(), overlap=True)
        checkpointer.wait()
        assert checkpointer._staging_buffers._locked_bytes["model.r00000.safetensors"] > 0
    checkpointer.close()
    assert checkpointer._staging_buffers._locked_bytes == {}
