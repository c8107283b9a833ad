"""Crash states by the million: ``python -m tests.crash --states 10000000 --seed 1 --kills 2000``.

Says how far it is, prints for every violation what makes it again, and writes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from figures import Figures  # noqa: E402 - the folder is on the path only now
from objects import IMPATIENT, PATIENT, several, singles, sweep_cases  # noqa: E402
from sweep import sweep_history  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

HISTORIES_PER_TASK = 16
CASES_PER_TASK = 100
SEEDS_APART = 1_000_000
SAY_EVERY_SECONDS = 10


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--states", type=int, default=100_000, help="distinct crash states")
    parser.add_argument("--seed", type=int, default=1, help="draws histories and troubles")
    parser.add_argument("--kills", type=int, default=0, help="real processes to kill")
    parser.add_argument("--objects", type=int, default=2000, help="drawn troubles of a store")
    parser.add_argument("--seconds", type=float, default=0.0, help="for each phase; 0: no end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--only", type=int, help="one history by its seed")
    return parser.parse_args(arguments)


def sweep_histories(first: int) -> Figures:
    """Return what some histories showed, one after the other."""
    figures = Figures()
    for seed in range(first, first + HISTORIES_PER_TASK):
        figures.add(sweep_history(seed))
    return figures


def tasks(given: argparse.Namespace) -> Iterator[tuple]:
    """Return calls: histories without end, and among them the object store's, which are counted."""
    cases = [*singles(PATIENT), *singles(IMPATIENT), *several(given.seed, given.objects)]
    for number in count():
        yield sweep_histories, given.seed * SEEDS_APART + number * HISTORIES_PER_TASK
        some = cases[number * CASES_PER_TASK : (number + 1) * CASES_PER_TASK]
        if some:
            yield sweep_cases, some


def sweep_all(given: argparse.Namespace) -> Figures:
    """Run tasks in all processes until there are enough states, or the time is over."""
    figures, began, said = Figures(), time.monotonic(), 0.0
    coming, running = tasks(given), set[Future]()
    with ProcessPoolExecutor(given.jobs) as pool:
        while True:
            spent = time.monotonic() - began
            enough = figures.states >= given.states or 0 < given.seconds < spent
            while not enough and len(running) < 2 * given.jobs:
                running.add(pool.submit(*next(coming)))
            if not running:
                return figures
            done, running = wait(running, timeout=SAY_EVERY_SECONDS, return_when=FIRST_COMPLETED)
            for one in done:
                figures.add(one.result())
            if spent - said > SAY_EVERY_SECONDS or enough:
                said = spent
                tell(figures, given.states, spent)


def tell(figures: Figures, states: int, spent: float) -> None:
    rate = figures.states / max(spent, 1e-9)
    sys.stderr.write(
        f"\r{figures.states:,} of {states:,} states, {figures.violated} violations, "
        f"{rate:,.0f}/s, {spent:.0f} s "
    )
    sys.stderr.flush()


def kill(given: argparse.Namespace) -> dict:
    """Kill real processes, in a process of its own that has torch."""
    command = [sys.executable, str(HERE / "kills.py")]
    command += ["--cycles", str(given.kills), "--seed", str(given.seed)]
    command += ["--seconds", str(given.seconds)]
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit("no process could be killed")
    return json.loads(done.stdout)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    if given.only is not None:
        figures = sweep_history(given.only)
        sys.stdout.write(json.dumps(asdict(figures), indent=1) + "\n")
        return 1 if figures.violations else 0
    began = time.monotonic()
    figures = sweep_all(given)
    report = {"seed": given.seed, "states": figures.states, **asdict(figures)}
    report["seconds"] = round(time.monotonic() - began, 1)
    report["kills"] = kill(given) if given.kills else None
    text = json.dumps(report, indent=1)
    sys.stdout.write(f"\n{text}\n")
    if given.report:
        given.report.write_text(text + "\n")
    for one in figures.violations:
        seed = one.removeprefix("seed ").partition(",")[0]
        again = f"python -m tests.crash --only {seed}" if one.startswith("seed ") else one
        sys.stderr.write(f"{one}\n  again: {again}\n")
    broken = figures.violations or (report["kills"] or {}).get("violations")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
