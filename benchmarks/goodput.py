"""Steps kept under a published trace of spot preemptions, against torchrun with HF's Trainer.

`peers/traces/us_west_2c.json` has the number of available spot instances out of four, per tick. A
job runs while all four are available (here as two ranks of the demo's model, see `recovery`). It
gets a notice two minutes before an instance is taken away, as from AWS, and then loses all its
processes. The same command starts it again when all instances are back. Time is scaled: a tick of
300 s lasts `TICK_SECONDS` (environment, 5 by default), and the notice is scaled likewise. Starting
Python, importing torch and building the model are not scaled, so both lose more here than in
reality. Both save every hundred steps. A job that ends by itself is started again. The result is
the step of the newest complete checkpoint at the end. The ideal is the number of steps that fit
into the time with all instances available, at the faster contender's median step time.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Report, installed
from benchmarks.peers.jobs import Job, saved_step

if TYPE_CHECKING:
    from collections.abc import Iterable

ROUNDS = 1
CONTENDERS = ("ours", "torchrun_hf")
TRACE = Path(__file__).parent / "peers" / "traces" / "us_west_2c.json"
WHOLE = 4
NOTICE_SECONDS = 120.0
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
SAVE_STEPS = 100


@dataclass(frozen=True)
class Phase:
    """Period in which the machines are available, or are not."""

    is_up: bool
    seconds: float


@dataclass
class Outcome:
    """Result of a job.

    Attributes:
        kept: Step of the newest complete checkpoint at the end.
        lost: Steps that were trained and not kept, over all attempts.
        lives: Number of starts.
        in_time: Number of attempts that ended before their machines were taken away.
        start_seconds: Median time from a start to the first finished step.
        step_seconds: Median time of all steps.
    """

    kept: int
    lost: int
    lives: int
    in_time: int
    start_seconds: float
    step_seconds: float


def phases(counts: Iterable[int], tick_seconds: float) -> list[Phase]:
    """Return the periods with and without all machines, from the number available per tick."""
    runs = [(is_up, len(list(run))) for is_up, run in groupby(count == WHOLE for count in counts)]
    return [Phase(is_up, ticks * tick_seconds) for is_up, ticks in runs]


def run(rounds: int) -> Report:
    """Replay the trace ``rounds`` times for each contender, one after the other."""
    trace = json.loads(TRACE.read_text(encoding="utf-8"))
    tick_seconds = float(os.environ.get("TICK_SECONDS", "5"))
    scale = tick_seconds / trace["gap_seconds"]
    trace_phases = phases(trace["data"], tick_seconds)
    up_seconds = sum(phase.seconds for phase in trace_phases if phase.is_up)
    found: dict[str, list[Outcome]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in CONTENDERS[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                found[name].append(replay(name, Path(folder), trace_phases, NOTICE_SECONDS * scale))
    return report(found, up_seconds, {"trace": trace["source"], "tick_seconds": tick_seconds})


def report(found: dict[str, list[Outcome]], up_seconds: float, notes: dict[str, Any]) -> Report:
    """Return the ratios of all replays."""
    middle: dict[str, dict[str, float]] = {
        name: {
            field.name: round(median(getattr(outcome, field.name) for outcome in outcomes), 4)
            for field in fields(Outcome)
        }
        for name, outcomes in found.items()
    }
    ideal = up_seconds / min(medians["step_seconds"] for medians in middle.values())
    kept_steps = {name: medians["kept"] for name, medians in middle.items()}
    ratios = {f"{name}_over_ideal": round(steps / ideal, 4) for name, steps in kept_steps.items()}
    ratios["ours_over_torchrun_hf"] = round(
        kept_steps["ours"] / max(kept_steps["torchrun_hf"], 1), 4
    )
    figures = {f"{name}_{what}": value for name in middle for what, value in middle[name].items()}
    return Report(
        "goodput",
        ratios,
        {
            "rounds": len(found["ours"]),
            "up_seconds": up_seconds,
            "ideal_steps": round(ideal),
            **figures,
            **notes,
            "transformers_version": installed("transformers"),
        },
    )


def replay(name: str, folder: Path, trace_phases: list[Phase], notice_seconds: float) -> Outcome:
    """Run a job through the phases in real time."""
    lost, starts, in_time, seen_count = 0, [], 0, 0
    until = time.monotonic()
    for phase in trace_phases:
        until += phase.seconds
        if not phase.is_up:
            time.sleep(max(until - time.monotonic(), 0.0))
            continue
        while time.monotonic() < until - notice_seconds:
            began = time.monotonic()
            with Job(name, folder, SAVE_STEPS) as job:
                while time.monotonic() < until - notice_seconds and not job.has_ended():
                    time.sleep(0.01)
                if job.has_ended():
                    # The job ended by itself: no machine was taken away.
                    time.sleep(0.1)
                elif job.stop(max(until - time.monotonic(), 0.0)) is not None:
                    in_time += 1
            steps = job.steps(0)
            new_steps, seen_count = steps[seen_count:], len(steps)
            starts.append(
                new_steps[0]["at_seconds"] - began if new_steps else time.monotonic() - began
            )
            reached = max((int(record["name"].split()[1]) for record in new_steps), default=0)
            lost += max(reached - saved_step(name, folder), 0)
    marks = [mark["at_seconds"] for mark in job.steps(0)]
    return Outcome(
        kept=saved_step(name, folder),
        lost=lost,
        lives=len(starts),
        in_time=in_time,
        start_seconds=median(starts),
        step_seconds=median(b - a for a, b in pairwise(marks)),
    )
