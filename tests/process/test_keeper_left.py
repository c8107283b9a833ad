"""A keeper that is not done when the time of a stop is over."""

from __future__ import annotations

import os
import signal
import time

import pytest

from resilient.elastic.options import DaemonOptions
from resilient.elastic.saver_daemon import DaemonAbandoned, DaemonSupervisor
from tests.helpers.agent_harness import is_alive


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_a_keeper_that_is_not_done_in_time_goes_on_alone_and_is_told(tmp_path):
    told = []
    keeping = DaemonSupervisor(tmp_path, DaemonOptions(host_bytes_max=1 << 20), 60.0, told.append)
    keeping.start()
    keeping.ready()
    pid = keeping.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began_seconds = time.monotonic()
        keeping.stop(0.2)
        assert time.monotonic() - began_seconds < 30
        assert told == [DaemonAbandoned(pid, 60.0)]
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
