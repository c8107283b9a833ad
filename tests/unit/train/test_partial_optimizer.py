"""An optimizer may hold a part of the trained parameters: others never add up over steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from resilient import Trainer, TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from tests.unit.train.models import DieAfter, Dies

STEPS = 6


class Probe(nn.Module):
    """A body outside the optimizer, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x))).squeeze(-1)
        return {"loss": ((logits - labels) ** 2).mean()}


class UnfreezeBody(TrainerCallback):
    def on_step_begin(self, args, state, control, /, *, model, **_):
        model.body.requires_grad_(state.global_step >= STEPS // 2)


def rows():
    generator = torch.Generator().manual_seed(3)
    return [{"x": x, "labels": x.sum()} for x in torch.randn(48, 4, generator=generator)]


def trainer(folder, callbacks=(), **options):
    model = Probe()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.05)
    args = TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "save_steps": 2,
            "logging_steps": 1,
            "disable_tqdm": True,
            "use_cpu": True,
            "per_device_train_batch_size": 4,
            "train_sampling_strategy": "sequential",
            **options,
        },
    )
    return Trainer(
        model,
        args,
        train_dataset=rows(),
        callbacks=callbacks,
        optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
    )


def by_hand(groups, unfrozen_from):
    """Return the head and the norms of a plain loop that frees all gradients after each step."""
    model, norms, data = Probe(), [], rows()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.05)
    for step in range(STEPS):
        model.body.requires_grad_(step >= unfrozen_from)
        for nth in range(groups):
            part = data[4 * (step * groups + nth) :][:4]
            batch = {name: torch.stack([row[name] for row in part]) for name in part[0]}
            (model(**batch)["loss"] / groups).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        model.zero_grad()
    return model.head.weight.detach(), norms


@pytest.mark.parametrize(
    ("groups", "unfrozen_from", "options"),
    [
        (1, 0, {}),
        (2, 0, {"gradient_accumulation_steps": 2}),
        (1, STEPS // 2, {}),
        (1, 0, {"reduction": "canonical", "global_train_batch_size": 4}),
    ],
    ids=["plain", "accumulation", "unfrozen later", "canonical"],
)
def test_weights_and_norms_are_those_of_a_loop_that_frees_all_gradients(
    tmp_path, groups, unfrozen_from, options
):
    callbacks = [UnfreezeBody()] if unfrozen_from else []
    one = trainer(tmp_path, callbacks, **options)
    one.model.body.requires_grad_(not unfrozen_from)
    one.train()
    weights, norms = by_hand(groups, unfrozen_from)
    found = [entry["grad_norm"] for entry in one.state.log_history if "grad_norm" in entry]
    assert found == pytest.approx(norms, rel=1e-5)
    assert torch.allclose(one.model.head.weight, weights, rtol=1e-5)
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_gradients_from_before_the_training_are_no_part_of_its_first_step(tmp_path):
    one = trainer(tmp_path)
    one.model(**{name: value[None] for name, value in rows()[0].items()})["loss"].backward()
    one.train()
    assert torch.allclose(one.model.head.weight, by_hand(1, 0)[0], rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"fp16": True}], ids=["plain", "skipped steps"])
def test_a_resume_ends_as_the_unbroken_run(tmp_path, options):
    unbroken = trainer(tmp_path / "unbroken", **options)
    unbroken.train()
    with pytest.raises(Dies):
        trainer(tmp_path / "broken", [DieAfter(5)], **options).train()
    resumed = trainer(tmp_path / "broken", **options)
    resumed.train(resume_from_checkpoint=True)
    for mine, other in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    logs = [
        [entry.get("grad_norm") for entry in one.state.log_history] for one in (resumed, unbroken)
    ]
    assert str(logs[0]) == str(logs[1])
