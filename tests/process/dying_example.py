"""An example whose second rank dies once: ``dying_example.py EXAMPLE FOLDER STEPS DIE_AT``.

With DIE_AT 0 nobody dies. Its launcher starts the group again.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

from resilient import TrainerCallback
from resilient.checkpoint.catalog import committed
from resilient.storage.local import LocalStore


class DiesOnce(TrainerCallback):
    """Kills the process of rank 1 where it is told to, when there is something to go on from."""

    def __init__(self, folder, die_at) -> None:
        self._folder, self._die_at = Path(folder), die_at

    def on_step_begin(self, args, state, control, /, **_):
        died = self._folder / "died"
        if args.process_index != 1 or state.global_step != self._die_at or died.exists():
            return
        while not committed(LocalStore(self._folder)):
            time.sleep(0.01)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(example, folder, steps, die_at):
    spec = importlib.util.spec_from_file_location("example", example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = module.build

    def with_death(*given):
        trainer = build(*given)
        if int(die_at):
            trainer.add_callback(DiesOnce(folder, int(die_at)))
        return trainer

    module.build = with_death
    module.main(folder, int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
