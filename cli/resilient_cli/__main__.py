"""``python -m resilient_cli``."""

from __future__ import annotations

import sys

from resilient_cli.app import main

if __name__ == "__main__":
    sys.exit(main())
