"""The answers of ``slurm render``, ``submit`` and ``status``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resilient.exit_codes import EXIT_CODES
from resilient_cli.render import Answer, Facts, Table
from resilient_cli.views.words import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient_cli.slurm.job import SlurmJob
    from resilient_cli.slurm.queue import JobState

_BRIEF = {one.number: one.brief for one in EXIT_CODES}


def rendered(job: SlurmJob, script: str) -> Answer:
    """Return the script and the times that it is made of."""
    document = {**_times(job), "script": script}
    return Answer(
        "slurm.render", "script", document, (script.rstrip("\n"),), (script,), is_verbatim=True
    )


def submitted(job: SlurmJob, number: str, log: str) -> Answer:
    """Return the number of a job and what to look at next."""
    document = {**_times(job), "job": number, "log": log}
    pairs = (
        ("job", number),
        ("signal", f"{job.lead_seconds} s before its time is over; --grace {job.grace_seconds:g}"),
        *((("log", log),) if log else ()),
    )
    blocks = (
        Facts(pairs),
        f"next: resilient slurm status {number}",
        f"stop: scancel {number}; save and start again elsewhere: scontrol requeue {number}",
    )
    return Answer("slurm.submit", "submission", document, blocks, (number,))


def states(found: Sequence[JobState]) -> Answer:
    """Return what SLURM says of a job and its tasks."""
    rows = tuple(
        (
            one.job,
            one.name,
            one.state,
            str(one.starts),
            one.nodes or NONE,
            one.reason or NONE,
            _exit(one.exit_code),
        )
        for one in found
    )
    columns = ("JOB", "NAME", "STATE", "REQUEUED", "NODES", "REASON", "EXIT")
    logs = tuple(f"log: {one}" for one in sorted({one.log for one in found}))
    document = {"jobs": [asdict(one) for one in found]}
    ids = tuple(one.job for one in found)
    return Answer("slurm.status", "jobs", document, (Table(columns, rows), *logs), ids)


def _times(job: SlurmJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "nodes_min": job.nodes_min,
        "nodes_max": job.nodes_max,
        "grace_seconds": job.grace_seconds,
        "lead_seconds": job.lead_seconds,
    }


def _exit(code: int | None) -> str:
    if code is None:
        return NONE
    return f"{code} {_BRIEF[code]}" if code in _BRIEF else str(code)
