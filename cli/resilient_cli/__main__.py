"""``resilient``, and ``python -m resilient_cli``."""

from __future__ import annotations

import sys


def main() -> int:
    """Listen for signals before anything takes time, then run the program."""
    if "train" in sys.argv:
        from resilient_cli import early

        early.listen(sys.argv[1:])
    from resilient_cli.leaving import Ending

    ending = Ending()
    from resilient_cli import app

    ending.status = app.main()
    return ending.status


if __name__ == "__main__":
    sys.exit(main())
