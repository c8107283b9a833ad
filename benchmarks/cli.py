"""CPU seconds until a command of `resilient` has answered, against Python, torchrun and accelerate.

Measured per call: user and system time of the child process as the kernel counts it, which a
busy machine hardly changes. `ckpt ls` lists ten committed checkpoints in a local folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import Report, installed, medians, ratio, take_turns
from resilient.clock import SystemClock
from resilient.format.manifest import Manifest, PartEntry
from resilient.format.names import CheckpointId
from resilient.format.shard import HostFile
from resilient.storage.open import open_store
from resilient.vault.registry.commit import commit, gather_receipts
from resilient.vault.registry.generations import claim
from resilient.vault.saving.write import write

ROUNDS = 7
CHECKPOINTS = 10


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
        # Once unmeasured: byte code and the page cache are warm for everybody.
        take_turns(contenders, 1)
        found = take_turns(contenders, rounds)
    peers = [name for name in ("python", "torchrun", "accelerate") if name in commands]
    ratios = {
        f"{name}_over_{peer}": ratio(found, name, peer)
        for name in ("help", "ls", "version")
        for peer in peers
    }
    return Report("cli", ratios, {"rounds": rounds, **medians(found, "cpu_seconds")})


def cpu_seconds(command: list[str]) -> float:
    """Return the user and system time of a child that must succeed."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        text = child.stderr.read() if child.stderr else b""
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command}: {text.decode()}"
    return usage.ru_utime + usage.ru_stime


def _write_repository(folder: str) -> None:
    """Commit small checkpoints; the size of their files does not matter to a listing."""
    store, clock = open_store(str(Path(folder))), SystemClock()
    life = claim(store, None, cause="start", clock=clock)
    for step in range(1, CHECKPOINTS + 1):
        checkpoint = CheckpointId(life.number, step)
        part = PartEntry("trainer", "replicated", "state.json")
        receipt = write(store, checkpoint, 0, [HostFile("state.json", b"{}\n")], [part])
        world = {"size": 1, "strategy": "single"}
        about = Manifest(life.run_id, checkpoint, None, clock.now_iso(), world, (), (), ())
        commit(store, gather_receipts(about, [receipt]))
