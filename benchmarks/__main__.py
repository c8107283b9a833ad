"""Command line of the benchmarks: ``python -m benchmarks NAME [--rounds N] [--json]``.

Without a name, the command lists the benchmarks. With ``--json`` it prints one JSON line; otherwise
it prints a table before that line.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "harness", "stalls")
)


def main() -> int:
    """Run one benchmark and write its report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--rounds", type=int, help="rounds of every contender")
    options = parser.parse_args()
    if options.name is None:
        for name in NAMES:
            about = (import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
            print(f"{name:8} {about}")
        return 0
    benchmark = import_module(f"benchmarks.{options.name}")
    report = benchmark.run(options.rounds or benchmark.ROUNDS)
    if not options.json:
        for name, value in {**report.ratios, **report.figures}.items():
            print(f"{name:32} {value}")
    print(json.dumps(report.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
