"""Simulate many seeds of hosts: ``python -m tests.simulation.hosts --seeds 2000 --broken room``.

Prints each violation with the command that makes it again. Ends with 1 if there was one, and with
``--broken`` the other way round: a defect that no seed finds is the failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.hosts.breakages import FOUND, HOST_BREAKAGES
from tests.simulation.hosts.many import host_verdicts


def main() -> int:
    """Simulate, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.hosts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--broken", choices=sorted(HOST_BREAKAGES), default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--found", action="store_true", help="only seeds that find the defect")
    parser.add_argument("--list", action="store_true", help="name the defects and leave")
    asked = parser.parse_args()
    if asked.list:
        sys.stdout.write("".join(f"{name}\n" for name in HOST_BREAKAGES))
        return 0
    if asked.found and asked.broken:
        asked.first = FOUND[asked.broken][0]
    began_seconds = time.monotonic()
    done = bad = lives = strikes = 0
    for verdict in host_verdicts(asked.first, asked.seeds, asked.broken, asked.workers):
        done, lives = done + 1, lives + verdict.lives
        strikes, bad = strikes + len(verdict.strikes) - 1, bad + bool(verdict.violations)
        for violation in verdict.violations:
            sys.stdout.write(f"seed {verdict.seed}: {violation}\n")
        if verdict.violations:
            broken = f" --broken {asked.broken}" * bool(asked.broken)
            command = f"--seeds 1 --from {verdict.seed}{broken}"
            sys.stdout.write(f"  again: python -m tests.simulation.hosts {command}\n")
    seconds = time.monotonic() - began_seconds
    told = f"{done} seeds, {strikes} strikes, {lives} lives, {bad} with violations"
    sys.stdout.write(f"{told}, {seconds:.0f} s\n")
    return int((bad == 0) if asked.broken else (bad > 0))


if __name__ == "__main__":
    raise SystemExit(main())
