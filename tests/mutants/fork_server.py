"""Process that imports torch and pytest once, and forks for each run of tests.

The process imports nothing of this repository. A fork imports the repository from the tree that
the request names. Requests and answers are lines of JSON. A request is ``{"tree": ..., "words":
[...], "seconds": ...}``. The answer is the exit status of pytest, or null after the time limit.

The process runs as a script, so it does not import its own package.
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
"""Slow imports. No plugins of pytest, because pytest rewrites their assertions itself."""
OURS = ("resilient", "resilient_cli", "tests", "examples", "benchmarks", "conftest")
POLL_SECONDS = 0.02
_RAISED = 70


def import_foreign() -> None:
    """Import the slow modules.

    Raises:
        AssertionError: a module of this repository was imported too.
    """
    for name in FOREIGN:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in OURS)
    if ours:
        raise AssertionError(f"imported before the fork: {', '.join(ours)}")


class StatusPlugin:
    """Plugin that keeps the exit status of the tests.

    Pytest may raise after the session, because a failed test left resources open. The status of
    the session then still counts.
    """

    def __init__(self) -> None:
        self.status = _RAISED

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Keep the exit status."""
        self.status = int(exitstatus)


def run_tests(tree: str, words: list[str], plugin: StatusPlugin) -> int:
    """Run pytest over ``tree`` in a fork and return its exit status."""
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
        pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *words], plugins=[plugin])
    )


def run_in_fork(tree: str, words: list[str], seconds: float) -> int | None:
    """Run pytest in a fork. After the time limit, kill its process group and return None."""
    pid = os.fork()
    if pid == 0:
        plugin = StatusPlugin()
        try:
            plugin.status = run_tests(tree, words, plugin)
        finally:
            # An exception after passed tests is a failure.
            os._exit(plugin.status or _RAISED if sys.exc_info()[0] else plugin.status)
    ends = time.monotonic() + seconds
    status = None
    while status is None and time.monotonic() < ends:
        ended, waited = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(waited) if ended else None
        if not ended:
            time.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def main() -> None:
    """Answer requests until stdin is closed."""
    # Tests must not import from the folder of this script.
    del sys.path[0]
    import_foreign()
    for line in sys.stdin:
        request = json.loads(line)
        status = run_in_fork(request["tree"], request["words"], request["seconds"])
        sys.stdout.write(json.dumps(status) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
