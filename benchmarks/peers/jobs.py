"""Job of two ranks under a launcher: ours, or torchrun with the Trainer of Transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from resilient.elastic.restart_controller import newest_committed
from resilient.format.keys import CheckpointId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS = 2
STEPS = 100_000
PATIENCE_SECONDS = 300.0
_SCRIPT = Path(__file__).parent / "recovering.py"
_WARM = "resilient-warm\n"
_OURS = ("resilient_cli", "train", "--nproc-per-node", str(RANKS))
LAUNCHERS = {
    "ours": (*_OURS, "--events"),
    "ours_held": (*_OURS, "--every", "memory=1step", "--events"),
    "torchrun_hf": (
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", "3",
    ),
}  # fmt: skip


class DidNotRecover(Exception):
    """Failure of a job to finish another step after one of its ranks was killed."""


class Job:
    """One start of a contender.

    Args:
        name: Name of the contender.
        folder: Folder of its run, possibly with checkpoints of an earlier start.
        save_steps: Steps between two saves.
    """

    def __init__(self, name: str, folder: Path, save_steps: int) -> None:
        self.name, self.folder = name, folder
        self.is_ours = name in ("ours", "ours_held")
        launcher = [sys.executable, "-m", *LAUNCHERS[name]]
        launcher += [str(folder / "events")] if self.is_ours else []
        owner = "ours" if self.is_ours else "hf"
        script = [str(_SCRIPT), owner, str(folder), str(STEPS), str(save_steps)]
        with (folder / "said.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [*launcher, *script],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all its processes at once, like a power failure."""
        for pid in (self._process.pid, *descendants(self._process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def stop(self, within_seconds: float) -> int | None:
        """Ask its launcher to end; return its exit code, or None after the timeout."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return None

    def children(self) -> list[int]:
        """Return the processes that the launcher has started."""
        return _children(self._process.pid)

    def is_warm(self) -> bool:
        """Return True if the fork server of the job is running; the peer has none."""
        if not self.is_ours:
            return True
        return any(Path(f"/proc/{pid}/comm").read_text() == _WARM for pid in self.children())

    def marks(self, rank: int) -> list[dict[str, Any]]:
        """Return the marks that a rank has written."""
        path = self.folder / f"marks-{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """Return the steps that a rank has finished."""
        return [mark for mark in self.marks(rank) if mark["name"].startswith("step ")]

    def until(self, holds: Callable[[], object], within_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for a condition while the job runs.

        Raises:
            DidNotRecover: The job ended, or the time is over.
        """
        deadline_seconds = time.monotonic() + within_seconds
        while not holds():
            is_late = time.monotonic() > deadline_seconds
            if is_late or self._process.poll() is not None:
                output = (self.folder / "said.txt").read_text(encoding="utf-8", errors="replace")
                raise DidNotRecover(f"{self.name} did not get there:\n{output[-3000:]}")
            time.sleep(0.002)

    def has_ended(self) -> bool:
        """Return True if its launcher has ended."""
        return self._process.poll() is not None


def descendants(pid: int) -> Iterator[int]:
    """Yield all processes below a process, its children first."""
    found = _children(pid)
    yield from found
    for child in found:
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # Each thread lists the processes that it started. A thread that has ended lists none.
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, path.read_text(encoding="utf-8").split())
    return found


def saved_step(name: str, folder: Path) -> int:
    """Return the step of the newest complete checkpoint of a contender's run; 0 for none."""
    if name == "ours":
        found = newest_committed(str(folder / "output"))
        return found.step if isinstance(found, CheckpointId) else 0
    return max((step for step, _ in whole_checkpoints(folder / "output")), default=0)


def whole_checkpoints(output: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of Transformers that contain the file it writes last."""
    folders = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    return sorted((int(path.name.rpartition("-")[2]), path) for path in folders)
