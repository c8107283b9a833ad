"""All ranks of a run killed at one step, once the save before it is there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store


def see_landed(folder, step):
    """Wait for a checkpoint of ``step`` or later, so that each life leaves one, however slow."""
    store = open_store(str(folder))
    while max((one.step for one in committed(store)), default=0) < step:
        time.sleep(0.01)


def die_together(folder, step, save_steps):
    """Die as SIGKILL does at ``step``, when every rank is there and none waits for another."""
    see_landed(folder, (step - 1) // save_steps * save_steps)
    there = Path(f"{folder}-dying-at-{step}")
    there.mkdir(exist_ok=True)
    (there / os.environ["RANK"]).touch()
    while len(list(there.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
