"""A trainer that is killed while its state is streamed: ``streaming_trainer.py KEEPER REPOSITORY``.

It saves step 1 whole, and dies by SIGKILL in the middle of step 2, when two of its files are
in the keeper's hands.
"""

from __future__ import annotations

import os
import signal
import sys

from resilient.checkpoint.daemon import connection
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.engine_factory import open_engine
from tests.process.test_keeper_streams import parts_of, state


def main(keeper: str, repository: str) -> None:
    checkpointer = open_engine(repository, keeper=DaemonAddress(keeper))
    checkpointer.resume({})
    checkpointer.save(1, parts_of(state(1)), CheckpointInfo())
    checkpointer.wait()
    copy, copied = connection._fill, []

    def copy_and_die(file, slot):
        if len(copied) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        copy(file, slot)
        copied.append(file)

    connection._fill = copy_and_die
    checkpointer.save(2, parts_of(state(2)), CheckpointInfo())


if __name__ == "__main__":
    main(*sys.argv[1:])
