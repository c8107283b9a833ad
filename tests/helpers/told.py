"""Records of made-up runs: who told what, and how many seconds after the beginning."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from resilient.goodput.event_log import parse_line

BEGAN = 1_780_000_000


def line(at_seconds, event, **fields):
    """Return the line of an event file; ``agent`` names the agent that told it."""
    at = datetime.fromtimestamp(BEGAN + at_seconds, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at, "event": event, **fields})


def record(at_seconds, event, **fields):
    parsed = parse_line(line(at_seconds, event, **fields))
    assert parsed is not None, event
    return parsed


RANK = {"rank": 0}
SIZES = {"size_bytes": 1000, "written_bytes": 600}


def killed_run(agent="a:1"):
    """Return lines: a rank is killed after step 9, then the machine is taken; three lives.

    Step 5 is saved at 11 s; life 1 dies at 15 s and is gone at 16 s; life 2 goes on from step 5 at
    20 s, ends its first step at 21 s, is asked to stop at 30 s and saves step 12; nobody is there
    from 33 s to 40 s; life 3 makes the last steps, up to 15.
    """
    rendezvous = {"met_seconds": 0.5, "start_seconds": 0.25}
    first, second, third = ({**RANK, "generation": number} for number in (1, 2, 3))
    failure = {"cause": "signal", "status": -9, "rank": 1, "host": "a"}
    save = {"checkpoint": "checkpoint-5-g1", "stall_seconds": 0.1, "commit_seconds": 1.5}
    start = {"agent": agent, "world_size": 2}
    end = {"agent": agent, "stop_seconds": 1.0}
    return [
        line(0, "AgentStarted", agent=agent),
        line(2, "WorkerGroupStarted", attempt="x", cause="start", **start, **rendezvous),
        line(6, "GenerationClaimed", parent="", cause="start", **first),
        line(6, "TrainingStarted", step=0, global_step=0, max_steps=15, **first),
        line(7, "FirstStepEnded", step=1, global_step=1, **first),
        line(11.5, "PhaseEnded", step=5, phase="saving", took_seconds=0.5, **first),
        line(12, "MetricsLogged", step=6, metrics={"loss": 3.0}, **first),
        line(12.5, "CheckpointCommitted", **save, **SIZES, **first),
        line(14, "MetricsLogged", step=8, metrics={"loss": 2.5}, **first),
        line(16, "AttemptEnded", attempt="x", ended="failed", step=9, **end),
        line(16.1, "WorkerFailed", agent=agent, **failure),
        line(17, "WorkerGroupStarted", attempt="y", cause="failure", **start),
        line(20, "CheckpointRestored", step=5, took_seconds=1.0, **second),
        line(20, "TrainingStarted", step=5, global_step=5, max_steps=15, **second),
        line(21, "FirstStepEnded", step=6, global_step=6, **second),
        line(22, "MetricsLogged", step=8, metrics={"loss": 2.5}, **second),
        line(24, "PhaseEnded", step=9, phase="evaluating", took_seconds=1.0, **second),
        line(30, "StopRequested", agent=agent, reason="aws: spot terminate"),
        line(31, "TrainingStopped", step=12, global_step=12, reason="aws", **second),
        line(32, "AttemptEnded", attempt="y", ended="stopped", step=12, **end),
        line(33, "RunEnded", agent=agent, exit_code=75),
        line(40, "AgentStarted", agent="a:2"),
        line(41, "WorkerGroupStarted", agent="a:2", attempt="z", cause="start", world_size=1),
        line(44, "TrainingStarted", step=12, global_step=12, max_steps=15, **third),
        line(45, "FirstStepEnded", step=13, global_step=13, **third),
        line(47, "TrainingEnded", step=15, global_step=15, **third),
        line(48, "AttemptEnded", agent="a:2", attempt="z", ended="succeeded", step=15),
        line(49, "RunEnded", agent="a:2", exit_code=0),
    ]


def records_of(lines):
    return [
        record_of_line for record_of_line in map(parse_line, lines) if record_of_line is not None
    ]
