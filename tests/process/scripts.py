"""Start an example as its user would, kill all of it, and start it again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil

from tests.process import forked
from tests.process.gangs import ROOT


def weights_of(said):
    """Return what the ranks say of their weights at the end.

    Not by the line: of two processes with one output one may write before the other's newline.
    """
    return set(re.findall(r"weights ([0-9a-f]{64})", said))


class Script:
    """One command: an example, the folder that it trains into, and how long it trains."""

    def __init__(self, path, folder, length, *, launcher=(), repository="") -> None:
        self.path, self.launcher = path, launcher
        self.command = [sys.executable, *launcher, str(path), str(folder), str(length)]
        self.repository = folder / repository

    @contextmanager
    def started(self):
        """Start it; whatever is left of it is gone at the end."""
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])}
        # Ranks of a launcher are found by their command lines, which forked ranks lack.
        start = subprocess.Popen if self.launcher else forked.Popen
        process = start(
            self.command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        job = Started(self, process)
        try:
            yield job
        finally:
            job.kill_all()
            process.communicate()

    def run_to_end(self):
        """Return the weights that a start ends with that nobody disturbs."""
        with self.started() as job:
            return weights_of(job.finish())

    def killed_and_started_again(self, step):
        """Kill it once a step is saved, start it again, and return what it ends with."""
        with self.started() as job:
            job.wait_for_checkpoint(step)
            job.kill_all()
        with self.started() as job:
            said = job.finish()
        assert "resumed from checkpoint-" in said, said
        return weights_of(said)


class Started:
    """One start of a script."""

    def __init__(self, script, process) -> None:
        self.script = script
        self.process = process

    def is_alive(self):
        return self.process.poll() is None

    def ranks(self):
        """Return the processes of the launcher's that run the script."""
        ranks = []
        # Whatever ends meanwhile is no rank any more.
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    ranks += [one] if str(self.script.path) in one.cmdline() else []
        return ranks

    def kill_all(self):
        if self.is_alive():
            ranks = self.ranks()
            self.process.kill()
            for one in ranks:
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def finish(self):
        """Return what it said; it must end well."""
        said, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, said
        return said

    def wait_for_checkpoint(self, step):
        for _ in range(20_000):
            if list(self.script.repository.glob(f"checkpoint-{step}-g*/manifest.json")):
                return
            assert self.is_alive(), self.process.communicate()[0]
            time.sleep(0.005)
        raise AssertionError(f"checkpoint-{step} did not come")
