"""Crash states by the million: ``python -m tests.crash --states 10000000 --seed 1 --kills 2000``.

Says how far it is, prints for every violation what makes it again, and writes the figures. With
``--report`` it is done in parts that add up: the same command again goes on where it was stopped.
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
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent

from tests.crash.figures import Figures  # noqa: E402 - the folder is on the path only now
from tests.crash.objects import IMPATIENT, PATIENT, several, singles, sweep_cases  # noqa: E402
from tests.crash.parts import Report, resumed  # noqa: E402
from tests.crash.remembering import remembering  # noqa: E402
from tests.crash.sweep import Depth, sweep_history  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HISTORIES_PER_PART = 16
CASES_PER_PART = 100
RARELY = 5
"""A part of requests after so many of histories, and that share of requests that are many."""
KILLS_PER_PART = 100
SEEDS_APART = 1_000_000
SAY_EVERY_SECONDS = 10


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--states", type=int, default=100_000, help="moments and what is left then")
    parser.add_argument("--seed", type=int, default=1, help="draws histories and troubles")
    parser.add_argument("--kills", type=int, default=0, help="real processes that die")
    parser.add_argument("--objects", type=int, default=2000, help="drawn troubles of a store")
    parser.add_argument("--seconds", type=float, default=0.0, help="for each phase; 0: no end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, help="where the figures go, and what was done")
    parser.add_argument("--only", type=int, help="one history by its seed")
    return parser.parse_args(arguments)


def timed(sweep: Callable[[], Figures]) -> tuple[Figures, float]:
    """Return figures, and the processor time that they took."""
    began = time.process_time()
    with remembering():
        figures = sweep()
    return figures, time.process_time() - began


def sweep_histories(first: int) -> tuple[Figures, float]:
    """Return what some histories showed, one after the other."""

    def sweep() -> Figures:
        figures = Figures()
        for seed in range(first, first + HISTORIES_PER_PART):
            figures.add(sweep_history(seed, Depth.deep()))
        return figures

    return timed(sweep)


def sweep_some(cases: list) -> tuple[Figures, float]:
    """Return what some runs against an object store showed."""
    return timed(lambda: sweep_cases(cases))


def parts(given: argparse.Namespace) -> Iterator[tuple]:
    """Return named calls: histories without end, and among them the object store's, counted."""
    cases = [*singles(PATIENT), *singles(IMPATIENT), *several(given.seed, given.objects)]
    for patience, kind in product((PATIENT, IMPATIENT), ("parity", "tiers")):
        # They ask many times for what the plain ones ask for, too.
        cases += singles(patience, kind=kind)[given.seed % RARELY :: RARELY]
    for number in count():
        first = given.seed * SEEDS_APART + number * HISTORIES_PER_PART
        yield f"histories from {first}", sweep_histories, first
        turn, rest = divmod(number, RARELY)
        at = turn * CASES_PER_PART
        some = cases[at : at + CASES_PER_PART]
        if some and not rest:
            yield f"requests {at}", sweep_some, some


def sweep_all(given: argparse.Namespace, report: Report) -> None:
    """Run parts in all processes until there are enough states, or the time is over."""
    began, said = time.monotonic(), 0.0
    coming = (one for one in parts(given) if one[0] not in set(report.done))
    running: dict[Future, str] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        while True:
            spent = time.monotonic() - began
            enough = report.figures.enumerated >= given.states or 0 < given.seconds < spent
            while not enough and len(running) < 2 * given.jobs:
                name, *call = next(coming)
                running[pool.submit(*call)] = name
            if not running:
                return
            done, _ = wait(running, timeout=SAY_EVERY_SECONDS, return_when=FIRST_COMPLETED)
            for one in done:
                report.add(running.pop(one), *one.result())
            if spent - said > SAY_EVERY_SECONDS or enough:
                said = spent
                tell(report, given.states)


def tell(report: Report, states: int) -> None:
    figures, rate = report.figures, report.figures.enumerated / max(report.seconds, 1e-9)
    sys.stderr.write(
        f"\r{figures.enumerated:,} of {states:,} states, {figures.states:,} of them different, "
        f"{figures.violated} violations, "
        f"{rate:,.0f} per second of processor time, {report.seconds:.0f} s "
    )
    sys.stderr.flush()


def kill_all(given: argparse.Namespace, report: Report) -> None:
    """Kill real processes, in parts with a seed each, in processes of their own with torch."""
    began = time.monotonic()
    for number in range(-(-given.kills // KILLS_PER_PART)):
        seed = given.seed * SEEDS_APART + number
        name = f"kills {seed}"
        spent = time.monotonic() - began
        if name in report.done or 0 < given.seconds < spent:
            continue
        kills = min(KILLS_PER_PART, given.kills - number * KILLS_PER_PART)
        report.add_kills(name, kill(seed, kills))


def kill(seed: int, kills: int) -> dict:
    command = [sys.executable, str(HERE / "kills.py"), "--kills", str(kills)]
    command += ["--seed", str(seed)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit("no process could be killed")
    return json.loads(done.stdout)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    if given.only is not None:
        figures = sweep_history(given.only, Depth.deep())
        sys.stdout.write(json.dumps(asdict(figures), indent=1) + "\n")
        return 1 if figures.violations else 0
    report = resumed(given.report, given.seed)
    sweep_all(given, report)
    kill_all(given, report)
    told = {name: value for name, value in report.to_json().items() if name != "done"}
    sys.stdout.write(f"\n{json.dumps(told, indent=1)}\n")
    for one in report.figures.violations:
        seed = one.removeprefix("seed ").partition(",")[0]
        again = f"python -m tests.crash --only {seed}" if one.startswith("seed ") else one
        sys.stderr.write(f"{one}\n  again: {again}\n")
    return 1 if report.figures.violations or report.kills.get("violations") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
