"""Start the workload under ``resilient train``, wait for a step, send it a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from tests.process import forked

WORKLOAD = Path(__file__).with_name("workload.py")
PATIENCE_SECONDS = 120.0


class Job:
    """One start of the same command, and what it said."""

    def __init__(self, folder: Path, *options: str, launch: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._said = (folder / f"said-{time.monotonic_ns()}.txt").open("w+")
        command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", "2"]
        self.process = forked.Popen(
            [*command, *launch, str(WORKLOAD), "--output-dir", str(folder), *options],
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._said.close()

    def steps(self, rank: int = 0) -> list[dict[str, int]]:
        path = self.folder / f"steps-{rank}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def wait_for_step(self, step: int, rank: int = 0) -> int:
        """Wait until ``rank`` has finished ``step`` and still lives; return its pid."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_SECONDS:
            steps = self.steps(rank)
            if steps and steps[-1]["step"] >= step and _lives(steps[-1]["pid"]):
                return steps[-1]["pid"]
            assert self.process.poll() is None, self.said()
            time.sleep(0.005)
        raise AssertionError(f"step {step} did not come:\n{self.said()}")

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def said(self) -> str:
        self._said.flush()
        return Path(self._said.name).read_text()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def run(folder: Path, *options: str, launch: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run the command to its end; return its exit code and what it said."""
    with Job(folder, *options, launch=launch) as job:
        return job.wait(), job.said()
