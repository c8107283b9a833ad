"""Mutate modules with mutmut and count the survivors: ``python -m tests.mutants.generated``.

``modules.toml`` lists the modules, their tests and the number of mutants that may survive. The
command fails if more survive. ``MODULES`` selects modules by path. A module outside the list runs
with the unit tests that name it, and is only reported.

Mutmut runs in a copy of the tree below ``build/mutmut``. The copy stays, so ``mutmut show NAME``
in it shows a survivor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).resolve().parent / "modules.toml"
WORK = ROOT / "build" / "mutmut"
MUTMUT = Path(sys.executable).with_name("mutmut")
TREE = ("resilient", "tests", "docs")
SECTION = "[tool.mutmut]\n"
# A mutant that no test reaches survives too. Timeouts and crashes are detections.
DETECTED = {"killed", "timeout", "segfault"}
SURVIVED = {"survived", "no tests", "suspicious"}


class Module(NamedTuple):
    """A module to mutate.

    Attributes:
        path: Path from the root of the repository.
        tests: Arguments of pytest that select the tests.
        survivors: Number of mutants that may survive. None if no number is stored.
    """

    path: str
    tests: list[str]
    survivors: int | None


def read_modules() -> dict[str, Module]:
    """Read the list of modules."""
    listed = tomllib.loads(LIST.read_text())
    return {
        path: Module(path, entry["tests"], entry.get("survivors")) for path, entry in listed.items()
    }


def select(paths: list[str]) -> list[Module]:
    """Return the modules of ``paths``; without paths, all listed modules.

    Raises:
        SystemExit: a path is no module, or no unit test names it.
    """
    listed = read_modules()
    return [listed.get(path) or _unlisted(path) for path in paths or listed]


def _unlisted(path: str) -> Module:
    if not (ROOT / path).is_file():
        raise SystemExit(f"no such module: {path}")
    name = path.removesuffix(".py").replace("/", ".")
    package, _, module = name.rpartition(".")
    texts = (name, f"from {package} import {module}")
    tests = [
        str(test.relative_to(ROOT))
        for test in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if any(text in test.read_text() for text in texts)
    ]
    if not tests:
        raise SystemExit(f"no unit test names {name}: add the module to {LIST.relative_to(ROOT)}")
    return Module(path, tests, None)


def make_tree(module: Module) -> Path:
    """Copy the code and the tests, and configure mutmut for one module."""
    tree = WORK / module.path.removesuffix(".py").replace("/", ".")
    shutil.rmtree(tree, ignore_errors=True)
    for name in TREE:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = (ROOT / "pyproject.toml").read_text()
    if config.count(SECTION) != 1:
        raise SystemExit(f"pyproject.toml lacks {SECTION.strip()}")
    chosen = f"only_mutate = {[module.path]}\n"
    chosen += f"pytest_add_cli_args_test_selection = {module.tests}\n"
    (tree / "pyproject.toml").write_text(config.replace(SECTION, SECTION + chosen))
    return tree


def run_mutmut(tree: Path, jobs: int) -> dict[str, str]:
    """Return the result of each mutant by its name.

    Raises:
        SystemExit: mutmut failed, for example because the tests fail without a mutant.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [MUTMUT, "run", "--max-children", str(jobs)],
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.stdout.write(ran.stdout)
        raise SystemExit(f"mutmut failed in {tree}")
    shown = subprocess.run(
        [MUTMUT, "results", "--all", "true"],
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    pairs = (line.strip().rpartition(": ") for line in shown.stdout.splitlines() if line.strip())
    return {name: status for name, _, status in pairs}


def report(module: Module, results: dict[str, str], tree: Path) -> bool:
    """Print the survivors of a module and return True if they are too many.

    Raises:
        SystemExit: mutmut did not test every mutant.
    """
    counts = Counter(results.values())
    untested = set(counts) - DETECTED - SURVIVED
    if untested or not results:
        raise SystemExit(f"{module.path}: mutants without a result: {dict(counts)}")
    survivors = sorted(name for name, status in results.items() if status in SURVIVED)
    limit = "no limit is stored" if module.survivors is None else f"{module.survivors} allowed"
    sys.stdout.write(
        f"{module.path}: {len(results)} mutants, {len(survivors)} survived ({limit})\n"
    )
    for name in survivors:
        sys.stdout.write(f"  {results[name]}  {name}\n")
    if survivors:
        sys.stdout.write(f"  to see one: cd {tree.relative_to(ROOT)} && {MUTMUT} show NAME\n")
    if module.survivors is not None and len(survivors) < module.survivors:
        sys.stdout.write(f"  lower the number in {LIST.relative_to(ROOT)}\n")
    sys.stdout.flush()
    return module.survivors is not None and len(survivors) > module.survivors


def main() -> int:
    """Mutate the selected modules one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.generated", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULES", help="paths of modules")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel runs")
    given = parser.parse_args()
    failed = []
    for module in select(given.modules):
        tree = make_tree(module)
        if report(module, run_mutmut(tree, given.jobs), tree):
            failed.append(module.path)
    if failed:
        sys.stdout.write(f"more survivors than allowed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
