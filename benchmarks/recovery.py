"""Seconds from SIGKILL of one rank to the next completed step, against torchrun with HF's Trainer.

Both train the demo's model (`examples/gpt.py`, a million parameters, AdamW) on two ranks with gloo
and one thread each. Both save every ten steps, and `ours_held` also keeps each step in memory. Each
turn starts a new job and kills one of its ranks at a random moment of the same step. The figure is
the time until every rank has finished a step again. `transformers` resumes from its last
checkpoint, as its users do. Our job is killed only after its fork server is running, which takes a
few seconds in a first attempt.

A turn without recovery within 60 s is counted (`turns_without_recovery`) and repeated. `steps_lost`
counts the finished steps that were trained a second time. `steps_lost_most` is the maximum over all
turns.

The parts of a recovery are medians, so their sum may differ from the total:

* `detect`: until the agent detects the failure.
* `teardown`: until the last worker has ended.
* `rendezvous`.
* `start`: until the first line of the script. The peer reports no earlier part, so its `start`
  begins with the kill.
* `imports`.
* `build`: of model and data.
* `restore`: until training begins.
* `first_step`.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Report, installed, medians, ratio, spread, take_turns
from benchmarks.peers.jobs import LAUNCHERS, RANKS, DidNotRecover, Job
from benchmarks.peers.quiet import others_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
KILLED_RANK = 1
KILLED_AT_STEP = 37
SAVE_STEPS = 10
RECOVERED_WITHIN_SECONDS = 60.0
HANGS_MAX = 10


def run(rounds: int) -> Report:
    """Kill a rank of each contender `rounds` times in shuffled order."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in LAUNCHERS}
    hangs = dict.fromkeys(LAUNCHERS, 0)

    def contender(name: str) -> Callable[[], float]:
        moments = Random(0)  # noqa: S311 - the same for all

        def turn() -> float:
            while True:
                with (
                    tempfile.TemporaryDirectory(dir=".") as folder,
                    Job(name, Path(folder), SAVE_STEPS) as job,
                ):
                    try:
                        parts[name].append(recover(job, moments.random()))
                    except DidNotRecover:
                        hangs[name] += 1
                        if hangs[name] > HANGS_MAX:
                            raise
                        continue
                return parts[name][-1]["total"]

        return turn

    found = take_turns({name: contender(name) for name in LAUNCHERS}, rounds)
    figures: dict[str, Any] = {"rounds": rounds, **medians(found, "seconds")}
    for name, records in parts.items():
        for part in records[0]:
            unit = part if part in ("steps_lost", "others_cores") else f"{part}_seconds"
            value = round(median(record[part] for record in records), 4)
            figures.setdefault(f"{name}_{unit}", value)
        figures[f"{name}_steps_lost_most"] = max(record["steps_lost"] for record in records)
        beyond = median(record["total"] - record["step"] for record in records)
        figures[f"{name}_seconds_beyond_one_step"] = round(beyond, 4)
    pair = ("ours", "torchrun_hf")
    figures |= {
        "ours_over_torchrun_hf_lowest_highest": spread(found, *pair),
        **{f"{name}_turns_without_recovery": count for name, count in hangs.items()},
        "transformers_version": installed("transformers"),
    }
    ratios = {
        f"{each_contender}_over_{pair[1]}": ratio(found, each_contender, pair[1])
        for each_contender in (pair[0], "ours_held")
    }
    return Report("recovery", ratios, figures)


def recover(job: Job, moment: float) -> dict[str, float]:
    """Kill a rank of a running job, and return the parts of its recovery in seconds.

    Args:
        job: Job that has been started.
        moment: Share of a step that is over at the kill, 0 to 1. At its beginning, the previous
            step may not yet be in the step cache.
    """
    job.until(lambda: len(job.steps(KILLED_RANK)) >= KILLED_AT_STEP and job.is_warm())
    count = len(job.steps(KILLED_RANK)) + KILLED_AT_STEP
    # Kill at the same place between two saves, after as many steps again at full speed.
    job.until(lambda: _is_there(job, count))
    before = {rank: job.steps(rank) for rank in range(RANKS)}
    marks = [mark["at_seconds"] for mark in before[KILLED_RANK][-KILLED_AT_STEP:]]
    step_seconds = median(b - a for a, b in pairwise(marks))
    time.sleep(moment * step_seconds)
    busy_seconds = others_seconds()
    killed_seconds = time.monotonic()
    os.kill(before[KILLED_RANK][-1]["pid"], signal.SIGKILL)
    old = {mark["pid"] for rank in before for mark in before[rank]}
    job.until(
        lambda: all(_again(job, rank, old) for rank in range(RANKS)), RECOVERED_WITHIN_SECONDS
    )
    firsts = [_again(job, rank, old)[0] for rank in range(RANKS)]
    ended_seconds = max(mark["at_seconds"] for mark in firsts)
    reached = max(int(mark["name"].split()[1]) for rank in before for mark in job.steps(rank)
                  if mark["pid"] in old)  # fmt: skip
    total = ended_seconds - killed_seconds
    return {
        "total": total,
        **parts_of(job, firsts[0], killed_seconds),
        "step": step_seconds,
        "steps_lost": reached - (int(firsts[0]["name"].split()[1]) - 1),
        "others_cores": abs(others_seconds() - busy_seconds) / total,
    }


def parts_of(job: Job, first: dict[str, Any], killed_seconds: float) -> dict[str, float]:
    """Return the seconds of each part of a recovery, up to the first step of rank 0."""
    seconds_by_name = {
        mark["name"]: mark["at_seconds"] for mark in job.marks(0) if mark["pid"] == first["pid"]
    }
    names = ("began", "imported", "built", "restored", first["name"])
    ends = [seconds_by_name[name] for name in names]
    parts = ("imports", "build", "restore", "first_step")
    inside = {name: b - a for name, a, b in zip(parts, ends, ends[1:], strict=False)}
    if not job.is_ours:
        return {"start": seconds_by_name["began"] - killed_seconds, **inside}
    text = (job.folder / "events" / "agent.jsonl").read_text(encoding="utf-8")
    events = [json.loads(line) for line in text.splitlines()]
    restarted = next(event for event in events if event["event"] == "GroupRestarted")
    started = [event for event in events if event["event"] == "WorkerGroupStarted"][1]
    assert started["is_warm"], "its workers were started cold"
    stopped_seconds = _monotonic(restarted["at"])
    return {
        "detect": stopped_seconds - restarted["stop_seconds"] - killed_seconds,
        "teardown": restarted["stop_seconds"],
        "rendezvous": started["met_seconds"],
        "start": seconds_by_name["began"] - stopped_seconds - started["met_seconds"],
        **inside,
    }


def _is_there(job: Job, count: int) -> bool:
    steps = job.steps(KILLED_RANK)
    is_place = int(steps[-1]["name"].split()[1]) % SAVE_STEPS == KILLED_AT_STEP % SAVE_STEPS
    return len(steps) >= count and is_place


def _again(job: Job, rank: int, old: set[int]) -> list[dict[str, Any]]:
    return [mark for mark in job.steps(rank) if mark["pid"] not in old]


def _monotonic(at: str) -> float:
    """Return the date of an event on the monotonic clock."""
    offset_seconds = datetime.now().astimezone().timestamp() - time.monotonic()
    return datetime.fromisoformat(at).timestamp() - offset_seconds
