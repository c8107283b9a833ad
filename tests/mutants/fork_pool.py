"""Pool of fork servers that run pytest over a tree."""

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

SERVER = Path(__file__).resolve().parent / "fork_server.py"


class ForkPool:
    """Fork servers, each of which runs one pytest at a time.

    Args:
        count: Number of fork servers.
    """

    def __init__(self, count: int) -> None:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._servers = [
            subprocess.Popen(
                [sys.executable, str(SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                text=True,
            )
            for _ in range(count)
        ]
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for server in self._servers:
            self._idle.put(server)

    def run(self, tree: Path, words: Sequence[str], seconds: float) -> int | None:
        """Return pytest's exit status over ``tree``, or None after the time limit."""
        server = self._idle.get()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            request = {"tree": str(tree), "words": list(words), "seconds": seconds}
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        finally:
            self._idle.put(server)
        if not answer:
            raise RuntimeError("a fork server has died")
        status: int | None = json.loads(answer)
        return status

    def close(self) -> None:
        """End all fork servers."""
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
