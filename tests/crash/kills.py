"""Real processes, really killed: forked with torch loaded, killed with SIGKILL, looked at, resumed.

``python tests/crash/kills.py --kills 50 --seed 1`` prints one line of JSON. Every other death
is before or after a drawn operation of the file system, and the others at a drawn moment. A fork
that ends before its moment comes is a cycle, and no kill.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from resilient.checkpoint import catalog
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import BestOf, Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import ResilientError
from resilient.events import Emitter
from resilient.format.keys import CheckpointId, parse_checkpoint
from resilient.state_dict.resharding import load
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixFileSystem
from resilient.testing.disk_model import FileOpLog, RecordingFileSystem
from tests.crash.lives import KEEP, Folded

STEPS = 12
LIVES_MAX = 8
MOMENT_SECONDS_MAX = 0.05
FOREIGN = {"readme.txt": b"not ours", "checkpoint-2-g1/notes.txt": b"a person's"}


class Mortal(RecordingFileSystem):
    """Files of a process that kills itself before or after one of its operations."""

    def __init__(self, folder: Path, at: int | None, *, before: bool) -> None:
        super().__init__(PosixFileSystem(), folder, FileOpLog())
        self._at, self._before, self._begun = at, before, 0

    def _write_turn(self):
        if self._before and self._begun == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._begun += 1
        return super()._write_turn()

    def _record(self, *args, **more) -> None:
        super()._record(*args, **more)
        if not self._before and self.record.operations == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, said: int, at: int | None, *, before: bool) -> None:
    """Resume, train to the end saving every step, and say what was acknowledged."""
    store = LocalStore(folder / "run", Mortal(folder, at, before=before))
    clock = SystemClock()
    limits = CheckpointOptions(Retention(KEEP, (BestOf("loss"),)), 20.0)
    comms = ControlGroup(InMemoryKVStore(), World(), "life")
    checkpointer = CheckpointEngine(CheckpointContext(store, comms, limits, clock, Emitter(clock)))
    state, own = Folded(0), Folded(7)
    parts = {"model": Part(state), "rng_state": Part(own, "rank")}
    os.write(said, b"ready\n")
    checkpointer.resume(parts)
    while state.steps < STEPS:
        state.step()
        own.step()
        about = CheckpointInfo(metrics={"eval_loss": float(state.steps * 7 % 5)})
        checkpoint = checkpointer.save(state.steps, parts, about)
        checkpointer.wait()
        os.write(said, f"{checkpoint.folder}\n".encode())
    os.write(said, b"done\n")


def after(steps: int) -> list[int]:
    """Return the state of an unbroken run."""
    state = Folded(0)
    for _ in range(steps):
        state.step()
    return state.value.tolist()


@dataclass
class Killed:
    """What the kills showed.

    Attributes:
        seed: draws all of it.
        cycles: forks that were to die; some ended first.
        kills: forks that died of SIGKILL.
        in_operations: those of them that died at an operation.
        runs: folders that were trained to the end.
        saves: acknowledged saves.
        seconds: it took.
        violations: what did not hold, with the cycle.
    """

    seed: int
    cycles: int = 0
    kills: int = 0
    in_operations: int = 0
    runs: int = 0
    saves: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


def fork(folder: Path, draw: Random, *, mortal: bool) -> tuple[list[str], int, bool]:
    """Live one life in a fork; return what it said, how it ended, and if an operation killed it."""
    hearing, said = os.pipe()
    at = draw.randrange(1, 260) if mortal and draw.random() < 0.5 else None
    before, pause = draw.random() < 0.5, draw.uniform(0, MOMENT_SECONDS_MAX)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(hearing)
            train(folder, said, at, before=before)
            code = 0
        finally:
            os._exit(code)
    os.close(said)
    with os.fdopen(hearing) as lines:
        heard = [lines.readline().strip()]
        if mortal and at is None:
            time.sleep(pause)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        heard += [line.strip() for line in lines]
    _, status = os.waitpid(pid, 0)
    return heard, os.waitstatus_to_exitcode(status), at is not None


def wrong(folder: Path, heard: list[str], commits: int) -> list[str]:
    """Return which invariants do not hold, before any repair."""
    store, found = LocalStore(folder / "run"), []
    there = catalog.committed(store)
    for one in there:
        try:
            proved = read(store, one)
        except ResilientError as error:
            found.append(f"1: {one} is listed and not whole: {error}")
            continue
        state = Folded(0)
        load(proved.manifest, proved.files, {"model": Part(state)}, 0)
        if state.value.tolist() != after(one.step):
            found.append(f"5: {one} holds another state")
    newest = max(filter(None, map(parse_checkpoint, heard)), default=None)
    first = catalog.lineage(store).candidates[:1]
    if newest and (not first or first[0] < newest):
        found.append(f"2: {newest} was acknowledged; resume would take {first}")
    if len(there) < min(KEEP, commits):
        found.append(f"3: {len(there)} of {commits} are left")
    if any(store.get(key) != content for key, content in FOREIGN.items()):
        found.append("4: a foreign object was touched")
    return found


def saved(heard: list[str]) -> list[CheckpointId]:
    return [one for one in map(parse_checkpoint, heard) if one]


def run_to_the_end(draw: Random, figures: Killed, kills_max: int) -> None:
    """Kill lives of one run, one after the other, then let the last one end."""
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=os.environ.get("TMPDIR")))
    try:
        for key, content in FOREIGN.items():
            (folder / "run" / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / "run" / key).write_bytes(content)
        heard: list[str] = []
        for life in range(LIVES_MAX):
            mortal = life < LIVES_MAX - 1 and figures.kills < kills_max
            more, code, by_operation = fork(folder, draw, mortal=mortal)
            heard += more
            figures.cycles += mortal
            figures.kills += code == -signal.SIGKILL
            figures.in_operations += code == -signal.SIGKILL and by_operation
            found = wrong(folder, heard, len(saved(heard)))
            if code not in (0, -signal.SIGKILL):
                found.append(f"5: it ended with {code}")
            figures.violations += [f"cycle {figures.cycles}: {one}" for one in found]
            if code == 0:
                break
        figures.saves += len(saved(heard))
        figures.runs += 1
        if "done" not in heard:
            figures.violations.append(f"cycle {figures.cycles}: 5: no life came to its end")
    finally:
        shutil.rmtree(folder)


def kill_many(seed: int, kills: int, seconds: float = 0.0) -> Killed:
    """Return what so many forks that died showed, or as many as there was time for."""
    torch.set_num_threads(1)
    figures, draw, began = Killed(seed), Random(seed), time.monotonic()
    while figures.kills < kills and not 0 < seconds < figures.seconds:
        run_to_the_end(draw, figures, kills)
        figures.seconds = round(time.monotonic() - began, 1)
        sys.stderr.write(f"\r{figures.kills} of {kills} kills, {figures.seconds:.0f} s ")
    return figures


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="forks that die")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after; 0: never")
    given = parser.parse_args()
    figures = kill_many(given.seed, given.kills, given.seconds)
    sys.stdout.write(json.dumps(vars(figures)) + "\n")
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
