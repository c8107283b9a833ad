"""Four faults, each at a moment that the seed determines."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from examples.demo.job import Job

PREEMPTED = 75


@dataclass(frozen=True)
class Outcome:
    """Result of one fault.

    Attributes:
        fault: Description of the fault.
        exit_code: Exit code of the command as a shell shows it; None if it continued by itself.
        lost_steps: Steps that were trained again.
        seconds: Time from the fault, or from the restart after it, to the next new step.
        checkpoint: Checkpoint from which the next attempt began.
        why: Reason for this checkpoint.
    """

    fault: str
    exit_code: int | None
    lost_steps: int
    seconds: float
    checkpoint: str
    why: str


def kill_a_rank(job: Job, random: Random, interval: int) -> Outcome:
    """Send SIGKILL to a random rank at a random step; the agent restarts the group by itself."""
    step, rank = random.randrange(interval + 1, 2 * interval), random.randrange(2)
    job.until(lambda: job.last_step() >= step)

    def strike() -> tuple[str, int | None]:
        job.rank(rank).kill()
        return f"SIGKILL to rank {rank}", None

    return _observe(job, strike)


def ask_to_stop(job: Job, random: Random, interval: int) -> Outcome:
    """Send SIGTERM to the job: all ranks agree on a step, save it, and the command exits 75."""
    step = random.randrange(2 * interval + 1, 3 * interval)
    job.until(lambda: job.last_step() >= step)

    def strike() -> tuple[str, int]:
        job.terminate()
        code = job.wait()
        if code != PREEMPTED:
            raise RuntimeError(f"exit code {code} after SIGTERM, expected {PREEMPTED}")
        return "SIGTERM to the job", code

    return _observe(job, strike)


def kill_in_a_save(job: Job, random: Random, interval: int) -> Outcome:
    """Send SIGKILL to every process while the files of a checkpoint are being written."""
    step = random.randrange(3 * interval + 1, 4 * interval)
    job.until(lambda: job.last_step() >= step)
    job.until(job.saving, every_seconds=0.0)

    def strike() -> tuple[str, int]:
        code = job.strike_all()
        cut_short = job.saving()
        moment = f"while it wrote {cut_short}" if cut_short else "just after a save"
        return f"SIGKILL to the job {moment}", code

    return _observe(job, strike)


def flip_a_bit(job: Job, random: Random, interval: int) -> Outcome:
    """Send SIGKILL to the job, then change one bit of the newest checkpoint on the disk."""
    step = random.randrange(4 * interval + 1, 5 * interval)
    job.until(lambda: job.last_step() >= step)

    def strike() -> tuple[str, int]:
        code = job.strike_all()
        newest = job.newest()
        files = sorted((job.folder / newest.folder).iterdir())
        path = random.choice([file for file in files if file.suffix in {".json", ".safetensors"}])
        content = bytearray(path.read_bytes())
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        return f"one bit flipped in {newest}/{path.name}", code

    return _observe(job, strike)


def _observe(job: Job, strike: Callable[[], tuple[str, int | None]]) -> Outcome:
    """Apply a fault, start the same command again if it ended, and observe where it continues."""
    fact_count, logged_steps = len(job.facts()), len(job.steps())
    fault, exit_code = strike()
    last_step = job.last_step()
    logged_steps = max(logged_steps, len(job.steps()))
    began_seconds = time.monotonic()
    if exit_code is not None:
        job.start()
    job.until(lambda: len(job.steps()) > logged_steps)
    seconds = time.monotonic() - began_seconds
    facts = job.facts()[fact_count:]
    restoration = next(fact for fact in facts if fact["event"] == "CheckpointRestored")
    skips = [fact for fact in facts if fact["event"] == "CheckpointSkipped"]
    reasons = "; ".join(f"{fact['checkpoint']}: {_short(fact['reason'])}" for fact in skips)
    lost_steps = last_step - restoration["step"]
    return Outcome(
        fault,
        exit_code,
        lost_steps,
        seconds,
        restoration["checkpoint"],
        reasons or "the newest one",
    )


def _short(reason: str) -> str:
    """Return the first clause of a reason, without the path before it."""
    return re.sub(r" \(.*|, or .*", "", reason.rpartition(": ")[2])


FAULTS = (kill_a_rank, ask_to_stop, kill_in_a_save, flip_a_bit)
