"""How a script ends that no agent of ours runs: with our errors' own exit codes.

Under `resilient train` the worker's bootstrap does the same.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resilient.errors import Preempted, ResilientError
from resilient.lines import say_error

if TYPE_CHECKING:
    from types import TracebackType


def end_with_exit_codes() -> None:
    """Let an error of ours that nobody catches end this process with its exit code.

    Other errors go to the hook that was there; called again, it changes nothing.
    """
    before = sys.excepthook
    if getattr(before, "is_ours", False):
        return

    def report(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if not isinstance(error, Preempted):
            before(kind, error, frames)
        if not isinstance(error, ResilientError):
            return
        say_error(error)
        # Of all that a hook may raise, this alone decides how the interpreter ends.
        raise SystemExit(error.exit_code)

    report.is_ours = True  # type: ignore[attr-defined]
    sys.excepthook = report
