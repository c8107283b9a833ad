"""Break the durability code on purpose and see the tests go red: ``python -m tests.mutants``.

A harness that cannot fail is decoration. Each mutant changes one place of a copy of the tree
and runs the tests that must catch it. The command fails if one survives, or if the text that a
mutant replaces is no longer in the code.

Each run is a fork of a process that has imported torch and pytest and nothing of ours. Parts:
``--only crash,tiers`` for some lists, ``--from 120`` to go on, a word for what has it in its name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import (
    accounting,
    adapters,
    arguments,
    cadence,
    canonical,
    chaos,
    commands,
    comparison,
    crash,
    detection,
    evaluation,
    fencing,
    fitting,
    glances,
    hangs,
    holding,
    hosts,
    inplace,
    integrity,
    judging,
    keeper,
    kubernetes,
    layout_readers,
    layouts,
    ledger,
    loop,
    mending,
    metrics,
    notices,
    nursery,
    outputs,
    overlap,
    pace,
    page,
    parity,
    pipelines,
    recipes,
    refer,
    retention,
    rollback,
    s3,
    scanning,
    sharding,
    simulation,
    slurm,
    speed,
    spine,
    stopping,
    storage,
    streams,
    surface,
    telling,
    theirs,
    tiers,
    trackers,
    travel,
    trials,
)
from tests.mutants.mutant import Mutant
from tests.mutants.warmth import Warmth

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS_MAX = 300

LISTS = {
    one.__name__.rpartition(".")[2]: one.MUTANTS
    for one in (
        spine,
        fencing,
        storage,
        retention,
        s3,
        keeper,
        kubernetes,
        sharding,
        simulation,
        slurm,
        layout_readers,
        layouts,
        refer,
        parity,
        pace,
        speed,
        integrity,
        judging,
        crash,
        detection,
        stopping,
        hangs,
        hosts,
        accounting,
        overlap,
        rollback,
        scanning,
        travel,
        ledger,
        loop,
        mending,
        nursery,
        outputs,
        adapters,
        tiers,
        arguments,
        inplace,
        pipelines,
        recipes,
        trackers,
        trials,
        evaluation,
        fitting,
        glances,
        streams,
        surface,
        telling,
        theirs,
        canonical,
        cadence,
        holding,
        notices,
        metrics,
        chaos,
        commands,
        comparison,
        page,
    )
}
MUTANTS = [mutant for some in LISTS.values() for mutant in some]


def controls(mutants: list[Mutant]) -> list[Mutant]:
    """Return one run of each selection of tests over unbroken code: those must pass."""
    chosen = dict.fromkeys(one.tests for one in mutants)
    return [
        Mutant(f"nothing is broken: {tests}", "pyproject.toml", "", "", tests) for tests in chosen
    ]


def wrong(mutant: Mutant, warmth: Warmth) -> str:
    """Return why the tests did not do what they must, or nothing."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve() / "tree"
        for name in (
            "resilient",
            "cli",
            "tests",
            "benchmarks",
            "examples",
            "docs",
            "pyproject.toml",
        ):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        target = tree / mutant.file
        text = target.read_text()
        if mutant.old and text.count(mutant.old) != 1:
            return f"its text stands {text.count(mutant.old)} times in {mutant.file}"
        if mutant.old:
            target.write_text(text.replace(mutant.old, mutant.new))
        status = warmth.run(tree, _words(mutant.tests), SECONDS_MAX)
        if status is None:
            return f"pytest did not end in {SECONDS_MAX} s"
        # 1 is "tests failed"; anything else (no tests, a usage error) proves nothing.
        expected = 1 if mutant.old else 0
        return "" if status == expected else f"pytest ended with {status}"


def _words(tests: str) -> list[str]:
    paths, _, expression = tests.partition(" -k ")
    return [*paths.split(), *(["-k", expression] if expression else [])]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only what has it in its name")
    parser.add_argument("--only", default="", help=f"some of {', '.join(LISTS)}, with commas")
    parser.add_argument("--from", dest="first", type=int, default=1, help="number of the first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once")
    return parser.parse_args()


def chosen_of(word: str = "", only: str = "", first: int = 1) -> list[tuple[int, Mutant]]:
    """Return what is to be run with its number: controls of the chosen mutants, then those.

    Raises:
        SystemExit: there is no such list.
    """
    names = only.split(",") if only else list(LISTS)
    unknown = [name for name in names if name not in LISTS]
    if unknown:
        raise SystemExit(f"no such list: {', '.join(unknown)}; there are {', '.join(LISTS)}")
    mutants = [one for name in names for one in LISTS[name] if word in one.name]
    everything = list(enumerate([*controls(mutants), *mutants], 1))
    return everything[first - 1 :]


def main() -> int:
    """Run all mutants, or some; say for each what came of it, and at last how many there were."""
    given = parse()
    chosen = chosen_of(given.word, given.only, given.first)
    of = chosen[-1][0] if chosen else 0
    warmth = Warmth(given.jobs)
    survivors = 0
    try:
        with ThreadPoolExecutor(given.jobs) as pool:
            verdicts = pool.map(lambda one: wrong(one[1], warmth), chosen)
            for (number, mutant), why in zip(chosen, verdicts, strict=True):
                survivors += bool(why)
                verdict = f"WRONG ({why})" if why else "caught" if mutant.old else "passes"
                sys.stdout.write(f"{number:4}  {verdict:8}  {mutant.name}  [{mutant.file}]\n")
                sys.stdout.flush()
    finally:
        warmth.close()
    broken = sum(bool(one.old) for _, one in chosen)
    sys.stdout.write(
        f"{len(chosen) - survivors} of {len(chosen)} as they must be ({broken} mutants, "
        f"{len(chosen) - broken} controls; number {given.first} to {of}), {survivors} wrong\n"
    )
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
