"""A process that has imported torch and pytest once, and forks for each run of tests.

It knows nothing of this repository: what a fork imports of it, comes from the tree that it was
told of. Requests and answers are lines of JSON: ``{"tree": ..., "words": [...], "seconds": ...}``,
answered with the exit status of pytest, or with null if it did not end in time.

It is run as a script, so that not even its own package is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

FOREIGN = ("numpy", "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp")
FOREIGN += ("fsspec", "safetensors.torch", "xxhash", "yaml", "pytest")
"""Slow to import, and from elsewhere. No plugins of pytest: it wants to rewrite those itself."""
OURS = ("resilient", "resilient_cli", "tests", "examples", "benchmarks", "conftest")
LOOK_EVERY_SECONDS = 0.02
_THREW = 70


def warm_up() -> None:
    """Import what is foreign, and see that nothing of ours came with it and no thread runs."""
    for name in FOREIGN:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in OURS)
    if ours:
        raise AssertionError(f"imported before the fork: {', '.join(ours)}")


class Ended:
    """Hears from pytest how the tests ended; what is thrown as pytest leaves changes that no more.

    A test that failed may leave things behind of which pytest complains with an exception.
    """

    def __init__(self) -> None:
        self.status = _THREW

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Keep the exit status."""
        self.status = int(exitstatus)


def run_tests(tree: str, words: list[str], ended: Ended) -> int:
    """Return how pytest ended over ``tree``; in a fork."""
    import pytest

    os.setsid()
    os.chdir(tree)
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    first = [tree, str(Path(tree) / "cli")]
    os.environ["PYTHONPATH"] = os.pathsep.join(first)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:] = [*first, *sys.path]
    sys.argv = ["pytest"]
    importlib.invalidate_caches()
    return int(
        pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *words], plugins=[ended])
    )


def forked(tree: str, words: list[str], seconds: float) -> int | None:
    """Return how pytest ended in a fork; None if it had to be killed, with all it started."""
    pid = os.fork()
    if pid == 0:
        ended = Ended()
        try:
            ended.status = run_tests(tree, words, ended)
        finally:
            # Green tests and an exception behind them are not green.
            os._exit(ended.status or _THREW if sys.exc_info()[0] else ended.status)
    ends = time.monotonic() + seconds
    status = None
    while status is None and time.monotonic() < ends:
        done, waited = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(waited) if done else None
        if not done:
            time.sleep(LOOK_EVERY_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def main() -> None:
    """Serve until nobody asks any more."""
    # The folder of this script: not a place that tests may import from.
    del sys.path[0]
    warm_up()
    for line in sys.stdin:
        asked = json.loads(line)
        status = forked(asked["tree"], asked["words"], asked["seconds"])
        sys.stdout.write(json.dumps(status) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
