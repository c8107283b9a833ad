"""What a data loader's process makes of signals: a stop that is asked of everyone is not its own.

A scheduler or a terminal often signals all processes of a job. The step that is under way still
needs its samples, so the loader's processes stay until the trainer ends them.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
from multiprocessing import util as _first  # noqa: F401 - its exit handler must run after ours
from typing import Any

_trainer_pid = os.getpid()
# Shared with what we fork. A handler cannot see who sent a signal, so the trainer says here
# that it is leaving: then the SIGTERM is its own, sent once, and it waits for it to work.
_is_leaving = mmap.mmap(-1, 1)


def claim_workers() -> None:
    """Make the DataLoader workers that this process starts its own.

    A warm worker of the agent was forked after this module was imported: the process that
    imported it is not the trainer, and the mark of leaving would be shared by all ranks.
    """
    global _trainer_pid, _is_leaving
    if os.getpid() != _trainer_pid:
        _trainer_pid, _is_leaving = os.getpid(), mmap.mmap(-1, 1)


def outlive_a_request(_worker: int) -> None:
    """Ignore interrupts, and the first SIGTERM unless the trainer is leaving.

    Processes that were not forked from the trainer cannot see that, so they obey SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() == _trainer_pid:
        signal.signal(signal.SIGTERM, _outlive)


def _outlive(number: int, _frame: Any) -> None:
    _end_with_the_trainer()
    signal.signal(number, _obey)


def _obey(number: int, _frame: Any) -> None:
    _end_with_the_trainer()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_with_the_trainer() -> None:
    """End in good order if the trainer is leaving.

    To die of the signal would be an error to torch, which looks at its loaders whenever a child
    of the trainer ends and raises there, in the middle of the interpreter's end.
    """
    if _is_leaving[0]:
        os._exit(os.EX_OK)


@atexit.register
def _leave() -> None:
    if os.getpid() == _trainer_pid:
        _is_leaving[0] = 1
