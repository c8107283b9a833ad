from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError
from resilient.train import schedules, session
from tests.unit.train.fakes import MemoryRepository, equal
from tests.unit.train.models import DieAfter, Dies, Net, make_trainer


def both(folder, monkeypatch, kind=Trainer, **options):
    """Return the trainers of an unbroken run, and of one that died twice."""
    ended = []
    for deaths in ([], [5, 14]):
        monkeypatch.setattr(session, "open_engine", MemoryRepository().open)
        for step in deaths:
            with pytest.raises(Dies):
                make_trainer(folder, kind=kind, callbacks=[DieAfter(step)], **options).train()
        trainer = make_trainer(folder, kind=kind, **options)
        trainer.train()
        ended.append(trainer)
    return ended


def assert_equal(one, other):
    assert equal(one.model.state_dict(), other.model.state_dict())
    assert one.state.log_history == other.state.log_history
    assert equal(one.optimizer.state_dict(), other.optimizer.state_dict())


def rates_of(trainer):
    return [one["learning_rate"] for one in trainer.state.log_history if "learning_rate" in one]


class Plain(torch.optim.Optimizer):
    """An optimizer of one's own: signs of gradients that it has smoothed."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, smooth=0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "smooth": smooth})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                mean = self.state[one].setdefault("mean", torch.zeros_like(one))
                mean.lerp_(one.grad, 1 - group["smooth"])
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.sub_(group["lr"] * mean.sign())


class WithClass(Trainer):
    """Takes the class as Transformers' users give it."""

    def __init__(self, *given, **options):
        chosen = (Plain, {"lr": 0.02, "smooth": 0.8})
        super().__init__(*given, optimizer_cls_and_kwargs=chosen, **options)


def test_a_class_of_optimizers_gets_our_groups_and_resumes(tmp_path, monkeypatch):
    unbroken, broken = both(tmp_path, monkeypatch, WithClass, weight_decay=0.1)
    assert isinstance(unbroken.optimizer, Plain)
    decayed, shielded = unbroken.optimizer.param_groups
    assert (decayed["weight_decay"], shielded["weight_decay"]) == (0.1, 0.0)
    assert decayed["smooth"] == 0.8
    assert rates_of(unbroken)[0] < 0.02, "the schedule scales its rate"
    assert_equal(unbroken, broken)


def test_a_class_and_an_optimizer_are_one_too_many(tmp_path, repository):
    net = Net()
    given = {"optimizer_cls_and_kwargs": (Plain, {})}
    with pytest.raises(ConfigError, match="omit one of them"):
        Trainer(
            net,
            TrainingArguments(output_dir=str(tmp_path)),
            optimizers=(Plain(net.parameters()), None),
            **given,
        )


class Restarting(Trainer):
    """Overrides both, the second with restarts that get longer."""

    def create_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2, eta_min=1e-6)
        return self.lr_scheduler


def test_overrides_of_both_are_used_and_resume(tmp_path, monkeypatch):
    unbroken, broken = both(tmp_path, monkeypatch, Restarting, logging_steps=1)
    assert isinstance(unbroken.optimizer, torch.optim.SGD)
    rates = rates_of(unbroken)
    # Cycles of 4, 8 and 16 steps begin at steps 1, 5 and 13.
    assert [step for step, rate in enumerate(rates, 1) if rate == 0.05] == [1, 5, 13]
    assert min(rates) > 1e-6
    assert_equal(unbroken, broken)


class InOne(Trainer):
    """Overrides the function that makes both, as the field's scripts do."""

    asked: tuple[int, ...] = ()

    def create_optimizer_and_scheduler(self, num_training_steps):
        self.asked = (*self.asked, num_training_steps)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.lr_scheduler = schedules.get_cosine_schedule_with_warmup(
            self.optimizer, num_warmup_steps=3, num_training_steps=num_training_steps
        )


def test_both_can_be_made_in_one(tmp_path, monkeypatch):
    unbroken, broken = both(tmp_path, monkeypatch, InOne)
    assert unbroken.asked == (26,)
    assert unbroken.lr_scheduler.last_epoch == 26
    assert_equal(unbroken, broken)


def test_what_only_an_override_can_make_is_kept_for_a_longer_run(tmp_path, repository):
    with pytest.raises(Dies):
        make_trainer(tmp_path, kind=InOne, callbacks=[DieAfter(5)]).train()
    longer = make_trainer(tmp_path, kind=InOne, num_train_epochs=3, logging_steps=1)
    longer.train()
    assert longer.state.global_step == 39
    assert longer.asked == (39,)
    rates = {one["step"]: one.get("learning_rate") for one in longer.state.log_history}
    assert rates[22] == pytest.approx(0.005), "half of a cosine from 3 to 39"
    assert rates[13] > 0.0085, "a line would be at 0.0075"


def test_an_override_that_makes_nothing_is_named(tmp_path, repository):
    class Nothing(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            pass

    with pytest.raises(ConfigError, match=r"left `self\.optimizer` or `self\.lr_scheduler`"):
        make_trainer(tmp_path, kind=Nothing).train()


CALLS = {
    "get_constant_schedule": (),
    "get_constant_schedule_with_warmup": (4,),
    "get_linear_schedule_with_warmup": (4, 20),
    "get_cosine_schedule_with_warmup": (4, 20, 1.3),
    "get_cosine_with_hard_restarts_schedule_with_warmup": (4, 20, 3),
    "get_polynomial_decay_schedule_with_warmup": (4, 20, 0.02, 1.7),
    "get_inverse_sqrt_schedule": (4, 9),
}


def rates(make, steps=25):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        yield optimizer.param_groups[0]["lr"]
        scheduler.step()


@pytest.mark.parametrize("name", list(CALLS))
def test_schedules_by_function_equal_those_of_transformers(name):
    ours, theirs = getattr(schedules, name), getattr(transformers.optimization, name)
    given = CALLS[name]
    assert list(rates(lambda one: ours(one, *given))) == list(
        rates(lambda one: theirs(one, *given))
    )


def test_a_schedule_by_function_is_saved_without_pickle_and_goes_on():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    first = schedules.get_scheduler(transformers.SchedulerType.COSINE, optimizer, 4, 20)
    for _ in range(7):
        optimizer.step()
        first.step()
    saved = json.loads(json.dumps(first.state_dict()))
    again = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    second = schedules.get_cosine_schedule_with_warmup(again, 4, 20)
    second.load_state_dict(saved)
    assert second.last_epoch == 7
    assert second.get_last_lr() == first.get_last_lr()
    with pytest.raises(ConfigError, match="`cosin` is not a schedule; did you mean `cosine`"):
        schedules.get_scheduler("cosin", optimizer)
