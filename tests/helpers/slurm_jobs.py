"""The workload as a job of a real SLURM: submitted by the command, struck, and held to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.process.gangs import ROOT
from tests.process.jobs import WORKLOAD

PATIENCE_SECONDS = 150.0
STEPS = 5
LENGTH = ("--steps", "160", "--save-steps", "1000")


def calm(folder):
    """Train without SLURM and undisturbed, by one process."""
    command = [sys.executable, str(WORKLOAD), "--output-dir", str(folder), *LENGTH, "--pause", "0"]
    subprocess.run(
        command, check=True, env={**os.environ, **_environment()}, capture_output=True, timeout=120
    )


def _environment():
    python = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    return {"PYTHONPATH": python, "OMP_NUM_THREADS": "1"}


class SlurmRun:
    """One run as a job.

    Args:
        cluster: a :class:`tests.services.slurm.Slurm`.
        folder: of the run and its log.
        first: what the program's shell does before all else.
    """

    def __init__(self, cluster, folder, *options, train=(), script=(), pause="0.03", first=":"):
        self.cluster, self.folder = cluster, folder
        program = folder / "bin" / "resilient"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} -m resilient_cli "$@"\n')
        program.chmod(0o755)
        setup = ("--setup", f"export PATH={program.parent}:$PATH")
        arguments = (
            "--name",
            "run",
            "--logs",
            str(folder / "logs"),
            "--cpus",
            "2",
            *setup,
            *options,
        )
        workload = (str(WORKLOAD), "--output-dir", str(folder / "run"), *LENGTH, "--pause", pause)
        self.number = self._call(
            "submit", *arguments, "-q", "--", "train", *train, *(script or workload)
        )

    def _call(self, *arguments):
        process = subprocess.run(
            [sys.executable, "-m", "resilient_cli", "slurm", *arguments],
            env={**self.cluster.environment, **_environment()},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert process.returncode in (0, 1), process.stderr
        return process.stdout.strip()

    def status(self):
        """Return what ``resilient slurm status`` says of it."""
        return json.loads(self._call("status", self.number, "--json"))["jobs"][0]

    def log(self):
        """Return what all its starts said."""
        return "".join(path.read_text() for path in (self.folder / "logs").glob("*.log"))

    def starts(self):
        """Return the steps of each start."""
        starts = {}
        for line in self.lines():
            starts.setdefault(line["pid"], []).append(line["step"])
        return list(starts.values())

    def wait_for_steps(self, start):
        """Wait until a start, counted from 0, has done some steps."""

        def is_so():
            starts = self.starts()
            return len(starts) > start and len(starts[start]) >= STEPS

        self.wait(is_so, f"start {start} does no steps")

    def wait_for_state(self, *states):
        """Wait until SLURM says so."""
        self.wait(lambda: self.cluster.job(self.number)["JobState"] in states, f"no {states}")

    def wait_for_start(self, number):
        """Wait until it was started again so often."""
        self.wait(lambda: int(self.cluster.job(self.number)["Restarts"]) >= number, "no requeue")

    def wait_for_word(self, text):
        """Wait until a start said it."""
        self.wait(lambda: text in self.log(), f"nobody said {text}")

    def wait(self, is_so, problem):
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            message = f"{problem}:\n{self.log()}\n{self.cluster.job(self.number)}"
            assert time.monotonic() < deadline, message
            assert "'JobState': 'FAILED'" not in message or is_so(), message
            time.sleep(0.1)

    def lines(self):
        """Return what each step left, in order."""
        path = Path(self.folder / "run" / "steps-0.jsonl")
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
