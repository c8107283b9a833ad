"""Simulate many seeds: ``python -m tests.simulation --seeds 10000 --from 0 --broken fence``.

Prints each violation with the command that makes it again. Ends with 1 if there was one, and with
``--broken`` the other way round: a defect that no seed finds is the failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.breakages import BREAKAGES, SIGNS
from tests.simulation.many import verdicts


def main() -> int:
    """Simulate, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--broken", choices=sorted(BREAKAGES), default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    began_seconds = time.monotonic()
    bad, done, commits, lives = 0, 0, 0, 0
    for verdict in verdicts(asked.first, asked.seeds, asked.broken, asked.workers):
        done, commits, lives = done + 1, commits + verdict.commits, lives + verdict.lives
        for violation in verdict.violations:
            sys.stdout.write(f"seed {verdict.seed}: {violation}\n")
        if verdict.violations:
            bad += 1
            again = f"--seeds 1 --from {verdict.seed}" + f" --broken {asked.broken}" * bool(
                asked.broken
            )
            sys.stdout.write(f"  again: python -m tests.simulation {again}\n")
        if asked.broken and any(SIGNS[asked.broken] in one for one in verdict.violations):
            break
    seconds = time.monotonic() - began_seconds
    told = f"{done} seeds, {lives} lives, {commits} commits, {bad} with violations"
    sys.stdout.write(f"{told}, {seconds:.0f} s\n")
    return int((bad == 0) if asked.broken else (bad > 0))


if __name__ == "__main__":
    raise SystemExit(main())
