"""Entry point of ``resilient`` and ``python -m resilient_cli``."""

from __future__ import annotations

import sys


def main() -> int:
    """Record early signals of ``train``, then run the program and return its exit code."""
    if "train" in sys.argv:
        from resilient_cli import process_exit

        process_exit.record_early_signals(sys.argv[1:])
    from resilient_cli.process_exit import ExitGuard

    exit_guard = ExitGuard()
    from resilient_cli import app

    exit_guard.status = app.main()
    return exit_guard.status


if __name__ == "__main__":
    sys.exit(main())
