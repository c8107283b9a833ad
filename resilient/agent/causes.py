"""Why a worker failed, as one word that machines count and people understand."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """What was behind a failure."""

    EXIT = "exit"
    """It ended with a code of its own."""
    SIGNAL = "signal"
    """A signal killed it, and nothing says who sent it."""
    HANG = "hang"
    """It made no progress within its deadline."""
