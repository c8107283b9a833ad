"""What a pulse shows, and how it is read."""

import os
import signal

import pytest

from resilient.clock import SystemClock
from resilient.distributed import heartbeat
from resilient.distributed.heartbeat import (
    Phase,
    ProgressReporter,
    progress_path,
    progress_reporter,
    read_progress,
    stacks_path,
)
from tests.helpers.clocks import OwnClock


@pytest.fixture
def clock():
    return OwnClock()


@pytest.fixture
def shown(tmp_path, clock):
    return ProgressReporter(tmp_path / "p", clock), lambda: read_progress(tmp_path / "p")


def step(one, clock, number, *, loading=0.0, own=0.0, waiting=0.0):
    one.begin_step()
    with one.during(Phase.LOADING):
        clock.sleep(loading)
    clock.sleep(own)
    one.need_others()
    clock.sleep(waiting)
    one.end_step(number)


def test_nothing_is_shown_where_there_is_no_file(tmp_path):
    assert read_progress(tmp_path / "p") is None
    (tmp_path / "p").write_bytes(b"short")
    assert read_progress(tmp_path / "p") is None


def test_a_new_pulse_is_outside_of_training(shown, clock):
    signs = shown[1]()
    assert (signs.step, signs.phase, signs.since_seconds) == (-1, Phase.OUTSIDE, 1000.0)


def test_the_first_step_is_no_measure(shown, clock):
    one, signs = shown
    one.enter(Phase.FIRST)
    step(one, clock, 1, own=50.0)
    assert signs().step_seconds == ()
    assert signs().longest_seconds[Phase.FIRST] == 50.0
    step(one, clock, 2, own=1.0)
    assert signs().step_seconds == (1.0,)


def test_loading_and_what_is_between_steps_are_no_part_of_a_step(shown, clock):
    one, signs = shown
    one.enter(Phase.FIRST)
    step(one, clock, 1)
    clock.sleep(7.0)
    with one.during(Phase.SAVING):
        clock.sleep(30.0)
    step(one, clock, 2, loading=5.0, own=1.0, waiting=2.0)
    found = signs()
    assert found.step == 2
    assert found.phase is Phase.BETWEEN
    assert found.step_seconds == (3.0,)
    assert found.own_seconds == (6.0,)
    assert found.longest_seconds[Phase.SAVING] == 30.0
    assert found.longest_seconds[Phase.LOADING] == 5.0


def test_what_a_rank_took_by_itself_is_not_known_where_nobody_said_so(shown, clock):
    one, signs = shown
    one.enter(Phase.FIRST)
    one.end_step(1)
    one.begin_step()
    clock.sleep(1.0)
    one.end_step(2)
    assert signs().own_seconds == ()


def test_every_sign_is_a_new_moment(shown, clock):
    one, signs = shown
    one.enter(Phase.EVALUATING)
    clock.sleep(9.0)
    one.again()
    assert (signs().phase, signs().since_seconds) == (Phase.EVALUATING, 1009.0)


def test_outside_of_training_nothing_puts_a_rank_inside(shown):
    one, signs = shown
    with one.during(Phase.EVALUATING):
        assert signs().phase is Phase.OUTSIDE


def test_only_recent_steps_are_remembered(shown, clock):
    one, signs = shown
    one.enter(Phase.FIRST)
    one.end_step(0)
    for number in range(heartbeat.RECENT_STEPS + 3):
        step(one, clock, number, own=float(number))
    assert sorted(signs().step_seconds) == [float(n) for n in range(3, heartbeat.RECENT_STEPS + 3)]


def beat_for_ever(path):
    one, number = ProgressReporter(path, SystemClock()), 0
    while True:
        number += 1
        one.end_step(number)
        one.begin_step()


def test_a_reader_never_sees_a_torn_sign(tmp_path):
    path = tmp_path / "p"
    ProgressReporter(path, SystemClock())
    if not (child := os.fork()):
        beat_for_ever(path)
    try:
        # The child replaces the file once, before its first step.
        while (first := read_progress(path)) is None or first.step < 0:
            pass
        seen = [read_progress(path) for _ in range(5000)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    steps = [signs.step for signs in seen]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


@pytest.mark.parametrize("kept", [0, 1, 8, 20, 40])
def test_a_half_written_head_leaves_the_progress_before_it(tmp_path, clock, kept):
    path = tmp_path / "p"
    one = ProgressReporter(path, clock)
    one.end_step(3)
    before = path.read_bytes()
    one.end_step(4)
    after = path.read_bytes()
    size = heartbeat._HEAD.size
    at = next(at for at in (0, size) if before[at : at + size] != after[at : at + size])
    # The interpreter zeroes the place before it writes the values in order.
    torn = after[at : at + kept].ljust(size, b"\0")
    path.write_bytes(after[:at] + torn + after[at + size :])
    assert read_progress(path).step == 3
    path.write_bytes(after)
    assert read_progress(path).step == 4


def test_a_pulse_replaces_one_that_somebody_still_has_open(tmp_path, clock):
    old = ProgressReporter(tmp_path / "p", clock)
    ProgressReporter(tmp_path / "p", clock).enter(Phase.STEP)
    old.enter(Phase.SAVING)
    assert read_progress(tmp_path / "p").phase is Phase.STEP


def test_under_an_agent_a_process_shows_its_pulse_and_who_may_be_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_own_reporter", [])
    registered = []
    monkeypatch.setattr(
        heartbeat.faulthandler, "register", lambda *a, **k: registered.append((a, k))
    )
    monkeypatch.setenv("RESILIENT_NOTES", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    heartbeat.heartbeat(3)
    assert progress_reporter() is progress_reporter()
    signs = read_progress(progress_path(str(tmp_path), 0))
    assert (signs.step, signs.phase) == (3, Phase.STEP)
    heartbeat.heartbeat()
    assert read_progress(progress_path(str(tmp_path), 0)).phase is Phase.BETWEEN
    assert stacks_path(str(tmp_path), 0).read_text() == f"{os.getpid()}\n"
    assert len(registered) == 1
    os.close(registered[0][1]["file"])


@pytest.mark.parametrize("notes", ["", "/nowhere/at/all"])
def test_without_an_agent_a_pulse_costs_nothing_and_fails_never(notes, monkeypatch):
    monkeypatch.setattr(heartbeat, "_own_reporter", [])
    monkeypatch.setenv("RESILIENT_NOTES", notes)
    heartbeat.heartbeat(1)
    heartbeat.heartbeat()
    assert progress_reporter().phase is Phase.BETWEEN
