"""A step is a whole number within what a checkpoint's name can say, whatever type it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from resilient import Checkpointer
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import ConfigError
from resilient.format.keys import STEP_MAX, CheckpointId, parse_checkpoint
from resilient.testing.memory_store import MemoryStore
from tests.helpers.one_rank import open_one


@pytest.mark.parametrize(
    "step",
    [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int8)],
)
def test_whole_numbers_of_any_type_name_a_checkpoint(tmp_path, step):
    with Checkpointer(tmp_path, notes={}) as checkpointer:
        checkpointer.resume()
        made = checkpointer.save(step)
        assert (made, type(made.step)) == (CheckpointId(1, 3), int)
        checkpointer.save(4)
    with Checkpointer(tmp_path, notes={}) as checkpointer:
        assert checkpointer.resume() == 4


WRONG = [
    *(1.0, "5", None, -1, True, np.True_, torch.tensor(True), torch.tensor(2.0), torch.tensor([3])),
    *(np.array([3]), STEP_MAX + 1, 2**63),
]


@pytest.mark.parametrize("step", WRONG, ids=repr)
def test_what_is_no_step_is_refused_before_anything_is_staged(tmp_path, step):
    with Checkpointer(tmp_path, notes={}) as checkpointer:
        checkpointer.resume()
        with pytest.raises(ConfigError, match="is not a step") as caught:
            checkpointer.save(step)
        assert caught.value.hint
        checkpointer.save(1)
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-1-g1"]


@pytest.mark.parametrize("step", WRONG, ids=repr)
def test_the_spine_refuses_it_too(step):
    checkpointer = open_one(MemoryStore())
    checkpointer.resume({})
    with pytest.raises(ConfigError, match="is not a step"):
        checkpointer.save(step, {}, CheckpointInfo())
    checkpointer.save(np.int64(1), {}, CheckpointInfo())
    checkpointer.close()
    assert [type(one.step) for one in checkpointer.committed()] == [int]


def test_the_greatest_step_is_the_greatest_that_a_name_can_say():
    assert parse_checkpoint(CheckpointId(1, STEP_MAX).folder) == CheckpointId(1, STEP_MAX)
    assert parse_checkpoint(CheckpointId(1, STEP_MAX + 1).folder) is None
