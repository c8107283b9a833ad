"""``resilient``, and ``python -m resilient_cli``."""

from __future__ import annotations

import sys

from resilient_cli import early


def main() -> int:
    """Listen for signals before anything takes time, then run the program."""
    early.listen(sys.argv[1:])
    from resilient_cli import app

    return app.main()


if __name__ == "__main__":
    sys.exit(main())
