"""Ranks as forks of one process: to import DeepSpeed takes longer than what they do."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib import import_module

from resilient.distributed.launch_env import LaunchEnv, World, write_launch
from tests.process.gangs import ROOT
from tests.services.ports import held_ports

# What making an engine and an optimizer would import in each rank.
_HEAVY = (
    "deepspeed",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "resilient.strategies.deepspeed",
    "resilient.strategies.fsdp",
    "torch._inductor.compile_fx",
)


def preload():
    for name in _HEAVY:
        import_module(name)
    # DeepSpeed asks for a collection at each turn; what was imported need not be looked at.
    gc.collect()
    gc.freeze()


def fork_world(size, port, work):
    """Start a world of ranks that each do ``work``; return their pids, or None in a rank."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os.environ.update(write_launch(LaunchEnv(World(rank, size, rank), "127.0.0.1", port)))
            work()
            return None
        pids.append(pid)
    return pids


def exit_codes(pids):
    """Wait for all ranks; when one fails the others are killed, which would wait for it in gloo."""
    left, codes = set(pids), set()
    while left:
        for pid in tuple(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                codes.add(os.waitstatus_to_exitcode(status))
        if codes - {0}:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def run_forks(script, folder, worlds, *more, within_seconds=600):
    """Run ``script FOLDER PORT... MORE...`` and insist on success."""
    path = folder / "said"
    with (
        held_ports(worlds) as ports,
        path.open("w") as said,
        _started(script, folder, [*ports, *more], said) as parent,
    ):
        assert parent.wait(within_seconds) == 0, path.read_text()[-3000:]


@contextmanager
def _started(script, folder, words, said):
    """Start the script in a process group of its own; nothing of that is left."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    worlds = subprocess.Popen(
        [sys.executable, str(script), str(folder), *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield worlds
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worlds.pid, signal.SIGKILL)
        worlds.wait()
