"""Failures of workers: reader of their error files, and search for the worker that failed first."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.elastic.outcome import (
    CODE_PREEMPTED,
    NO_EVIDENCE,
    Cause,
    Evidence,
    find_cause,
    is_echo,
)
from resilient.errors import REFUSAL_CODES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from resilient.elastic.workers.group import WorkerExit


@dataclass(frozen=True, slots=True)
class WorkerError:
    """Content of a worker's error file; empty if the worker could not write it.

    Attributes:
        message: Type and message, such as ``ValueError: boom``.
        traceback: Complete traceback as Python prints it.
        code: RES id of one of our errors.
        hint: Hint of that error: the next command to run.
        exit_code: Exit code that the worker was about to return.
        at_seconds: Time of the error, monotonic seconds; None if unknown.
    """

    message: str = ""
    traceback: str = ""
    code: str = ""
    hint: str = ""
    exit_code: int = 1
    at_seconds: float | None = None

    @property
    def is_echo(self) -> bool:
        """True if the error only reports that another rank failed or went silent."""
        return is_echo(self.code, self.message)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Failed worker with its reported error.

    Attributes:
        exit: Exit of the process.
        error: Error that the worker reported.
        known_cause: Cause known from another source than the exit.
        evidence: Observations of the host.
    """

    exit: WorkerExit
    error: WorkerError
    known_cause: Cause | None = None
    evidence: Evidence = NO_EVIDENCE

    @property
    def cause(self) -> Cause:
        """Cause of the failure as far as known."""
        return self._find_cause[0]

    @property
    def is_mere_echo(self) -> bool:
        """True if the failure only shows that another rank failed or went silent."""
        return self.error.is_echo and self.cause is Cause.PEER

    @property
    def is_refusal(self) -> bool:
        """True if the worker ended with an error that rejects its input."""
        return self.error.code in REFUSAL_CODES

    @property
    def proof(self) -> str:
        """Evidence for the cause, as readable text."""
        return self._find_cause[1]

    @property
    def _find_cause(self) -> tuple[Cause, str]:
        if self.known_cause is not None:
            return self.known_cause, ""
        return find_cause(self.status, self.error.code, self.error.message, self.evidence)

    @property
    def status(self) -> int:
        """Exit status, or the planned exit code if a signal hit the worker while it exited."""
        is_known = self.error.at_seconds is not None
        return self.error.exit_code if is_known and self.exit.status < 0 else self.exit.status

    @property
    def at_seconds(self) -> float:
        """Best known time of the failure, monotonic seconds."""
        if self.error.at_seconds is not None:
            return self.error.at_seconds
        is_killed = self.exit.status < 0 and self.exit.status != -signal.SIGABRT
        # A peer may report the loss of a killed rank before this agent sees the kill. So a kill is
        # dated back to the last check. An abort is not: collective libraries report a loss with an
        # abort.
        return self.exit.alive_at_seconds if is_killed else self.exit.seen_at_seconds


def read_error(path: Path) -> WorkerError:
    """Return the content of an error file; empty if the file is missing or incomplete."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        message = record["message"]
        if isinstance(message, str):
            return WorkerError(message=message)
        return WorkerError(
            message=str(message["message"]),
            traceback=str(message.get("extraInfo", {}).get("py_callstack", "")),
            code=str(record.get("code", "")),
            hint=str(record.get("hint", "")),
            exit_code=int(record.get("exit_code", 1)),
            at_seconds=_number(record.get("monotonic_seconds")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return WorkerError()


def find_failures(
    exits: Iterable[WorkerExit], before_seconds: float, evidence: Evidence = NO_EVIDENCE
) -> list[WorkerFailure]:
    """Return the workers that failed by themselves, ordered by time of failure.

    Args:
        exits: Exits of all ended workers, stopped ones included.
        before_seconds: Time at which the agent began to stop the other workers. The agent caused
            later exits, unless the error file shows an earlier failure.
        evidence: Observations of the host.
    """
    failures = [
        WorkerFailure(exit_, read_error(exit_.command.error_file), evidence=evidence)
        for exit_ in exits
        if exit_.status not in (0, CODE_PREEMPTED)
    ]
    return sorted((failure for failure in failures if _is_own(failure, before_seconds)), key=_order)


def _is_own(failure: WorkerFailure, before_seconds: float) -> bool:
    if failure.error.at_seconds is not None:
        return failure.error.at_seconds <= before_seconds
    return failure.exit.seen_at_seconds <= before_seconds and not failure.exit.is_killed


def _order(failure: WorkerFailure) -> tuple[bool, float, bool]:
    """Return the sort key: time of failure, with workers that only report another failure last.

    Among failures seen in one check an abort comes last, because a collective library may report a
    loss with an abort.
    """
    return failure.error.is_echo, failure.at_seconds, failure.exit.status == -signal.SIGABRT


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
