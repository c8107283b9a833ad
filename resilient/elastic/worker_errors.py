"""Which worker failed first, and what it left to say about it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.elastic.outcome import (
    CODE_PREEMPTED,
    NOTHING_SEEN,
    REFUSAL_CODES,
    Cause,
    Evidence,
    find_cause,
    is_echo,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from resilient.elastic.workers.group import WorkerExit


@dataclass(frozen=True, slots=True)
class WorkerError:
    """What a worker wrote into its error file; empty when it could not.

    Attributes:
        message: ``ValueError: boom``.
        traceback: all of it, as python prints it.
        code: the RES id of an error of ours.
        hint: what that error says to run next.
        exit_code: what the worker was about to end with.
        at_seconds: when, on the monotonic clock; None when unknown.
    """

    message: str = ""
    traceback: str = ""
    code: str = ""
    hint: str = ""
    exit_code: int = 1
    at_seconds: float | None = None

    @property
    def is_echo(self) -> bool:
        """Whether it only says that another rank failed or went silent."""
        return is_echo(self.code, self.message)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker that failed, with its own words.

    Attributes:
        exit: how its process ended.
        error: what it left to say.
        known_cause: why, where something else than its end says so.
        seen: what was seen beside it.
    """

    exit: WorkerExit
    error: WorkerError
    known_cause: Cause | None = None
    seen: Evidence = NOTHING_SEEN

    @property
    def cause(self) -> Cause:
        """Why it failed, as far as that is known."""
        return self._found[0]

    @property
    def is_mere_echo(self) -> bool:
        """Whether nothing is known but that another rank failed or went silent."""
        return self.error.is_echo and self.cause is Cause.PEER

    @property
    def is_refusal(self) -> bool:
        """Whether the worker ended by an error that refuses what it was given."""
        return self.error.code in REFUSAL_CODES

    @property
    def proof(self) -> str:
        """What proves the cause, for a person."""
        return self._found[1]

    @property
    def _found(self) -> tuple[Cause, str]:
        if self.known_cause is not None:
            return self.known_cause, ""
        return find_cause(self.status, self.error.code, self.error.message, self.seen)

    @property
    def status(self) -> int:
        """How it ended, or would have if no signal had hit it on its way out."""
        is_known = self.error.at_seconds is not None
        return self.error.exit_code if is_known and self.exit.status < 0 else self.exit.status

    @property
    def at_seconds(self) -> float:
        """When it failed, as well as that can be told."""
        if self.error.at_seconds is not None:
            return self.error.at_seconds
        died = self.exit.status < 0 and self.exit.status != -signal.SIGABRT
        # A peer may report a killed rank's loss before we look, so the kill is dated back to
        # the last look. An abort is how a collective library reports a loss, so that is not.
        return self.exit.alive_at_seconds if died else self.exit.seen_at_seconds


def read_error(path: Path) -> WorkerError:
    """Return what the error file says; a missing or torn one says nothing."""
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
    exits: Iterable[WorkerExit], before_seconds: float, seen: Evidence = NOTHING_SEEN
) -> list[WorkerFailure]:
    """Return the workers that failed by themselves, the one that failed first in front.

    Args:
        exits: of workers that ended, stopped ones among them.
        before_seconds: when we began to stop the others; what ended later did so by our hand,
            unless its error file proves that it had failed before.
        seen: what was seen beside their ends.
    """
    failed = [
        WorkerFailure(exit_, read_error(exit_.command.error_file), seen=seen)
        for exit_ in exits
        if exit_.status not in (0, CODE_PREEMPTED)
    ]
    return sorted((one for one in failed if _is_own(one, before_seconds)), key=_order)


def _is_own(failure: WorkerFailure, before_seconds: float) -> bool:
    if failure.error.at_seconds is not None:
        return failure.error.at_seconds <= before_seconds
    return failure.exit.seen_at_seconds <= before_seconds and not failure.exit.is_killed


def _order(failure: WorkerFailure) -> tuple[bool, float, bool]:
    """Order by time of failure; whoever only reports another's failure comes last.

    Of those seen in one look an abort does: it is how a collective library may report a loss.
    """
    return failure.error.is_echo, failure.at_seconds, failure.exit.status == -signal.SIGABRT


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
