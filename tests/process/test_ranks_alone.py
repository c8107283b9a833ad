"""Ranks that train each for itself are refused: what is saved once for all would be of none."""

import pytest

LOOP = """
import os, torch
from resilient import Checkpointer
torch.manual_seed(int(os.environ["RANK"]))
with Checkpointer("saved", model=torch.nn.Linear(3, 1)) as checkpointer:
    checkpointer.resume()
    checkpointer.save(1)
"""
ACCELERATE = """
import os, torch
from accelerate import Accelerator
from resilient.integrations.accelerate import AcceleratorCheckpointer
torch.manual_seed(int(os.environ["RANK"]))
accelerator = Accelerator({})
model = accelerator.prepare(torch.nn.Linear(3, 1))
with AcceleratorCheckpointer(accelerator, "saved") as checkpointer:
    checkpointer.resume()
    checkpointer.save(1)
"""
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (LOOP, "torch.distributed is not initialized"),
        (ACCELERATE.format(""), "the Accelerator is one of 1"),
    ],
    ids=["a loop", "accelerate without cpu=True"],
)
def test_ranks_that_train_alone_are_refused_and_nothing_is_saved(train, script, told):
    agent = train(script, "--nproc-per-node", "2")
    assert agent.end() == 78, agent.err
    assert told in agent.err
    assert "cpu=True" in agent.err
    assert not list(agent.folder.glob("saved/checkpoint-*"))


def test_ranks_that_accelerate_joins_save_one_model(train):
    agent = train(ACCELERATE.format("cpu=True"), "--nproc-per-node", "2")
    assert agent.end() == 0, agent.err
    assert list(agent.folder.glob("saved/checkpoint-1-g1/manifest.json"))
