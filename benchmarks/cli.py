"""CPU seconds of `resilient` commands, compared with Python, torchrun and accelerate.

The figure of a call is the user and system time of the child process, as the kernel counts it. A
busy machine hardly changes this time. `ckpt ls` lists ten committed checkpoints in a local folder.
`verify` verifies every byte of a checkpoint of 343 MiB on one core. `raw` only reads as many bytes
on one core, in one stream, into memory whose pages exist already. `cold` reads from disk, `warm`
from the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import Report, installed, medians, ratio, take_turns
from benchmarks.peers.rounds import medians as seconds
from benchmarks.peers.rounds import ratios as speeds
from benchmarks.peers.rounds import turns
from benchmarks.peers.verifying import commit_files, verifiers
from resilient.checkpoint.generations import claim
from resilient.clock import SystemClock
from resilient.storage.open import open_store

ROUNDS = 7
CHECKPOINTS = 10
VERIFIED_BYTES = 343 << 20


def run(rounds: int) -> Report:
    """Measure every command `rounds` times."""
    with tempfile.TemporaryDirectory() as folder:
        _write_repository(folder)
        ours = [sys.executable, "-m", "resilient_cli"]
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "help": [*ours, "--help"],
            "ls": [*ours, "ckpt", "ls", folder],
            "version": [*ours, "version"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--help"],
        }
        if installed("accelerate"):
            commands["accelerate"] = [
                sys.executable, "-m", "accelerate.commands.accelerate_cli", "--help",
            ]  # fmt: skip
        contenders = {name: partial(cpu_seconds, command) for name, command in commands.items()}
        # Call each command once unmeasured, so that byte code and page cache are warm for all.
        take_turns(contenders, 1)
        found = take_turns(contenders, rounds)
    peers = [name for name in ("python", "torchrun", "accelerate") if name in commands]
    ratios = {
        f"{name}_over_{peer}": ratio(found, name, peer)
        for name in ("help", "ls", "version")
        for peer in peers
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:
        proved = turns(verifiers(Path(folder), VERIFIED_BYTES), Path(folder), rounds)
    pairs = {
        "verify_throughput_over_raw": ("raw_cold", "verify_cold"),
        "verify_throughput_over_raw_warm": ("raw_warm", "verify_warm"),
    }
    figures = {"rounds": rounds, **medians(found, "cpu_seconds"), **seconds(proved)}
    return Report("cli", ratios | speeds(proved, pairs), figures)


def cpu_seconds(command: list[str]) -> float:
    """Return the user and system time of a child process that must succeed."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        text = child.stderr.read() if child.stderr else b""
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command}: {text.decode()}"
    return usage.ru_utime + usage.ru_stime


def _write_repository(folder: str) -> None:
    """Commit small checkpoints; a listing does not depend on the size of their files."""
    store = open_store(str(Path(folder)))
    generation = claim(store, None, cause="start", clock=SystemClock())
    for step in range(1, CHECKPOINTS + 1):
        commit_files(store, generation, step, {})
