"""An agent that was suspended together with its ranks holds nothing of that time against them."""

import os

import pytest

from resilient.distributed.heartbeat import Phase, ProgressRecord, ProgressReporter, progress_path
from resilient.elastic.hang_detection import HangRule
from resilient.elastic.health_monitor import HealthMonitor
from resilient.elastic.suspend_detection import (
    AWAY_SECONDS,
    SuspendCorrectedProgress,
    SuspendDetector,
)
from resilient.events import Emitter
from tests.helpers.clocks import OwnClock

FLOOR_SECONDS, PATIENCE_SECONDS = 10.0, 30.0
AWAY = 500.0
LOOK = 0.25


class Host:
    """An agent's view of one rank, whose signs and state the test sets."""

    def __init__(self, folder, clock, monkeypatch):
        self.clock, self.state, self.told = clock, "S", []
        emit = Emitter(clock, (lambda _, event: self.told.append(event),))
        rule = HangRule(fixed_seconds=FLOOR_SECONDS, patience_seconds=PATIENCE_SECONDS)
        self.health = HealthMonitor(folder, rule, clock, emit)
        self.health.begin({0: 0})
        self.pulse = ProgressReporter(progress_path(str(folder), 0), clock)
        monkeypatch.setattr("resilient.elastic.health_monitor.state_of", lambda _: self.state)

    def look(self, for_seconds=0.0):
        """Look as an agent does for so long; return the first hang that it finds."""
        for _ in range(int(for_seconds / LOOK) + 1):
            self.clock.seconds += LOOK
            hang = self.health.look({0: os.getpid()}, [0])
            if hang is not None:
                return hang
        return None

    def in_step(self):
        self.pulse.enter(Phase.FIRST)
        self.pulse.end_step(1)
        self.pulse.begin_step()

    def tells_of(self, name):
        return [one for one in self.told if type(one).__name__ == name]


@pytest.fixture
def host(tmp_path, monkeypatch):
    return Host(tmp_path, OwnClock(), monkeypatch)


def test_a_suspension_is_held_against_no_rank_and_told(host):
    host.in_step()
    assert host.look(for_seconds=FLOOR_SECONDS / 2) is None
    host.clock.seconds += AWAY
    assert host.look() is None
    (away,) = host.tells_of("AgentSuspended")
    assert away.seconds == pytest.approx(AWAY + LOOK)
    assert host.look(for_seconds=FLOOR_SECONDS / 2 - 2 * LOOK) is None


def test_a_rank_that_hangs_after_a_suspension_is_found_when_its_own_time_is_over(host):
    host.in_step()
    assert host.look(for_seconds=FLOOR_SECONDS / 2) is None
    host.clock.seconds += AWAY
    began_seconds = host.clock.seconds
    hang = host.look(for_seconds=FLOOR_SECONDS)
    assert host.clock.seconds - began_seconds == pytest.approx(FLOOR_SECONDS / 2, abs=4 * LOOK)
    assert hang.first.waited_seconds == pytest.approx(FLOOR_SECONDS, abs=2 * LOOK)


def test_a_rank_that_stays_stopped_has_its_deadline_from_the_end_of_a_suspension(host):
    host.in_step()
    host.state = "T"
    assert host.look(for_seconds=1) is None
    host.clock.seconds += AWAY
    assert host.look(for_seconds=FLOOR_SECONDS - 2) is None
    assert host.look(for_seconds=2).first.state == "T"


def test_a_slow_start_may_be_suspended_too(tmp_path, monkeypatch):
    clock = OwnClock()
    host = Host(tmp_path, clock, monkeypatch)
    host.health.begin({0: 0, 1: 1})
    ProgressReporter(progress_path(str(tmp_path), 0), clock)
    pids = {0: os.getpid(), 1: os.getpid()}
    host.clock.seconds += 1
    assert host.health.look(pids, [0, 1]) is None
    host.clock.seconds += AWAY
    assert host.health.look(pids, [0, 1]) is None
    for _ in range(int(PATIENCE_SECONDS)):
        host.clock.seconds += 1
        hang = host.health.look(pids, [0, 1])
    assert (hang.first.rank, hang.first.activity) == (1, "starting")
    assert hang.first.waited_seconds == pytest.approx(PATIENCE_SECONDS, abs=3)


def test_the_end_of_others_is_no_longer_ago_than_this_host_ran(tmp_path, monkeypatch):
    host = Host(tmp_path, OwnClock(), monkeypatch)
    host.health.begin({0: 0, 1: 1})
    host.pulse = ProgressReporter(progress_path(str(tmp_path), 0), host.clock)
    host.in_step()
    host.pulse.enter(Phase.OUTSIDE)
    assert host.look(for_seconds=1) is None
    host.clock.seconds += AWAY
    assert host.look(for_seconds=PATIENCE_SECONDS - 3) is None
    assert host.look(for_seconds=3).first.activity == "ending"


def test_what_a_suspension_made_long_is_not_learned(host):
    host.in_step()
    host.look(for_seconds=1)
    host.clock.seconds += AWAY
    host.pulse.end_step(2)
    host.pulse.begin_step()
    assert host.look() is None
    assert host.health.look({0: os.getpid()}, [0]) is None
    learned = host.health._learned_deadlines.longest_seconds[Phase.STEP]
    assert learned < 5
    # A step that really took longer than any is.
    host.look(for_seconds=FLOOR_SECONDS - 1)
    host.clock.seconds += 0.5
    host.pulse.end_step(3)
    host.look()
    host.pulse.begin_step()
    host.look(for_seconds=1)
    assert host.health._learned_deadlines.longest_seconds[Phase.STEP] == learned


def test_a_longer_one_that_nobody_missed_counts_again():
    corrected = SuspendCorrectedProgress(SuspendDetector())
    assert longest_of(corrected, 0.0, since=1.0) == 0.0
    assert longest_of(corrected, 100.0, since=101.0, away=99.0) == pytest.approx(1.0)
    assert longest_of(corrected, 100.0, since=102.0) == pytest.approx(1.0)
    assert longest_of(corrected, 120.0, since=222.0) == 120.0


def longest_of(corrected, seconds, *, since, away=0.0):
    longest = tuple(seconds if one is Phase.STEP else 0.0 for one in Phase)
    shown = ProgressRecord(3, Phase.STEP, since, longest, ())
    return corrected.corrected(0, shown, away).longest_seconds[Phase.STEP]


def test_what_passes_inside_a_look_is_no_absence():
    sight = SuspendDetector()
    sight.begin(0.0)
    assert sight.open(0.25) == 0.0
    sight.close(60.0)
    assert sight.open(60.25) == 0.0
    assert sight.shifted(0.0) == 0.0


def test_a_moment_is_later_by_what_was_missed_since():
    sight = SuspendDetector()
    sight.begin(0.0)
    assert sight.open(AWAY_SECONDS) == 0.0
    assert sight.open(100.0) == 100.0 - AWAY_SECONDS
    sight.close(101.0)
    assert sight.open(201.0) == 100.0
    assert sight.shifted(0.0) == 0.0 + 98.0 + 100.0
    assert sight.shifted(50.0) == 50.0 + 50.0 + 100.0
    assert sight.shifted(150.0) == 150.0 + 51.0
    assert sight.shifted(201.0) == 201.0


def test_only_so_many_absences_are_kept():
    sight = SuspendDetector()
    sight.begin(0.0)
    for number in range(1, 1000):
        sight.open(10.0 * number)
    assert len(sight._gaps) <= 64
    assert sight.shifted(9985.0) == 9990.0
