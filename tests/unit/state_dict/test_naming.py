"""Which tensors of a state get one name, and which get their own."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values
from tests.helpers.one_rank import open_one

NUMBERS = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [(NUMBERS, NUMBERS.conj()), (NUMBERS.conj().imag, NUMBERS.imag)],
    ids=["conjugated", "negated"],
)
def test_the_same_bytes_seen_as_other_numbers_have_a_name_of_their_own(one, other):
    """Both begin at one address, with one dtype, shape and strides."""
    store, found = MemoryStore(), Values()
    checkpointer = open_one(store)
    checkpointer.resume({})
    checkpointer.save(1, {"p": Part(Values(one=one, other=other))}, CheckpointInfo())
    checkpointer.load_part(CheckpointId(1, 1), "p", Part(found))
    checkpointer.close()
    assert torch.equal(found.state["one"], one)
    assert torch.equal(found.state["other"], other)
