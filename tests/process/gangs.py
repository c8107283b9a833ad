"""Start one process per rank, as a launcher would."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from resilient.distributed.launch_env import LaunchEnv, World, write_launch
from tests.process import forked
from tests.services.ports import held_ports

ROOT = Path(__file__).parents[2]


@contextmanager
def gang_of(size, script, *arguments):
    """Yield the processes, by rank; none of them is left at the end."""
    with held_ports(1) as (port,):
        started = _start(size, port, script, *arguments)
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.communicate()


def _start(size, port, script, *arguments):
    started = []
    for rank in range(size):
        launch = LaunchEnv(World(rank, size, rank), "127.0.0.1", port)
        path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
        started.append(
            forked.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env={**os.environ, **write_launch(launch), "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def finish(processes, within_seconds=90):
    """Return (exit status, stdout, stderr) of each."""
    said = [process.communicate(timeout=within_seconds) for process in processes]
    return [(one.returncode, *texts) for one, texts in zip(processes, said, strict=True)]


def run_gang_to_end(size, script, *arguments):
    """Run a gang and insist on success."""
    with gang_of(size, script, *arguments) as gang:
        ends = finish(gang)
    assert [status for status, _, _ in ends] == [0] * size, "\n".join(err for _, _, err in ends)
    return ends
