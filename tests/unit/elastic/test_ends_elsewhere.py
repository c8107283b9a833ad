"""A rank that does not end although those of another host have."""

import os

from resilient.distributed.heartbeat import Phase, ProgressReporter, progress_path
from resilient.elastic.hang_detection import HangRule
from resilient.elastic.health_monitor import HealthMonitor
from resilient.events import Emitter
from tests.helpers.clocks import OwnClock

PATIENCE_SECONDS = 10.0


class Elsewhere:
    """Whether another host is done, and how often it was asked."""

    def __init__(self):
        self.is_over, self.asked = False, 0

    def __call__(self):
        self.asked += 1
        return self.is_over


def test_other_hosts_are_asked_late_and_a_rank_has_its_patience_from_then_on(tmp_path):
    clock, elsewhere = OwnClock(), Elsewhere()
    health = HealthMonitor(
        tmp_path, HangRule(patience_seconds=PATIENCE_SECONDS), clock, Emitter(clock)
    )
    health.begin({0: 4})
    pulse = ProgressReporter(progress_path(str(tmp_path), 0), clock)

    def look(later_seconds):
        for _ in range(int(later_seconds) - 1):
            clock.seconds += 1
            assert health.look({0: os.getpid()}, [4], elsewhere) is None
        clock.seconds += 1
        return health.look({0: os.getpid()}, [4], elsewhere)

    pulse.enter(Phase.FIRST)
    pulse.end_step(3)
    assert look(1) is None
    pulse.enter(Phase.OUTSIDE)
    assert look(PATIENCE_SECONDS - 1) is None
    assert elsewhere.asked == 0
    assert look(2) is None
    assert elsewhere.asked == 1
    # The others may have worked as long as this one: it has its patience from here on.
    elsewhere.is_over = True
    assert look(1) is None
    assert look(PATIENCE_SECONDS) is None
    hang = look(1)
    assert (hang.first.rank, hang.first.activity) == (4, "ending")
    assert elsewhere.asked == 2
