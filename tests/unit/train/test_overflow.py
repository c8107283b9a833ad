"""debug="underflow_overflow": where numbers first become NaN or infinite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.errors import ResilientError
from resilient.train.model.transforms import UnderflowOverflow, checking_numbers
from tests.unit.train.models import Net, make_trainer


class Explodes(Net):
    """Its numbers overflow in the third pass, in one of its layers."""

    passes = 0

    def forward(self, x, labels=None):
        self.passes += 1
        if self.passes == 3:
            with torch.no_grad():
                self.layers[4].weight.mul_(1e38).mul_(1e38)
        return super().forward(x, labels)


def test_training_ends_at_the_module_where_it_began_and_shows_what_led_there(tmp_path, repository):
    trainer = make_trainer(tmp_path, debug="underflow_overflow", max_steps=6)
    trainer.model = model = Explodes()
    with pytest.raises(ResilientError, match="NaN or infinite numbers in weight") as raised:
        trainer.train()
    said = raised.value.message
    assert "of `layers.4` in forward pass 3" in said
    assert said.splitlines()[-5].split() == ["layers.4", "Linear"]
    assert "layers.3 ReLU" in said
    assert trainer.state.global_step == 2
    assert not any(one._forward_hooks for one in model.modules())


def test_healthy_training_is_the_same_with_it(tmp_path, repository):
    losses = []
    for debug in ("", "underflow_overflow"):
        trainer = make_trainer(tmp_path, debug=debug, max_steps=3, logging_steps=1)
        trainer.train(False)
        losses.append([entry.get("loss") for entry in trainer.state.log_history])
    assert losses[0] == losses[1]


def test_the_report_is_as_long_as_asked():
    model = nn.Sequential(*(nn.Identity() for _ in range(9)))
    detector = UnderflowOverflow(model, frames_max=3)
    handles = [one.register_forward_hook(detector.check_module) for one in model.modules()]
    model(torch.ones(2))
    with pytest.raises(ResilientError) as raised:
        model(torch.tensor([1.0, float("nan")]))
    assert "of `0` in forward pass 2" in raised.value.message
    frames = [line for line in raised.value.message.splitlines() if line.startswith(" " * 17)]
    assert [one.split()[0] for one in frames] == ["8", "(model)", "0"]
    for handle in handles:
        handle.remove()


def test_outputs_inside_containers_are_looked_at():
    class Hidden(nn.Module):
        def forward(self, x):
            return {"a": [x, (x / 0,)], "count": torch.tensor(3)}

    with (
        checking_numbers(model := Hidden(), ["underflow_overflow"]),
        pytest.raises(ResilientError, match=r"output\[a\]\[1\]\[0\]"),
    ):
        model(torch.ones(1))
    with checking_numbers(model, []):
        model(torch.ones(1))
