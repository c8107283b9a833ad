"""Train once undisturbed and once through four faults; compare the ends bit for bit.

    python -m examples.demo [--seed N] [--steps N] [--folder DIR]

Exit code 0 if everything is identical, 1 if anything differs.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.demo.compare import compare
from examples.demo.faults import FAULTS, Outcome
from examples.demo.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

SAVES = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Run both jobs and print the table; return the exit code."""
    options = read_options(argv)
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"seed of the faults: {seed}   (again: make demo DEMO='--seed {seed}')")
    runs = options.folder / "calm", options.folder / "struck"
    clear(options.folder, {run.name for run in runs})
    interval = options.steps // SAVES
    script = [
        "--steps",
        str(options.steps),
        "--save-steps",
        str(interval),
        "--save-total-limit",
        "3",
    ]
    script += ["--logging-steps", "1", "--eval-steps", str(3 * interval)]
    began_seconds = time.monotonic()
    with progress_bar() as bar, ExitStack() as ends:
        task = bar.add_task("undisturbed", total=options.steps)
        calm = Job(runs[0], script, lambda step: bar.update(task, completed=step))
        ends.callback(calm.end)
        calm.start()
        if calm.wait() != 0:
            raise RuntimeError(f"the run without faults failed; see {calm.folder / 'said.txt'}")
        bar.update(task, completed=options.steps)
        task = bar.add_task("struck", total=options.steps)
        faulted_job = Job(runs[1], script, lambda step: bar.update(task, completed=step))
        ends.callback(faulted_job.end)
        outcomes = strike(faulted_job, Random(seed), interval)
        bar.update(task, completed=options.steps)
    console.print(table(outcomes))
    every_bit = show_verdict(console, calm, faulted_job)
    took_seconds = time.monotonic() - began_seconds
    end = (
        "identical to the bit" if every_bit else "DIFFERENT: this is a bug, please report the seed"
    )
    steps_trained = len(faulted_job.steps())
    console.print(
        f"{options.steps} steps, {steps_trained} trained in all, {took_seconds:.0f} s: {end}"
    )
    return 0 if every_bit else 1


def show_verdict(console: Console, calm: Job, faulted_job: Job) -> bool:
    """Print the aspects that are the same in both runs; return True if all are."""
    verdict = compare(calm.store, faulted_job.store)
    for aspect, identical in verdict.items():
        mark = "[green]identical[/]" if identical else "[red]DIFFERENT[/]"
        console.print(f"{aspect:13} {mark}")
    return all(verdict.values())


def clear(folder: Path, runs: set[str]) -> None:
    """Remove the output of an earlier demo from its folder, and nothing else."""
    other_names = sorted({path.name for path in folder.iterdir()} - runs) if folder.is_dir() else []
    if other_names:
        raise SystemExit(
            f"`{folder}` holds `{other_names[0]}`, which no demo made: name another folder"
        )
    for name in runs:
        shutil.rmtree(folder / name, ignore_errors=True)


def strike(job: Job, random: Random, interval: int) -> list[Outcome]:
    """Start the job, apply every fault, and wait for the end of the job."""
    job.start()
    outcomes = [fault(job, random, interval) for fault in FAULTS]
    code = job.wait()
    if code != 0:
        raise RuntimeError(f"the struck run ended with {code}; see {job.folder / 'said.txt'}")
    return outcomes


def progress_bar() -> Progress:
    """Return a bar on stderr, so that stdout holds only the answer."""
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return the faults and their results as a table."""
    outcome_table = Table(title="what happened")
    for name in ("fault", "exit", "steps lost", "seconds to the next step", "resumed from", "why"):
        outcome_table.add_column(name, overflow="fold")
    for outcome in outcomes:
        seconds = f"{outcome.seconds:.1f}"
        code = "-" if outcome.exit_code is None else str(outcome.exit_code)
        outcome_table.add_row(
            outcome.fault, code, str(outcome.lost_steps), seconds, outcome.checkpoint, outcome.why
        )
    return outcome_table


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the faults; drawn and printed if not given")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("demo-run"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
