"""The talk with SLURM: its own programs are asked, and their answers are read."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from resilient.errors import ConfigError, DeadlineExceeded, NotRunning

_SECONDS = 60.0
_FIELD = re.compile(r"(?:^| )([A-Za-z/:]+)=(\S*)")
_JOB = re.compile(r"[0-9]+(?:_[0-9]+)?")
_SILENT = ("Unable to contact slurm", "Connection refused", "Socket timed out")


@dataclass(frozen=True, slots=True)
class JobState:
    """What SLURM says of a job, or of one task of an array.

    Attributes:
        job: its number; ``ARRAY_TASK`` for a task.
        name: of the job.
        state: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``CANCELLED``, ...
        reason: why it waits, or why it ended.
        starts: how often it was started again.
        nodes: where it runs or ran.
        exit_code: of its last start; None while it runs or waits.
        ends_at: when its time is over, as SLURM writes it.
        log: the file that its starts append to.
    """

    job: str
    name: str
    state: str
    reason: str
    starts: int
    nodes: str
    exit_code: int | None
    ends_at: str
    log: str


def check_job(job: str) -> str:
    """Return a job's number if it is one.

    Raises:
        ConfigError: it is none.
    """
    if not _JOB.fullmatch(job):
        raise ConfigError(f"{job!r} is no job of SLURM: 123, or 123_4 for a task of an array")
    return job


def submit(script: str) -> str:
    """Hand a script to ``sbatch`` and return the job's number.

    Raises:
        ConfigError: there is no sbatch, or SLURM refused the job.
        DeadlineExceeded: SLURM does not answer.
    """
    return _ask("sbatch", "--parsable", given=script).strip().partition(";")[0]


def query_jobs(job: str) -> list[JobState]:
    """Return what SLURM says of a job: one state, or one for each task of an array.

    Raises:
        NotRunning: SLURM does not know it, or not any more.
        ConfigError: there is no scontrol.
        DeadlineExceeded: SLURM does not answer.
    """
    try:
        said = _ask("scontrol", "show", "job", "-o", job)
    except ConfigError as error:
        if "Invalid job id" not in error.message:
            raise
        raise NotRunning(
            f"SLURM does not know job {job}: it never was, or ended some minutes ago",
            hint=f"sacct -j {job}",
        ) from error
    return [parse(line) for line in said.splitlines() if line.strip()]


def parse(line: str) -> JobState:
    """Return the state that a line of ``scontrol show job -o`` tells."""
    told = dict(_FIELD.findall(line))
    task = told.get("ArrayTaskId", "")
    job = f"{told['ArrayJobId']}_{task}" if task.isdecimal() else told.get("JobId", "")
    state = told.get("JobState", "")
    status, _, number = told.get("ExitCode", "0:0").partition(":")
    code = 128 + int(number) if int(number or 0) else int(status)
    has_ended = state not in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING")
    return JobState(
        job,
        told.get("JobName", ""),
        state,
        _known(told.get("Reason", "")),
        int(told.get("Restarts", "0")),
        _known(told.get("NodeList", "")),
        code if has_ended else None,
        _known(told.get("EndTime", "")),
        told.get("StdOut", ""),
    )


def _known(text: str) -> str:
    return "" if text in ("(null)", "None", "Unknown", "N/A") else text


def _ask(program: str, *arguments: str, given: str = "") -> str:
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"no {program} on this machine", hint="ssh LOGIN-NODE")
    try:
        done = subprocess.run(  # noqa: S603 - SLURM's own programs, and checked words
            [path, *arguments],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise _silent(program, f"nothing within {_SECONDS:g} s") from error
    said = " ".join(done.stderr.split())
    if done.returncode and any(one in said for one in _SILENT):
        raise _silent(program, said)
    if done.returncode:
        raise ConfigError(f"{program} ended with {done.returncode}: {said}", hint="sinfo")
    return done.stdout


def _silent(program: str, said: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"SLURM does not answer {program}: {said}",
        deadline_seconds=_SECONDS,
        hint="scontrol ping; squeue --me",
    )
