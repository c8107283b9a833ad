"""Client of SLURM that runs SLURM's own programs and parses their output."""

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
    """State of a job, or of one task of an array, in SLURM.

    Attributes:
        job: Number of the job; ``ARRAY_TASK`` for a task.
        name: Name of the job.
        state: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``CANCELLED``, ...
        reason: Reason why the job waits, or why it ended.
        starts: Number of restarts.
        nodes: Nodes of the job.
        exit_code: Exit code of its last start; None while it runs or waits.
        ends_at: End of its time, as SLURM writes it.
        log: File to which its starts append.
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
    """Return the number of a job unchanged if it is valid.

    Raises:
        ConfigError: The text is no job number.
    """
    if not _JOB.fullmatch(job):
        raise ConfigError(f"{job!r} is not a SLURM job: use 123, or 123_4 for a task of an array")
    return job


def submit(script: str) -> str:
    """Submit a script with ``sbatch`` and return the number of the job.

    Raises:
        ConfigError: sbatch is missing, or SLURM refused the job.
        DeadlineExceeded: SLURM does not answer.
    """
    return _ask("sbatch", "--parsable", stdin_text=script).strip().partition(";")[0]


def query_jobs(job: str) -> list[JobState]:
    """Return the state of a job, or of each task of an array.

    Raises:
        NotRunning: SLURM does not know the job, or no longer knows it.
        ConfigError: scontrol is missing.
        DeadlineExceeded: SLURM does not answer.
    """
    try:
        output = _ask("scontrol", "show", "job", "-o", job)
    except ConfigError as error:
        if "Invalid job id" not in error.message:
            raise
        raise NotRunning(
            f"SLURM does not know job {job}: it never existed, or ended some minutes ago",
            hint=f"sacct -j {job}",
        ) from error
    return [parse(line) for line in output.splitlines() if line.strip()]


def parse(line: str) -> JobState:
    """Parse a line of ``scontrol show job -o``."""
    fields = dict(_FIELD.findall(line))
    task = fields.get("ArrayTaskId", "")
    job = f"{fields['ArrayJobId']}_{task}" if task.isdecimal() else fields.get("JobId", "")
    state = fields.get("JobState", "")
    status, _, number = fields.get("ExitCode", "0:0").partition(":")
    code = 128 + int(number) if int(number or 0) else int(status)
    has_ended = state not in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING")
    return JobState(
        job,
        fields.get("JobName", ""),
        state,
        _without_placeholder(fields.get("Reason", "")),
        int(fields.get("Restarts", "0")),
        _without_placeholder(fields.get("NodeList", "")),
        code if has_ended else None,
        _without_placeholder(fields.get("EndTime", "")),
        fields.get("StdOut", ""),
    )


def _without_placeholder(text: str) -> str:
    return "" if text in ("(null)", "None", "Unknown", "N/A") else text


def _ask(program: str, *arguments: str, stdin_text: str = "") -> str:
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"no {program} on this machine", hint="ssh LOGIN-NODE")
    try:
        process = subprocess.run(  # noqa: S603 - SLURM's own programs, and checked words
            [path, *arguments],
            input=stdin_text,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise _unavailable_error(program, f"no answer within {_SECONDS:g} s") from error
    message = " ".join(process.stderr.split())
    if process.returncode and any(phrase in message for phrase in _SILENT):
        raise _unavailable_error(program, message)
    if process.returncode:
        raise ConfigError(f"{program} ended with {process.returncode}: {message}", hint="sinfo")
    return process.stdout


def _unavailable_error(program: str, message: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"SLURM does not answer {program}: {message}",
        deadline_seconds=_SECONDS,
        hint="scontrol ping; squeue --me",
    )
