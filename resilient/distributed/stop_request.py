"""Stop request, and its transfer from the agent of a host to the workers that it manages.

A deadline is a time on the monotonic clock, which all processes of a host share and no process can
set. Messages between hosts contain the remaining seconds instead.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILE_NAME = "stop"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Reason and deadline of a stop.

    Attributes:
        reason: Readable text, such as ``SIGTERM`` or ``aws: spot terminate``.
        deadline_seconds: Time at which this host or process ends, on this host's monotonic clock.
        is_for_all: Whether the request is for all hosts of the run, and not only for this host.
    """

    reason: str
    deadline_seconds: float
    is_for_all: bool = False

    def left_seconds(self, now_seconds: float) -> float:
        """Return the seconds left at ``now_seconds``; negative after the deadline."""
        return self.deadline_seconds - now_seconds

    def within(self, other: StopRequest) -> StopRequest:
        """Return this request, with a deadline no later than that of ``other``."""
        is_for_all = self.is_for_all or other.is_for_all
        if other.deadline_seconds >= self.deadline_seconds:
            is_same = self.is_for_all is is_for_all
            return self if is_same else replace(self, is_for_all=is_for_all)
        reason = self.reason if other.reason in self.reason else f"{self.reason}, {other.reason}"
        return StopRequest(reason, other.deadline_seconds, is_for_all)

    def to_json(self, now_seconds: float) -> dict[str, Any]:
        """Return a JSON-able value that has the same meaning on another host."""
        return {"reason": self.reason, "left_seconds": self.left_seconds(now_seconds)}

    @staticmethod
    def from_json(value: Mapping[str, Any], now_seconds: float) -> StopRequest:
        """Parse the output of ``to_json``, received at ``now_seconds``."""
        return StopRequest(str(value["reason"]), now_seconds + float(value["left_seconds"]))


def write_stop_request(agent_folder: str, request: StopRequest) -> None:
    """Write a request for the workers of this host to ``agent_folder``, without a signal.

    A worker that finds no request uses the grace period that it received at its start.
    """
    if not agent_folder:
        return
    temporary_path = Path(agent_folder, f"{_FILE_NAME}-fresh")
    record = {"reason": request.reason, "deadline_seconds": request.deadline_seconds}
    with suppress(OSError):
        temporary_path.write_text(json.dumps(record), encoding="utf-8")
        temporary_path.replace(Path(agent_folder, _FILE_NAME))


def read_stop_request(agent_folder: str) -> StopRequest | None:
    """Return the request that the agent wrote to ``agent_folder``; None if there is none."""
    if not agent_folder:
        return None
    try:
        record = json.loads(Path(agent_folder, _FILE_NAME).read_text(encoding="utf-8"))
        return StopRequest(str(record["reason"]), float(record["deadline_seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
