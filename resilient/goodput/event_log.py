"""Reader of the event files of all hosts, which corrects the times of the events.

A record is one event: a line of ``agent.jsonl`` or ``rank-N.jsonl``. The class of the event
documents the fields of the record. A truncated last line is ignored. Times are whole milliseconds
since 1970, so sums are exact.

Each record has the time of day and the seconds since the boot of its machine. No user can set the
clock of the boot seconds, and all processes of a machine share this clock. The time between two
records of one boot is therefore the difference of their boot seconds. The time of day only converts
boot seconds to dates. The offset between both clocks is the median over all records of the boot.

The clocks of several hosts are compared at the rendezvous of each attempt (start of all ranks),
because all hosts leave the rendezvous together.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resilient.clock import boot_name
from resilient.errors import RepositoryNotFound
from resilient.storage.folder import open_inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from resilient.clock import Clock


def correct_clock_steps(records: Iterable[EventRecord]) -> list[EventRecord]:
    """Return the records by time, with differences measured by the boot clock of their machine.

    Records without a boot name or boot seconds keep their time of day.
    """
    given_records = list(records)
    offsets = _offsets_ms(given_records)
    return sorted(
        (_corrected(record, offsets) for record in given_records), key=lambda record: record.at_ms
    )


def present_ms(records: Iterable[EventRecord], clock: Clock, now_ms: int) -> int:
    """Return the current time on the time scale of :func:`correct_clock_steps`.

    Args:
        records: Records of the run, as read.
        clock: Clock of this process.
        now_ms: Time of day, used if the run has no record of this machine.
    """
    boot = boot_name()
    offset_ms = _offsets_ms(record for record in records if record.text("boot") == boot).get(boot)
    return now_ms if offset_ms is None else round(1000 * clock.monotonic_seconds()) + offset_ms


def _offsets_ms(records: Iterable[EventRecord]) -> Mapping[str, int]:
    """Return the offset from boot milliseconds to time of day, for each boot of a machine."""
    offsets_by_host: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if _has_boot_time(record):
            offsets_by_host[record.text("boot")].append(record.at_ms - _since_boot_ms(record))
    return {boot: statistics.median_low(offsets) for boot, offsets in offsets_by_host.items()}


def _corrected(record: EventRecord, offsets: Mapping[str, int]) -> EventRecord:
    if not _has_boot_time(record):
        return record
    return replace(record, at_ms=max(0, _since_boot_ms(record) + offsets[record.text("boot")]))


def _has_boot_time(record: EventRecord) -> bool:
    return bool(record.text("boot")) and record.number("monotonic", -1.0) >= 0.0


def _since_boot_ms(record: EventRecord) -> int:
    return record.milliseconds("monotonic")


ENDS = ("TrainingEnded", "TrainingStopped", "UntilStepReached")
"""Events by which a rank reports that it stops training, for any reason."""
FORMER_EVENTS = {
    "LifeEnded": "AttemptEnded",
    "LossBroke": "LossDivergenceDetected",
    "NoticeHeard": "NoticeReceived",
    "ProgressSeen": "ProgressReported",
    "RolledBack": "TrainingRolledBack",
    "RunGivenUp": "RunAborted",
    "TrainedUntil": "UntilStepReached",
}
"""Current names of events, by the names in files of versions before 0.1.0."""

WANTED = frozenset(
    {
        *("AgentStarted", "RunEnded", "RunAborted"),
        *("WorkerGroupStarted", "AttemptEnded", "WorkerFailed", "HangFound", "StopRequested"),
        *("ProgressReported", "NoticeReceived", "NodesLost"),
        *("GenerationClaimed", "CheckpointRestored", "TrainingStarted", "FirstStepEnded"),
        *(*ENDS, "MetricsLogged", "PhaseEnded", "TrainingRolledBack", "LossDivergenceDetected"),
        *("CheckpointCommitted", "CheckpointPromoted", "SaveAborted"),
    }
)
"""Events that the report uses; all others are skipped."""

AGENT_FILE = "agent.jsonl"
FILE_BYTES_MAX = 4 << 30
"""Largest event file; 4 GiB are about 20 million events."""
LINE_BYTES_MAX = 1 << 20
"""Longest line of an event file; a longer line is ignored."""
_NUMBER_MAX = 1 << 53  # above this limit, floats skip integers
_DAY_MS = 86_400_000
_YEARS_MS = 36525 * _DAY_MS  # a century: no clock wrote a time after 2070


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event as it was written.

    Attributes:
        at_ms: Time by the clock of its host.
        event: Name of the event class.
        source: Name of the event file.
        fields: All fields of the JSON object.
    """

    at_ms: int
    event: str
    source: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a numeric field, or ``default`` if it is not a number or beyond 2**53."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value if abs(value) <= _NUMBER_MAX else default

    def milliseconds(self, name: str) -> int:
        """Return a duration field in milliseconds; an invalid duration counts as 0."""
        return round(1000 * min(_YEARS_MS / 1000, max(0.0, self.number(name))))

    def text(self, name: str) -> str:
        """Return a text field; an empty text for any other value."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def words(self, name: str) -> list[str]:
        """Return the texts of a list field; other elements are left out."""
        value = self.fields.get(name)
        return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []

    @property
    def host(self) -> str:
        """The host whose clock gave the time; empty if unknown."""
        return self.agent.rpartition(":")[0] or self.text("host")

    @property
    def agent(self) -> str:
        """The agent that wrote the record, ``host:pid``; empty for a record of a rank."""
        return self.text("agent") or (self.text("run") if self.source == AGENT_FILE else "")


def read_records(folders: Sequence[Path]) -> list[EventRecord]:
    """Return the records of all event files in ``folders``, by corrected time.

    Each folder has event files, or is a run folder with event files in ``events``. Lines that are
    no events are ignored, because a killed process or a full disk leaves half a line.

    Raises:
        RepositoryNotFound: A folder has no event file.
        OSError: A file cannot be read.
        StoreDenied: A file leads out of its folder, or is not a regular file.
    """
    records = [
        record
        for folder in folders
        for path in event_files(folder)
        for record in _read(folder, path)
    ]
    return correct_clock_steps(records)


def parse_line(line: str, source: str = "") -> EventRecord | None:
    """Return the record of a line; None if the line is not an event of ``WANTED``."""
    fields = parse_fields(line)
    event, at = fields.get("event"), fields.get("at")
    if not isinstance(at, str) or not isinstance(event, str):
        return None
    event = FORMER_EVENTS.get(event, event)
    if event not in WANTED:
        return None
    at_ms = _parse_time(at)
    return None if at_ms is None else EventRecord(at_ms, event, source, fields)


def parse_fields(line: str) -> dict[str, Any]:
    """Return the JSON object of a line; empty if the line is not a JSON object."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, or of the folder ``events`` in it.

    Raises:
        RepositoryNotFound: The folder has no event files.
    """
    for place in (folder, folder / "events"):
        files = sorted(place.glob("*.jsonl")) if place.is_dir() else []
        files = [file for file in files if file.name == AGENT_FILE or file.name.startswith("rank-")]
        if files:
            return files
    raise RepositoryNotFound(
        f"no event files in `{folder}`: neither agent.jsonl nor rank-0.jsonl",
        hint="resilient train --events FOLDER SCRIPT",
    )


def _read(folder: Path, path: Path) -> Iterator[EventRecord]:
    for line in event_lines(folder, path):
        record = parse_line(line, path.name)
        if record is not None:
            yield record


def event_lines(folder: Path, path: Path) -> Iterator[str]:
    """Yield the current lines of an event file, without overlong lines.

    Args:
        folder: Folder of the run, as the user named it.
        path: The file, in the folder or below.

    Raises:
        OSError: The file cannot be read.
        StoreDenied: The path leads out of the folder, or is not a regular file.
    """
    with open_inside(folder, path, FILE_BYTES_MAX) as file:
        # Stop at the current size: another process may append as fast as this one reads.
        bytes_left = os.fstat(file.fileno()).st_size
        is_cut = False
        while bytes_left > 0 and (raw := file.readline(min(bytes_left, LINE_BYTES_MAX))):
            bytes_left -= len(raw)
            is_continuation, is_cut = is_cut, len(raw) == LINE_BYTES_MAX and not raw.endswith(b"\n")
            if not is_continuation and not is_cut:
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


_ENDS = ("RunEnded", "RunAborted")


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent as its events describe it.

    Attributes:
        host: Host of the agent.
        pid: Process id on that host.
        began_ms: Time of its first event.
        boot: Name of the machine's boot at that time; empty if not reported.
        since_boot_ms: Time of the first event since that boot, by the boot clock.
        exit_code: Exit code of its end; None while it reported no end.
        reason: Reason of its end.
    """

    host: str
    pid: int
    began_ms: int
    exit_code: int | None = None
    reason: str = ""
    boot: str = ""
    since_boot_ms: int = 0


def agents(records: Iterable[EventRecord]) -> list[Agent]:
    """Return the agents of a run in the order of their start.

    A killed agent reported no end, so only its host knows whether its process is alive.

    Args:
        records: Records by time.
    """
    agent_by_process: dict[tuple[str, int], Agent] = {}
    for record in records:
        host, _, number = record.agent.rpartition(":")
        if not host or not number.isdigit():
            continue
        key = (host, int(number))
        if record.event == "AgentStarted" or key not in agent_by_process:
            agent_by_process.pop(key, None)  # a process id can be reused
            boot = record.text("boot") if record.number("monotonic", -1.0) >= 0.0 else ""
            since_boot_ms = record.milliseconds("monotonic")
            agent_by_process[key] = Agent(
                *key, record.at_ms, boot=boot, since_boot_ms=since_boot_ms
            )
        if record.event in _ENDS:
            code = int(record.number("exit_code", 1))
            agent_by_process[key] = replace(
                agent_by_process[key], exit_code=code, reason=record.text("reason")
            )
    return list(agent_by_process.values())


TOLERANCE_MS = 2_000
"""Hosts start an attempt within this time; a smaller difference of clocks is not corrected."""


def align(records: Sequence[EventRecord]) -> list[EventRecord]:
    """Return the records by time, with the times of all hosts moved to the clock of the first host.

    All hosts of an attempt leave its rendezvous together. The difference of their clocks at that
    moment is the clock error. The correction is the median over all attempts. Records of a host
    that met no other host keep their times.
    """
    offsets = offsets_ms(records)
    if not any(offsets.values()):
        return list(records)
    shifted_records = [
        replace(record, at_ms=record.at_ms - offsets.get(record.host, 0)) for record in records
    ]
    return sorted(shifted_records, key=lambda record: record.at_ms)


def offsets_ms(records: Sequence[EventRecord]) -> Mapping[str, int]:
    """Return how far each host's clock is ahead of the first host's, 0 within the tolerance."""
    times_by_attempt: dict[str, dict[str, int]] = defaultdict(dict)
    for record in records:
        if record.event == "WorkerGroupStarted" and record.host and record.text("attempt"):
            times_by_attempt[record.text("attempt")].setdefault(
                record.host, record.at_ms - record.milliseconds("start_seconds")
            )
    reference_host = next((host for hosts in times_by_attempt.values() for host in hosts), "")
    offsets_by_host: dict[str, list[int]] = defaultdict(list)
    for hosts in times_by_attempt.values():
        for host, at_ms in hosts.items():
            if reference_host in hosts:
                offsets_by_host[host].append(at_ms - hosts[reference_host])
    medians = {host: round(statistics.median(values)) for host, values in offsets_by_host.items()}
    return {host: median if abs(median) > TOLERANCE_MS else 0 for host, median in medians.items()}
