"""Differences between the saved and the live objects: reported, or refused before the load."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from resilient import Checkpointer
from resilient.checkpoint.events import PartsMissing
from resilient.clock import SystemClock
from resilient.errors import IncompatibleCheckpoint
from resilient.events import Emitter
from resilient.state_dict.changes import SETUP, StateChanged, class_of
from resilient.train.optimizers.third_party import MuonWithAdamW
from resilient.train.schedules.factory import RateLR

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


class Tied(nn.Module):
    def __init__(self, is_tied) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        if is_tied:
            self.two.weight = self.one.weight


def step_lr(optimizer):
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 3)


def life(folder, *, save=True, told=None, **made):
    """Resume, save once more, and return the objects."""
    model = made.pop("model", None) or nn.Linear(3, 2)
    optimizer = made.pop("optimizer", torch.optim.AdamW)(model.parameters(), **made.pop("opts", {}))
    schedule = made.pop("schedule", None)
    things = {"model": model, "optimizer": optimizer}
    if schedule is not None:
        things["scheduler"] = schedule(optimizer)
    sinks = () if told is None else (lambda _, event: told.append(event),)
    emit = Emitter(SystemClock(), sinks)
    with Checkpointer(folder, emit=emit, **things, **made) as one:
        step = one.resume() or 0
        if save:
            for _ in range(3):
                optimizer.step()
                if schedule is not None:
                    things["scheduler"].step()
            one.save(step + 1)
    return things


def changes(told):
    return [
        (one.part, one.text)
        for event in told
        if isinstance(event, StateChanged)
        for one in event.changes
    ]


def refusal(folder, **made):
    with pytest.raises(IncompatibleCheckpoint) as found:
        life(folder, **made)
    assert "nothing was loaded" in found.value.message
    return found.value


def test_same_objects_report_nothing(tmp_path):
    told = []
    for _ in range(3):
        life(tmp_path, schedule=step_lr, told=told, note={"epoch": 1})
    assert changes(told) == []


@pytest.mark.parametrize("is_old", [False, True], ids=["setup saved", "older checkpoint"])
def test_scheduler_of_another_class_refused(tmp_path, monkeypatch, is_old):
    life(tmp_path, schedule=step_lr)
    if is_old:
        monkeypatch.setattr("resilient.state_dict.changes.SETUP", "objects-of-no-release")
    error = refusal(tmp_path, schedule=cosine)
    assert "`scheduler`" in error.message
    assert 'resume_changes=["scheduler"]' in error.hint
    told = []
    allowed = life(tmp_path, schedule=cosine, told=told, save=False, resume_changes="scheduler")
    assert allowed["scheduler"].last_epoch == 0, "an allowed scheduler starts fresh"
    assert [one.parts for one in told if isinstance(one, PartsMissing)] == [("scheduler",)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (MuonWithAdamW, "resilient.train.optimizers.muon.MuonWithAdamW"),
        (RateLR, "resilient.train.schedules.deepspeed.RateLR"),
    ],
)
def test_classes_of_ours_keep_the_name_that_checkpoints_hold(kind, name):
    assert class_of(kind.__new__(kind)) == name


def test_schedulers_inside_a_sequence_are_compared(tmp_path):
    def sequence(second):
        def make(optimizer):
            parts = [lr_scheduler.ConstantLR(optimizer), second(optimizer)]
            return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

        return make

    life(tmp_path, schedule=sequence(step_lr))
    assert "CosineAnnealingLR" in refusal(tmp_path, schedule=sequence(cosine)).message


def test_scheduler_of_other_groups_refused(tmp_path):
    model = nn.Linear(3, 2)
    life(tmp_path, model=model, schedule=step_lr)

    def grouped(parameters, **_):
        return torch.optim.AdamW([{"params": [one]} for one in parameters])

    error = refusal(tmp_path, model=model, optimizer=grouped, schedule=step_lr)
    assert "saved rates of 1 groups" in error.message


def test_narrower_dtype_refused_and_wider_reported(tmp_path):
    life(tmp_path / "wide")
    error = refusal(tmp_path / "wide", model=nn.Linear(3, 2, dtype=torch.bfloat16))
    assert "dtype torch.float32 -> torch.bfloat16 of `weight` and 1 more" in error.message
    narrow = life(
        tmp_path / "wide", model=nn.Linear(3, 2, dtype=torch.bfloat16), resume_changes=["model"]
    )
    assert narrow["model"].weight.dtype == torch.bfloat16
    life(tmp_path / "narrow", model=nn.Linear(3, 2, dtype=torch.bfloat16))
    told = []
    life(tmp_path / "narrow", told=told)
    assert changes(told) == [
        (
            "model",
            "dtype torch.bfloat16 -> torch.float32 of `weight` and 1 more: the values stay equal",
        )
    ]


def model_alone(folder, model, **options):
    with Checkpointer(folder, model=model, **options) as one:
        one.resume()
        one.save((one.resumed.step if one.resumed else 0) + 1)


def test_ties_that_changed_refused(tmp_path):
    model_alone(tmp_path / "tied", Tied(is_tied=True))
    with pytest.raises(IncompatibleCheckpoint, match="were one tied tensor"):
        model_alone(tmp_path / "tied", Tied(is_tied=False))
    model_alone(tmp_path / "apart", Tied(is_tied=False))
    with pytest.raises(IncompatibleCheckpoint, match="all values but one would be lost"):
        model_alone(tmp_path / "apart", Tied(is_tied=True))
    model_alone(tmp_path / "apart", Tied(is_tied=True), resume_changes="all")
    model_alone(tmp_path / "tied", Tied(is_tied=True))


def test_ties_of_equal_values_are_taken(tmp_path):
    model = Tied(is_tied=False)
    model.two.load_state_dict(model.one.state_dict())
    model_alone(tmp_path, model)
    model_alone(tmp_path, Tied(is_tied=True))


def test_lost_part_refused_and_absent_part_refused(tmp_path):
    life(tmp_path, own={"n": 1})
    error = refusal(tmp_path)
    assert "`own`: saved, but not passed to this run" in error.message
    life(tmp_path, resume_changes=["own"])
    with pytest.raises(IncompatibleCheckpoint, match="holds no `own`"):
        life(tmp_path, own={"n": 1})


def test_options_that_changed_are_reported(tmp_path):
    life(tmp_path, opts={"lr": 0.1}, schedule=step_lr)
    told = []
    found = life(
        tmp_path,
        opts={"lr": 0.2, "betas": (0.8, 0.9)},
        told=told,
        save=False,
        schedule=lambda one: lr_scheduler.StepLR(one, 2, gamma=0.9),
    )
    optimizer, scheduler = changes(told)
    assert optimizer[0] == "optimizer"
    assert "lr 0.1 -> 0.2" in optimizer[1]
    assert "betas [0.9, 0.999] -> [0.8, 0.9]" in optimizer[1]
    assert "the values of the checkpoint are used" in optimizer[1]
    assert scheduler == (
        "scheduler",
        "gamma 0.5 -> 0.9: the values of the checkpoint are used: they are part of its state",
    )
    assert found["optimizer"].param_groups[0]["betas"] == (0.9, 0.999)


def test_groups_that_changed_are_reported(tmp_path):
    model = nn.Linear(3, 2)
    life(tmp_path, model=model)

    def grouped(parameters, **_):
        return torch.optim.AdamW([{"params": [one]} for one in parameters])

    told = []
    life(tmp_path, model=model, optimizer=grouped, told=told)
    [(part, text)] = changes(told)
    assert part == "optimizer"
    assert "groups 1 -> 2" in text


def test_optimizer_class_with_the_same_state_is_reported(tmp_path):
    life(tmp_path, optimizer=torch.optim.AdamW)
    told = []
    life(tmp_path, optimizer=torch.optim.Adam, told=told)
    assert "torch.optim.adamw.AdamW -> torch.optim.adam.Adam" in changes(told)[0][1]


def test_setup_name_is_in_the_format():
    assert SETUP == "objects"
