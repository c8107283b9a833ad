"""What a loop of somebody else's shows of its progress: its optimizer's steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Checkpointer, heartbeat
from resilient.distributed.heartbeat import (
    LoopHeartbeat,
    Phase,
    ProgressReporter,
    progress_reporter,
    read_progress,
)
from tests.helpers.clocks import OwnClock


@pytest.fixture
def clock():
    return OwnClock()


@pytest.fixture
def pulse(tmp_path, clock):
    return ProgressReporter(tmp_path / "p", clock)


@pytest.fixture
def shown(tmp_path, pulse):
    return lambda: read_progress(tmp_path / "p")


@pytest.fixture
def beat(pulse):
    return LoopHeartbeat(pulse)


def test_the_time_between_two_steps_of_an_optimizer_is_a_step(beat, shown, clock):
    beat.start(7)
    assert (shown().phase, shown().step) == (Phase.FIRST, -1)
    clock.sleep(30)
    beat.end_step()
    assert (shown().step, shown().step_seconds) == (8, ())
    for seconds in (1.0, 2.0):
        clock.sleep(seconds)
        beat.end_step()
    assert (shown().step, shown().step_seconds, shown().own_seconds) == (10, (1.0, 2.0), ())
    # Nobody knows what comes next: it has the patience of what is no step.
    assert shown().phase is Phase.BETWEEN


def test_what_is_saved_is_no_part_of_a_step(beat, shown, clock):
    beat.start(0)
    beat.end_step()
    with beat.saving():
        assert shown().phase is Phase.SAVING
        clock.sleep(5)
    clock.sleep(1)
    beat.end_step()
    assert shown().step_seconds == (1.0,)


def test_an_adapter_knows_when_a_step_begins(beat, shown, clock):
    beat.start(0)
    beat.between()
    beat.begin_step()
    assert shown().phase is Phase.FIRST
    beat.end_step()
    clock.sleep(4)
    beat.begin_step()
    assert shown().phase is Phase.STEP
    clock.sleep(1)
    beat.end_step()
    beat.between()
    assert (shown().step, shown().step_seconds, shown().phase) == (2, (1.0,), Phase.BETWEEN)
    beat.begin_step()
    # Left out by the optimizer, as after an overflow.
    beat.between()
    assert (shown().step, shown().phase) == (2, Phase.BETWEEN)
    beat.stop()
    beat.between()
    assert shown().phase is Phase.OUTSIDE


def test_a_compilation_in_a_step_is_no_part_of_it(beat, pulse, shown, clock):
    import torch._dynamo
    from torch._dynamo.callback import callback_handler

    beat.start(0)
    beat.end_step()
    beat.begin_step()
    seen = []

    def backend(graph, _):
        seen.append(shown().phase)
        clock.sleep(100)
        return graph.forward

    torch.compile(nn.Linear(2, 1), backend=backend)(torch.ones(2))
    assert seen == [Phase.COMPILING]
    clock.sleep(1)
    beat.end_step()
    assert shown().step_seconds == (1.0,)
    registered = len(callback_handler.start_callbacks)
    beat.stop()
    assert len(callback_handler.start_callbacks) == registered - 1


def test_a_loop_that_shows_its_own_progress_is_left_to_it(beat, pulse, shown):
    pulse.is_reported_by_script = True
    pulse.enter(Phase.EVALUATING)
    for one in (lambda: beat.start(3), beat.begin_step, beat.end_step, beat.between, beat.stop):
        one()
        assert (shown().phase, shown().step) == (Phase.EVALUATING, -1)


@pytest.fixture
def own(monkeypatch):
    """This process's pulse, anew."""
    monkeypatch.setattr("resilient.distributed.heartbeat._own_reporter", [])
    return progress_reporter()


def train(model, optimizer):
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_a_checkpointer_shows_the_steps_of_its_first_optimizer(tmp_path, own):
    model = nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with Checkpointer(tmp_path / "repo", model=model, first=first, second=second) as checkpointer:
        checkpointer.resume()
        assert own.phase is Phase.FIRST
        train(model, first)
        train(model, second)
        assert (own.phase, own._step) == (Phase.BETWEEN, 1)
        checkpointer.save(1)
        train(model, first)
    assert (own.phase, own._step) == (Phase.OUTSIDE, 2)
    train(model, first)
    assert own._step == 2
    with Checkpointer(tmp_path / "repo", model=model, first=first, second=second) as checkpointer:
        assert checkpointer.resume() == 1
        train(model, first)
        assert own._step == 2


def test_heartbeats_of_the_loop_are_the_only_ones(tmp_path, own):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "repo", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        train(model, optimizer)
        heartbeat(50)
        train(model, optimizer)
        assert (own.phase, own._step) == (Phase.STEP, 50)


def test_without_an_optimizer_nothing_is_shown(tmp_path, own):
    with Checkpointer(tmp_path / "repo", model=nn.Linear(2, 1)) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
        assert checkpointer.beat is None
        assert own.phase is Phase.OUTSIDE
