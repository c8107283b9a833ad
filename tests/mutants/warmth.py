"""Runs pytest over a tree, each run in a fork of a process that is warm already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM = Path(__file__).resolve().parent / "warm.py"


class Warmth:
    """Some warm processes; each runs one pytest at a time.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._all = [
            subprocess.Popen(
                [sys.executable, str(WARM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                text=True,
            )
            for _ in range(count)
        ]
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for one in self._all:
            self._idle.put(one)

    def run(self, tree: Path, words: Sequence[str], seconds: float) -> int | None:
        """Return pytest's exit status over ``tree``, None if it did not end in time."""
        warm = self._idle.get()
        assert warm.stdin is not None
        assert warm.stdout is not None
        try:
            asked = {"tree": str(tree), "words": list(words), "seconds": seconds}
            warm.stdin.write(json.dumps(asked) + "\n")
            warm.stdin.flush()
            answer = warm.stdout.readline()
        finally:
            self._idle.put(warm)
        if not answer:
            raise RuntimeError("the warm process has died")
        status: int | None = json.loads(answer)
        return status

    def close(self) -> None:
        """End all of them."""
        for one in self._all:
            assert one.stdin is not None
            one.stdin.close()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()
