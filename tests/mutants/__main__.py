"""Break guarantees on purpose and run the tests that must fail: ``python -m tests.mutants``.

Each mutant changes one place in a copy of the tree and runs the tests that must detect it. The
command fails if a mutant survives, or if the code no longer has the text that a mutant replaces.

Each run is a fork of a process that has imported torch and pytest. ``WORDS`` selects the mutants
whose descriptions have all these words, ``--only retention,tiers`` selects lists, and
``--from 120`` continues at a number.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants import (
    agent,
    cached_steps,
    capture,
    cli,
    daemon,
    engine,
    fencing,
    file_format,
    ledger,
    other_trainers,
    rendezvous,
    repair,
    resume,
    retention,
    rollback,
    s3,
    save,
    state_dict,
    storage,
    strategies,
    tiers,
    training,
)
from tests.mutants.fork_pool import ForkPool
from tests.mutants.mutant import Mutant

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent.parent
TREE = ("resilient", "cli", "tests", "benchmarks", "examples", "docs", "pyproject.toml")
"""What the copy of the tree has."""
SECONDS_MAX = 300

LISTS = {
    module.__name__.rpartition(".")[2]: module.MUTANTS
    for module in (
        engine,
        save,
        fencing,
        retention,
        resume,
        repair,
        tiers,
        rollback,
        ledger,
        cached_steps,
        daemon,
        file_format,
        s3,
        storage,
        capture,
        state_dict,
        strategies,
        agent,
        rendezvous,
        training,
        other_trainers,
        cli,
    )
}
MUTANTS = [mutant for mutants in LISTS.values() for mutant in mutants]


def controls_of(mutants: list[Mutant]) -> list[Mutant]:
    """Return one run of each selection of tests over unbroken code. These runs must pass."""
    selections = dict.fromkeys(mutant.tests for mutant in mutants)
    return [
        Mutant(f"nothing is broken: {tests}", "pyproject.toml", "", "", tests)
        for tests in selections
    ]


def copy_tree(target: Path) -> None:
    """Copy the code, the tests and the files that they read."""
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def find_problem(mutant: Mutant, pool: ForkPool) -> str:
    """Return why the result of the tests is wrong, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve() / "tree"
        copy_tree(tree)
        target = tree / mutant.file
        text = target.read_text()
        if mutant.old and text.count(mutant.old) != 1:
            return f"its text stands {text.count(mutant.old)} times in {mutant.file}"
        if mutant.old:
            target.write_text(text.replace(mutant.old, mutant.new))
        status = pool.run(tree, _words(mutant.tests), SECONDS_MAX)
        if status is None:
            return f"pytest did not end in {SECONDS_MAX} s"
        # 1 means that tests failed. Other codes (no tests, a usage error) prove nothing.
        expected = 1 if mutant.old else 0
        return "" if status == expected else f"pytest ended with {status}"


def _words(tests: str) -> list[str]:
    paths, _, expression = tests.partition(" -k ")
    return [*paths.split(), *(["-k", expression] if expression else [])]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="words of the description")
    parser.add_argument("--only", default="", help=f"lists, with commas: {', '.join(LISTS)}")
    parser.add_argument("--from", dest="first", type=int, default=1, help="first number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel runs")
    return parser.parse_args()


def select(words: Sequence[str] = (), only: str = "", first: int = 1) -> list[tuple[int, Mutant]]:
    """Return the selected runs with their numbers: controls, then mutants.

    Raises:
        SystemExit: there is no such list.
    """
    names = only.split(",") if only else list(LISTS)
    unknown = [name for name in names if name not in LISTS]
    if unknown:
        raise SystemExit(f"no such list: {', '.join(unknown)}; there are {', '.join(LISTS)}")
    mutants = [
        mutant
        for name in names
        for mutant in LISTS[name]
        if all(word in mutant.name for word in words)
    ]
    numbered = list(enumerate([*controls_of(mutants), *mutants], 1))
    return numbered[first - 1 :]


def main() -> int:
    """Run the selected mutants; print each result, and at the end their number."""
    given = parse()
    selected = select(given.words, given.only, given.first)
    last = selected[-1][0] if selected else 0
    pool = ForkPool(given.jobs)
    wrong = 0
    try:
        with ThreadPoolExecutor(given.jobs) as threads:
            problems = threads.map(lambda run: find_problem(run[1], pool), selected)
            for (number, mutant), problem in zip(selected, problems, strict=True):
                wrong += bool(problem)
                result = f"WRONG ({problem})" if problem else "caught" if mutant.old else "passes"
                sys.stdout.write(f"{number:4}  {result:8}  {mutant.name}  [{mutant.file}]\n")
                sys.stdout.flush()
    finally:
        pool.close()
    broken = sum(bool(mutant.old) for _, mutant in selected)
    sys.stdout.write(
        f"{len(selected) - wrong} of {len(selected)} as expected ({broken} mutants, "
        f"{len(selected) - broken} controls; numbers {given.first} to {last}), {wrong} wrong\n"
    )
    return 1 if wrong or not selected else 0


if __name__ == "__main__":
    sys.exit(main())
