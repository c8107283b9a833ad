"""Runs `resilient train` for real and takes everything down afterwards."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.process import forked

WAIT_SECONDS = 60

# What a worker script may use; quick, because it imports no torch.
PRELUDE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1

def say(name, text=""):
    with open(f"{name}.{rank}", "a") as file:
        file.write(f"{text}\\n")

say("pid", os.getpid())
"""


class Agent:
    """One `resilient train` in a folder of its own."""

    def __init__(self, folder, script, options=(), arguments=(), environ=()):
        self.folder = Path(folder)
        (self.folder / "worker.py").write_text(PRELUDE + script, encoding="utf-8")
        target = ("worker.py",) if "-m" not in options else ("worker",)
        self._err = self.folder / "agent.err"
        self._out = self.folder / "agent.out"
        command = [sys.executable, "-m", "resilient_cli", "train", *options, *target, *arguments]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = forked.Popen(
                command,
                cwd=self.folder,
                stdout=out,
                stderr=err,
                env={**os.environ, "RESILIENT_REPO": "", **dict(environ)},
                start_new_session=True,
            )

    @property
    def out(self):
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self):
        return self._err.read_text(encoding="utf-8")

    def end(self):
        """Wait for the agent and return its exit code."""
        return self.process.wait(WAIT_SECONDS)

    def said(self, name):
        """Return the lines of all ranks' notes called ``name``."""
        notes = sorted(self.folder.glob(f"{name}.*"))
        return [line for note in notes for line in note.read_text().splitlines()]

    def wait_for(self, name, lines):
        """Wait until that many notes were taken."""
        wait_until(lambda: len(self.said(name)) >= lines, f"{lines} x `{name}`", self)
        return self.said(name)

    def send(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(WAIT_SECONDS)
        for line in self.said("pid"):
            if is_alive(int(line)):
                os.kill(int(line), signal.SIGKILL)


def wait_until(holds, expectation, agent=None, seconds=WAIT_SECONDS):
    deadline = time.monotonic() + seconds
    while not holds():
        detail = agent.err if agent else ""
        assert time.monotonic() < deadline, f"waited {seconds} s for {expectation}\n{detail}"
        assert agent is None or agent.process.poll() is None, (
            f"ended before {expectation}\n{detail}"
        )
        time.sleep(0.01)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def catches(pid, number):
    """Say whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)
