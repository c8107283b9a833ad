"""The exit code of a process in whose threads a library still waits for an answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The store's connection is refused until its time is up, which comes while the interpreter goes
# down: what it keeps to the last sleeps there.
PROGRAM = """
import sys, threading, time
from resilient_cli import app
from resilient_cli.process_exit import ExitGuard

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(6)

def ask():
    from torch.distributed import TCPStore
    began.set()
    TCPStore("127.0.0.1", 1, timeout=__import__("datetime").timedelta(seconds=1))

began = threading.Event()
if "watched" in sys.argv:
    ending = ExitGuard()
threading.Thread(target=ask, daemon=True).start()
assert began.wait(60)
print("said to the end", end="")
if "watched" in sys.argv:
    ending.status = 75
sys.slow = Slow()
sys.exit(75)
"""


@pytest.mark.smoke
@pytest.mark.parametrize(("how", "status"), [("watched", 75), ("not", -6)])
def test_it_stays_what_was_decided(how, status):
    words = [sys.executable, "-c", PROGRAM, how]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "said to the end"
