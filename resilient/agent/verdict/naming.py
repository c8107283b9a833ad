"""Statuses and commands in the words of a person or a shell (pure)."""

from __future__ import annotations

import signal

SIGNAL_BASE = 128
"""What a shell adds to the number of the signal that ended a program."""


def name_command(resume: str) -> str:
    """Return the command that a person types to continue a run that ``--resume`` began.

    Only a scheduler's requeue continues with the same command. A start by hand obeys the wish.
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
