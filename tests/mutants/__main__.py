"""Break the durability code on purpose and see the tests go red: ``python -m tests.mutants``.

A harness that cannot fail is decoration. Each mutant changes one place of a copy of the tree
and runs the tests that must catch it. The command fails if one survives, or if the text that a
mutant replaces is no longer in the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import (
    adapters,
    crash,
    integrity,
    keeper,
    loop,
    overlap,
    parity,
    refer,
    retention,
    s3,
    sharding,
    speed,
    spine,
    storage,
    tiers,
)
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS_MAX = 300

MUTANTS = spine.MUTANTS + storage.MUTANTS + retention.MUTANTS + s3.MUTANTS
MUTANTS += keeper.MUTANTS + sharding.MUTANTS + refer.MUTANTS + parity.MUTANTS + speed.MUTANTS
MUTANTS += integrity.MUTANTS + crash.MUTANTS + overlap.MUTANTS
MUTANTS += loop.MUTANTS + adapters.MUTANTS + tiers.MUTANTS


def controls() -> list[Mutant]:
    """Return one run of each selection of tests over unbroken code: those must pass."""
    chosen = dict.fromkeys(one.tests for one in MUTANTS)
    return [
        Mutant(f"nothing is broken: {tests}", "pyproject.toml", "", "", tests) for tests in chosen
    ]


def wrong(mutant: Mutant) -> str:
    """Return why the tests did not do what they must, or nothing."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        for name in ("resilient", "cli", "tests", "examples", "pyproject.toml"):
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
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environ = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'cli'}"}
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            ended = subprocess.run(
                [*command, *_words(mutant.tests)],
                cwd=tree,
                env=environ,
                capture_output=True,
                text=True,
                timeout=SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"pytest did not end in {SECONDS_MAX} s"
        # 1 is "tests failed"; anything else (no tests, a usage error) proves nothing.
        expected = 1 if mutant.old else 0
        return "" if ended.returncode == expected else f"pytest ended with {ended.returncode}"


def _words(tests: str) -> list[str]:
    paths, _, expression = tests.partition(" -k ")
    return [*paths.split(), *(["-k", expression] if expression else [])]


def main() -> int:
    """Run all mutants, or those whose name holds a given word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="")
    word = parser.parse_args().only
    chosen = [one for one in controls() + MUTANTS if word in one.name]
    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        survivors = 0
        for mutant, why in zip(chosen, pool.map(wrong, chosen), strict=True):
            survivors += bool(why)
            verdict = f"WRONG ({why})" if why else "caught" if mutant.old else "passes"
            sys.stdout.write(f"{verdict:10}  {mutant.name}  [{mutant.file}]\n")
            sys.stdout.flush()
    sys.stdout.write(f"{sum(bool(one.old) for one in chosen)} mutants, {survivors} wrong\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
