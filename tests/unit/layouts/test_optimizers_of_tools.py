"""An optimizer that no training goes on from, in files of torch, Lightning and accelerate."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.foreign_folders import look

RATES = torch.optim.lr_scheduler.StepLR


def made(steps=1):
    """Return a model, its optimizer and its schedule after some steps."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    schedule = RATES(optimizer, 1)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return model.state_dict(), optimizer.state_dict(), schedule.state_dict()


def a_file(path, change, steps=1):
    model, optimizer, schedule = made(steps)
    change(optimizer)
    value = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "step": steps}
    torch.save(value, path / "last.pt")
    return path / "last.pt"


def of_lightning(path, change, steps=1):
    model, optimizer, schedule = made(steps)
    change(optimizer)
    value = {"pytorch-lightning_version": "2.6.0", "state_dict": model, "global_step": steps}
    value |= {"optimizer_states": [optimizer], "lr_schedulers": [schedule], "epoch": 1}
    torch.save(value, path / "last.ckpt")
    return path / "last.ckpt"


def of_accelerate(path, change, steps=1):
    model, optimizer, schedule = made(steps)
    change(optimizer)
    for name, value in (
        ("pytorch_model.bin", model),
        ("optimizer.bin", optimizer),
        ("scheduler.bin", schedule),
    ):
        torch.save(value, path / name)
    return path


LOST = "the optimizer's state of 1 parameter"
TOOLS = pytest.mark.parametrize("tool", [a_file, of_lightning, of_accelerate])


def said(place):
    return {one.what: one for one in look(place).problems}


@TOOLS
def test_a_whole_one_is_not_odd(tmp_path, tool):
    found = said(tool(tmp_path, lambda _: None))
    assert not [one for one in found if "group" in one or "no state of any" in one]


@TOOLS
def test_an_optimizer_without_groups_stops_its_tool(tmp_path, tool):
    found = said(tool(tmp_path, lambda one: one.update(param_groups=[])))
    assert found["it has no parameter groups, and its tool fails without them"].is_fatal


@TOOLS
def test_a_rate_that_is_no_number_spoils_all(tmp_path, tool):
    found = said(tool(tmp_path, lambda one: one["param_groups"][0].update(lr=float("nan"))))
    assert any("`lr` of its group 0 is nan" in what for what in found)


@TOOLS
def test_one_that_lost_what_it_gathered_is_a_loss(tmp_path, tool):
    found = said(tool(tmp_path, lambda one: one.update(state={})))
    (problem,) = [one for what, one in found.items() if "no state of any parameter" in what]
    assert (problem.severity, problem.loses) == ("warning", "the optimizer's state")


@TOOLS
def test_before_the_first_step_there_is_nothing_to_gather(tmp_path, tool):
    found = said(tool(tmp_path, lambda _: None, steps=0))
    assert not [one for one in found if "no state of any parameter" in one]


def without_states(*lost):
    return lambda one: [one["state"].pop(index) for index in lost]


@pytest.mark.parametrize(
    ("lost_here", "lost_beside", "beside", "loses", "says"),
    [
        ([1], [1], 0, "", "they had no gradient, as checkpoint_0 beside it shows"),
        ([1], [1], 2, "", "they had no gradient, as checkpoint_2 beside it shows"),
        ([1], [], 0, LOST, "checkpoint_0 beside it has a state of more"),
        # The parameter may have got its first gradient after this step.
        ([1], [], 2, LOST, "unless these parameters never had a gradient"),
        ([1], [0], 0, LOST, "checkpoint_0 beside it has a state of more"),
        ([1], [0, 1], 0, LOST, "unless these parameters never had a gradient"),
    ],
)
def test_another_step_decides_if_a_parameter_without_state_had_a_gradient(
    tmp_path, lost_here, lost_beside, beside, loses, says
):
    for number, lost in ((1, lost_here), (beside, lost_beside)):
        folder = tmp_path / f"checkpoint_{number}"
        folder.mkdir()
        of_accelerate(folder, without_states(*lost), steps=3 + number)
    (problem,) = [
        one for one in look(tmp_path / "checkpoint_1").problems if "no state of" in one.what
    ]
    assert says in problem.what
    assert problem.loses == loses
