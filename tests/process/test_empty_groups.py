"""An optimizer with an empty parameter group saves and resumes, as LoRA makes it.

accelerate and Lightning: ``test_accelerate_state.py`` and ``test_lightning_judge.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.process.gangs import run_gang_to_end

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
ROWS = torch.rand(16, 4, generator=torch.Generator().manual_seed(5))
DATA = [{"x": row, "labels": row.sum()} for row in ROWS]
WORKER = Path(__file__).with_name("empty_groups_worker.py")


class Adapted(nn.Module):
    """A frozen base and an adapter without biases: no parameter goes without weight decay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.base = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
        self.adapter = nn.Linear(4, 1, bias=False)

    def forward(self, x, labels):
        return {"loss": (self.adapter(self.base(x)).squeeze(1) - labels).square().mean()}


def options(folder, steps):
    return {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 4,
        "save_steps": 2, "lr_scheduler_type": "constant", "weight_decay": 0.1, "use_cpu": True,
        "learning_rate": 0.1,
    }  # fmt: skip


def with_callback(folder, steps):
    from transformers import Trainer, TrainingArguments

    from resilient.integrations.transformers import ResilientCallback

    arguments = TrainingArguments(
        **options(folder / "out", steps), report_to="none", disable_tqdm=True
    )
    trainer = Trainer(Adapted(), arguments, train_dataset=DATA)
    trainer.add_callback(ResilientCallback(trainer, folder / "repository"))
    return trained(trainer)


def with_our_trainer(folder, steps):
    from resilient import Trainer, TrainingArguments

    arguments = TrainingArguments(**options(folder / "out", steps))
    return trained(Trainer(Adapted(), arguments, train_dataset=DATA))


def trained(trainer, **how):
    trainer.train(**how)
    return trainer.state.global_step, trainer.model.adapter.weight.detach().clone()


@pytest.mark.parametrize("train", [with_callback, with_our_trainer])
def test_trainer_with_an_empty_group_ends_as_unbroken(tmp_path, train):
    steps, whole = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    again, parts = train(tmp_path / "parts", 4)
    assert (steps, again) == (4, 4)
    assert torch.equal(whole, parts)


def test_our_trainer_takes_over_an_empty_group_of_transformers(tmp_path):
    import transformers

    from resilient import Trainer, TrainingArguments

    def stock(folder, steps):
        arguments = transformers.TrainingArguments(
            **options(folder, steps), report_to="none", disable_tqdm=True
        )
        return transformers.Trainer(Adapted(), arguments, train_dataset=DATA)

    trainer = stock(tmp_path / "stock", 2)
    trained(trainer)
    assert [len(one["params"]) for one in trainer.optimizer.param_groups] == [1, 0]
    path = str(tmp_path / "stock" / "checkpoint-2")
    _, theirs = trained(stock(tmp_path / "again", 4), resume_from_checkpoint=path)
    mine = Trainer(
        Adapted(), TrainingArguments(**options(tmp_path / "ours", 4)), train_dataset=DATA
    )
    steps, weight = trained(mine, resume_from_checkpoint=path)
    assert steps == 4
    assert torch.equal(weight, theirs)


@pytest.mark.smoke
def test_loop_with_an_empty_group_ends_as_unbroken_on_two_ranks(tmp_path):
    ends = run_gang_to_end(2, WORKER, tmp_path)
    for _, said, _ in ends:
        found = json.loads(said.strip().splitlines()[-1])
        assert sorted(found) == ["ddp", "fsdp", "fsdp1"]
        assert [one["resumed"] for one in found.values()] == [2, 2, 2]
        assert [one["same"] for one in found.values()] == [True, True, True]
