"""A process that steps back takes nobody else along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
SCRIPT = """
import os
from resilient.checkpoint.daemon.server import lower_own_priority
before = open("/proc/self/autogroup").read()
lower_own_priority()
print(os.nice(0), before == open("/proc/self/autogroup").read())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no automatic groups")
@pytest.mark.parametrize("is_own", [False, True])
def test_a_keeper_lowers_its_own_session_and_no_other(is_own):
    before = AUTOGROUP.read_text()
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        start_new_session=is_own,
    ).stdout.split()
    assert int(told[0]) == min(os.nice(0) + 10, 19)
    assert told[1] == str(not is_own)
    assert AUTOGROUP.read_text() == before
