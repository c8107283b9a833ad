"""Identity of one start of the training command: unique name of the start, and scheduler job.

Each attempt stores the identity in its record in the repository (generation record). A later
attempt therefore finds the earlier attempts of the same run. An option such as ``--resume never``
can then apply until this run has a checkpoint.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

START = "RESILIENT_START"
JOB = "RESILIENT_JOB"
REQUEUES = "RESILIENT_REQUEUES"
_SLURM = "slurm/"
_TEXT_LENGTH_MAX = 200
_NUMBER_MAX = 1 << 31
# Kubernetes draws the last five characters of a pod's name from these letters and digits.
_POD = re.compile(r"(.+?)(?:-\d+)?-[bcdfghjklmnpqrstvwxz2456789]{5}")
_FIELDS = {"id": str, "job": str, "requeues": int, "training": int}


@dataclass(frozen=True, slots=True)
class StartIdentity:
    """Identity of one start of the command.

    Attributes:
        id: Name of the start. All attempts of one agent, or of one torchrun, share the name.
        job: Name of the scheduler job or of the rendezvous; empty if there is none.
        requeues: Number of times that the scheduler has started the job again.
        training: Number of the training within its script, 1 for the first.
    """

    id: str = ""
    job: str = ""
    requeues: int = 0
    training: int = 0

    def continues(self, earlier: StartIdentity) -> bool:
        """Return whether this start is the same run as an earlier one.

        SLURM counts the requeues of a job, so a second manual start in one allocation is a new run.
        """
        if self.training != earlier.training:
            return False
        if self.is_restart_of(earlier):
            return True
        return self._is_of_same_job(earlier) and not self.job.startswith(_SLURM)

    def is_restart_of(self, earlier: StartIdentity) -> bool:
        """Return whether the agent or SLURM restarted the earlier start, without a user."""
        if self.id and self.id == earlier.id:
            return True
        is_slurm = self.job.startswith(_SLURM)
        return is_slurm and self._is_of_same_job(earlier) and self.requeues > earlier.requeues

    def is_related(self, earlier: StartIdentity) -> bool:
        """Return whether both identities are of one start of the command, or one scheduler job."""
        return self.is_restart_of(earlier) or self._is_of_same_job(earlier)

    def _is_of_same_job(self, earlier: StartIdentity) -> bool:
        return bool(self.job) and self.job == earlier.job

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a generation record."""
        return {
            "id": self.id,
            "job": self.job,
            "requeues": self.requeues,
            "training": self.training,
        }

    @staticmethod
    def from_json(fields: Any) -> StartIdentity:
        """Return the identity that ``to_json`` described.

        Raises:
            ValueError: A field is missing, of another type or out of bounds.
        """
        if not isinstance(fields, dict):
            raise ValueError("`start` is not an object")  # noqa: TRY004 - as all readers of records
        if any(type(fields.get(name)) is not kind for name, kind in _FIELDS.items()):
            raise ValueError("`start` lacks a field, or a field has another type")
        identity = StartIdentity(**{name: fields[name] for name in _FIELDS})
        texts, numbers = (identity.id, identity.job), (identity.requeues, identity.training)
        if any(len(text) > _TEXT_LENGTH_MAX or not text.isprintable() for text in texts):
            raise ValueError("`start` has a text that is too long or not a text")
        if any(not 0 <= number <= _NUMBER_MAX for number in numbers):
            raise ValueError("`start` has a number out of bounds")
        return identity


def new_start(environ: Mapping[str, str], rendezvous: str = "") -> StartIdentity:
    """Return the identity of a start that begins now.

    Args:
        environ: Environment of the process that starts the run.
        rendezvous: Name of the rendezvous, if the user gave one.

    Raises:
        ConfigError: A variable is malformed.
    """
    job, requeues = _job_of(environ, rendezvous)
    return StartIdentity(uuid.uuid4().hex, job, requeues)


def inherited_start(environ: Mapping[str, str]) -> StartIdentity:
    """Return the identity that an agent gave to its worker; empty without an agent.

    Raises:
        ConfigError: A variable is malformed.
    """
    start = environ.get(START, "")
    if not start:
        return StartIdentity()
    requeues = _count(environ, REQUEUES)
    return StartIdentity(_bounded(START, start), _bounded(JOB, environ.get(JOB, "")), requeues)


def own_start(environ: Mapping[str, str]) -> StartIdentity:
    """Return the identity of a process that no agent started.

    Workers of one torchrun keep the identity through all restarts, because the torchrun process is
    their parent.

    Raises:
        ConfigError: A variable is malformed.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return new_start(environ)
    # torch uses "none" for a rendezvous without a name.
    name = environ["TORCHELASTIC_RUN_ID"]
    job, requeues = _job_of(environ, "" if name == "none" else name)
    launcher = f"torchrun/{socket.gethostname()}/{os.getppid()}/{_began_at(os.getppid())}"
    return StartIdentity(launcher[:_TEXT_LENGTH_MAX], job, requeues)


def write_start(start: StartIdentity) -> dict[str, str]:
    """Return the variables that :func:`inherited_start` reads back as ``start``."""
    return {START: start.id, JOB: start.job, REQUEUES: str(start.requeues)}


def _job_of(environ: Mapping[str, str], rendezvous: str) -> tuple[str, int]:
    """Return the name of the job and its requeues.

    A SLURM job takes precedence, because a batch script may rename the rendezvous at each requeue.
    """
    if job := environ.get(JOB, ""):
        return _bounded(JOB, job), 0
    if slurm := environ.get("SLURM_JOB_ID", ""):
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        return f"{_SLURM}{cluster}/{slurm}"[:_TEXT_LENGTH_MAX], _count(
            environ, "SLURM_RESTART_COUNT"
        )
    if rendezvous:
        return _bounded("--rdzv-id", f"rendezvous/{rendezvous}"), 0
    return _pod_owner(environ), 0


def _pod_owner(environ: Mapping[str, str]) -> str:
    """Return the name of the Kubernetes Job that owns this pod, if the pod's name contains it.

    Only commands that the pod itself starts count, because users may also start commands in a pod.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or not _descends_from_init():
        return ""
    match = _POD.fullmatch(environ.get("HOSTNAME", ""))
    return f"kubernetes/{match[1]}" if match else ""


def _descends_from_init() -> bool:
    """Return whether process 1 started this process; `kubectl exec` commands have no parent."""
    process = os.getpid()
    while process > 1:
        process = _stat(process, 3)
    return process == 1


def _began_at(process: int) -> int:
    """Return the start time of a process, in clock ticks since boot; 0 if unknown."""
    return _stat(process, 21)


def _stat(process: int, field: int) -> int:
    """Return one number of ``/proc/PID/stat``, fields counted from 0; 0 if unknown."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        # The command's name is in brackets and may contain any characters.
        return int(text.rpartition(")")[2].split()[field - 2])
    except (OSError, ValueError, IndexError):
        return 0


def _bounded(name: str, text: str) -> str:
    if len(text) > _TEXT_LENGTH_MAX or not text.isprintable():
        raise ConfigError(
            f"{name} cannot name a job: it is longer than {_TEXT_LENGTH_MAX} characters or not "
            "printable",
            hint=f"choose a short name for {name}",
        )
    return text


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text:
        return 0
    if not text.isascii() or not text.isdecimal() or int(text) > _NUMBER_MAX:
        raise ConfigError(f"{name}={text!r} is not a whole number", hint=f"unset {name}")
    return int(text)
