"""SLURM: the end of the job, from ``scontrol`` or the environment.

SLURM announces an end by signals (``--signal=USR1@120``, SIGTERM at a preemption), which the
agent hears anyway. What no signal says is when: ``scontrol show job`` knows it, also after an
extension or a preemption, else ``SLURM_JOB_END_TIME`` does as of the start of the job.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import datetime
from typing import TYPE_CHECKING

from resilient.agent.notices.notice import Notice, SourceGarbled, SourceLost
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCONTROL_SECONDS = 10.0
_END = re.compile(r"\bEndTime=(\S+)")


class SlurmSource:
    """Knows when the job ends.

    Args:
        environ: of the job.
        scontrol: the program; empty if there is none.

    Raises:
        ConfigError: this is no job of SLURM.
    """

    name = "slurm"
    every_seconds = 30.0

    def __init__(self, environ: Mapping[str, str], scontrol: str | None = None) -> None:
        self._job = environ.get("SLURM_JOB_ID", "")
        self._planned = environ.get("SLURM_JOB_END_TIME", "")
        self._scontrol = (shutil.which("scontrol") or "") if scontrol is None else scontrol
        if not self._job:
            raise ConfigError(
                "--notice slurm: this is no job of SLURM, SLURM_JOB_ID is not set",
                hint="start it with srun or sbatch, or leave --notice out",
            )

    def look(self) -> Notice | None:
        """Return the end of the job, however far it is.

        Raises:
            SourceLost: SLURM does not answer, and the environment does not say.
            SourceGarbled: the answer makes no sense.
        """
        reason = f"slurm: end of job {self._job}"
        if self._scontrol:
            try:
                at_seconds = self._ask()
            except SourceLost:
                if not self._planned:
                    raise
            else:
                return None if at_seconds is None else Notice(reason, at_seconds, is_for_all=True)
        if not self._planned:
            return None
        try:
            return Notice(reason, float(self._planned), is_for_all=True)
        except ValueError as error:
            raise SourceGarbled(f"SLURM_JOB_END_TIME is {self._planned[:40]!r}") from error

    def acknowledge(self) -> None:
        """Do nothing: the exit code tells SLURM."""

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""

    def _ask(self) -> float | None:
        command = [self._scontrol, "show", "job", "-o", self._job]
        try:
            answer = subprocess.run(  # noqa: S603 - SLURM's own program, and a job's number
                command, capture_output=True, timeout=_SCONTROL_SECONDS, check=False, text=True
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceLost(f"scontrol did not answer: {error}") from error
        if answer.returncode:
            raise SourceLost(f"scontrol ended with {answer.returncode}: {answer.stderr[:200]}")
        found = _END.search(answer.stdout)
        if not found:
            raise SourceGarbled("scontrol says no EndTime")
        if found[1] in ("Unknown", "N/A", "None"):
            return None
        try:
            # Without a zone: in that of this host.
            return datetime.fromisoformat(found[1]).timestamp()
        except ValueError as error:
            raise SourceGarbled(f"EndTime is {found[1][:40]!r}") from error
