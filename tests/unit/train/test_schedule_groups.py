"""A schedule goes on though its optimizer's parameters are grouped otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from resilient.train.schedules.factory import ScheduleState


def scheduler(groups, kind="lambda", rates=(0.5, 0.5, 0.5)):
    own = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    given = [{"params": own[nth::groups], "lr": rates[nth]} for nth in range(groups)]
    optimizer = torch.optim.SGD(given)
    if kind == "lambda":
        return LambdaLR(optimizer, lambda step: 0.5**step)
    return ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["lambda", "plateau"])
def test_groups_that_were_equal_may_be_cut_otherwise(before, after, kind):
    old, new = scheduler(before, kind), scheduler(after, kind)
    for one in (1.0, 2.0):
        old.optimizer.step()
        old.step() if kind == "lambda" else old.step(one)
    ScheduleState(new).load_state_dict(ScheduleState(old).state_dict())
    assert new.get_last_lr() == old.get_last_lr()[:1] * after
    if kind == "lambda":
        new.optimizer.step()
        new.step()
        assert new.get_last_lr() == [0.0625] * after


def test_groups_that_differed_are_not_guessed():
    old = scheduler(2, rates=(0.5, 0.1))
    with pytest.raises(ValueError, match="`base_lrs` has values for 2 groups"):
        ScheduleState(scheduler(1)).load_state_dict(old.state_dict())
