"""Command of the demo, which is started as often as needed, observed, and killed from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from resilient.checkpoint.catalog import committed, folders_of
from resilient.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.format.keys import CheckpointId

RANKS = 2
PATIENCE_SECONDS = 120.0
_SCRIPT = Path(__file__).resolve().parent.parent / "gpt.py"


class Job:
    """One ``resilient train`` command on one folder.

    Args:
        folder: Folder for output and checkpoints.
        options: Options of ``examples/gpt.py``.
        on_step: Callback with the newest step, for a progress bar.
    """

    def __init__(
        self, folder: Path, options: Sequence[str], on_step: Callable[[int], None]
    ) -> None:
        self.folder = folder
        self.store = LocalStore(folder)
        train = ["-m", "resilient_cli", "train", "--nproc-per-node", str(RANKS)]
        events = ["--events", str(folder / "events")]
        output = ["--output-dir", str(folder)]
        self._command = [sys.executable, *train, *events, str(_SCRIPT), *output, *options]
        self._on_step = on_step
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Run the command in the background, and append its output to ``said.txt``."""
        with (self.folder / "said.txt").open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def agent(self) -> psutil.Process:
        """Process of the command itself."""
        assert self._process is not None, "start() comes first"
        return psutil.Process(self._process.pid)

    def rank(self, number: int) -> psutil.Process:
        """Return the process of one rank."""
        return next(
            child for child in self.agent.children() if child.environ().get("RANK") == str(number)
        )

    def strike_all(self) -> int:
        """Send SIGKILL to the command and every process under it; return its exit code."""
        victims = [self.agent, *self.agent.children(recursive=True)]
        for victim in victims:
            victim.suspend()
        for victim in victims:
            victim.kill()
        return self.wait()

    def end(self) -> None:
        """Kill what still runs, whatever ended the demo."""
        if self._process is not None and self._process.poll() is None:
            self.strike_all()

    def wait(self) -> int:
        """Wait for the command to end; return its exit code as a shell shows it."""
        assert self._process is not None, "start() comes first"
        while True:
            try:
                code = self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                self._on_step(self.last_step())
                continue
            return code if code >= 0 else 128 - code

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the JSON lines of a file in the folder, without a half-written last line."""
        path = self.folder / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def steps(self) -> list[int]:
        """Return every logged step in the order of time, including repeated steps."""
        return [line["step"] for line in self.lines("log.jsonl") if "loss" in line]

    def last_step(self) -> int:
        """Return the newest step."""
        return max(self.steps()[-1:], default=0)

    def facts(self) -> list[dict[str, Any]]:
        """Return the coordinator's events."""
        return self.lines("events/rank-0.jsonl")

    def until(self, holds: Callable[[], object], every_seconds: float = 0.01) -> None:
        """Wait until ``holds()`` is true while the command runs.

        Raises:
            RuntimeError: The command ended, or the wait took too long.
        """
        began_seconds = time.monotonic()
        while not holds():
            self._on_step(self.last_step())
            alive = self._process is not None and self._process.poll() is None
            if not alive or time.monotonic() - began_seconds > PATIENCE_SECONDS:
                raise RuntimeError(f"this did not come; see {self.folder / 'said.txt'}")
            time.sleep(every_seconds)

    def newest(self) -> CheckpointId:
        """Return the newest committed checkpoint."""
        return committed(self.store)[0]

    def saving(self) -> CheckpointId | None:
        """Return a checkpoint that is being written now: it has files, but no manifest yet."""
        newest = max(committed(self.store), default=None)
        bare = (
            folder
            for folder, names in folders_of(self.store).items()
            if "manifest.json" not in names
        )
        return next((folder for folder in bare if newest is None or folder > newest), None)

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        self.agent.send_signal(signal.SIGTERM)
