"""Event files to records: of all lives, all hosts, and with a last line that was cut short.

A record is one line of ``agent.jsonl`` or ``rank-N.jsonl``; what each event says is in its class.
Times are whole milliseconds since 1970 from here on, so that sums are exact.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resilient.accounting.steadying import steady
from resilient.errors import RepositoryNotFound
from resilient.storage.folder import open_inside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

ENDS = ("TrainingEnded", "TrainingStopped", "TrainedUntil")
"""How a rank tells that it trains no more, whatever made it end."""
WANTED = frozenset(
    {
        *("AgentStarted", "RunEnded", "RunGivenUp"),
        *("WorkerGroupStarted", "LifeEnded", "WorkerFailed", "HangFound", "StopRequested"),
        *("ProgressSeen", "NoticeHeard", "NodesLost"),
        *("GenerationClaimed", "CheckpointRestored", "TrainingStarted", "FirstStepEnded"),
        *(*ENDS, "MetricsLogged", "PhaseEnded", "RolledBack", "LossBroke"),
        *("CheckpointCommitted", "CheckpointPromoted", "SaveAborted"),
    }
)
"""Events that say something of time; the others are passed over."""

AGENT_FILE = "agent.jsonl"
FILE_BYTES_MAX = 4 << 30
"""Largest event file; 4 GiB are about 20 million events."""
LINE_BYTES_MAX = 1 << 20
"""Longest line of an event file; a longer one is no event."""
_NUMBER_MAX = 1 << 53  # beyond, floats skip integers
_DAY_MS = 86_400_000
_YEARS_MS = 36525 * _DAY_MS  # a century: what is later than 2070 was not written by a clock


@dataclass(frozen=True, slots=True)
class Record:
    """One event, as it was told.

    Attributes:
        at_ms: when, by the clock of its host.
        event: name of its class.
        source: the file that it stands in.
        fields: everything that it says, as JSON has it.
    """

    at_ms: int
    event: str
    source: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a field that should be a number, ``default`` if it is none that was counted."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value if abs(value) <= _NUMBER_MAX else default

    def milliseconds(self, name: str) -> int:
        """Return a length in seconds as milliseconds; what cannot be one counts as none."""
        return round(1000 * min(_YEARS_MS / 1000, max(0.0, self.number(name))))

    def text(self, name: str) -> str:
        """Return a field that should be a text, empty if it is none."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def words(self, name: str) -> list[str]:
        """Return a field that should be a list of texts, without what is none."""
        value = self.fields.get(name)
        return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []

    @property
    def host(self) -> str:
        """The host whose clock it was; empty if nothing says it."""
        return self.agent.rpartition(":")[0] or self.text("host")

    @property
    def agent(self) -> str:
        """The agent that told it, ``host:pid``; empty for what ranks tell."""
        return self.text("agent") or (self.text("run") if self.source == AGENT_FILE else "")


def read_records(folders: Sequence[Path]) -> list[Record]:
    """Return the records of all event files in ``folders``, by time, whatever clocks did.

    Each folder is one of event files, or a run's that has them in ``events``. Lines that are no
    events are passed over: a process that is killed, or a disk that is full, leaves half a line.

    Raises:
        RepositoryNotFound: a folder holds no event file.
        OSError: a file cannot be read.
        StoreDenied: a file leads out of its folder, or is no plain file.
    """
    found = [
        record
        for folder in folders
        for path in event_files(folder)
        for record in _read(folder, path)
    ]
    return steady(found)


def parse_line(line: str, source: str = "") -> Record | None:
    """Return the record that a line holds, None if it is none that is wanted."""
    fields = parse_fields(line)
    event, at = fields.get("event"), fields.get("at")
    if not isinstance(at, str) or not isinstance(event, str) or event not in WANTED:
        return None
    at_ms = _parse_time(at)
    return None if at_ms is None else Record(at_ms, event, source, fields)


def parse_fields(line: str) -> dict[str, Any]:
    """Return the JSON object that a line holds; empty if the line is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, or of the folder ``events`` in it.

    Raises:
        RepositoryNotFound: there are none.
    """
    for place in (folder, folder / "events"):
        files = sorted(place.glob("*.jsonl")) if place.is_dir() else []
        files = [one for one in files if one.name == AGENT_FILE or one.name.startswith("rank-")]
        if files:
            return files
    raise RepositoryNotFound(
        f"no event files in `{folder}`: neither agent.jsonl nor rank-0.jsonl",
        hint="resilient train --events FOLDER SCRIPT",
    )


def _read(folder: Path, path: Path) -> Iterator[Record]:
    for line in event_lines(folder, path):
        record = parse_line(line, path.name)
        if record is not None:
            yield record


def event_lines(folder: Path, path: Path) -> Iterator[str]:
    """Yield the lines that an event file holds now, without those that are too long for an event.

    Args:
        folder: the run's folder, as the user named it.
        path: the file; it lies in the folder or below.

    Raises:
        OSError: the file cannot be read.
        StoreDenied: the path leads out of the folder, or is no plain file.
    """
    with open_inside(folder, path, FILE_BYTES_MAX) as file:
        # A file that grows as fast as it is read would have no end.
        left = os.fstat(file.fileno()).st_size
        is_cut = False
        while left > 0 and (raw := file.readline(min(left, LINE_BYTES_MAX))):
            left -= len(raw)
            is_rest, is_cut = is_cut, len(raw) == LINE_BYTES_MAX and not raw.endswith(b"\n")
            if not is_rest and not is_cut:
                yield raw.decode("utf-8", errors="replace")


def _parse_time(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        at_ms = round(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return at_ms if 0 <= at_ms <= _YEARS_MS else None
