"""Statuses and commands in the words of a person or a shell (pure)."""

from __future__ import annotations

import signal

SIGNAL_BASE = 128
"""What a shell adds to the number of the signal that ended a program."""


def name_command(resume: str) -> str:
    """Return what a person types so that a run goes on that was started with ``--resume``.

    The wish holds at each start of the command: nothing tells a job that is requeued from one
    that is started over on purpose.
    """
    return "the same command" + (f" without --resume {resume}" if resume != "auto" else "")


def exit_code(status: int) -> int:
    """Return a worker's status as a shell would: its code, or 128 plus the signal's number."""
    return SIGNAL_BASE - status if status < 0 else status


def name_of(status: int) -> str:
    """Return a worker's status for a person: ``exit code 7`` or ``SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
