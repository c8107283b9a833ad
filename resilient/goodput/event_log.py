"""Read event files of all hosts, correct clocks.

Times that a clock which was set meanwhile cannot bend (pure).

Each record says, beside the time of day, the seconds of its machine since that was started, which
nobody can set. All processes of one start of a machine share them, so what they tell differs by
what went by. The time of day is only asked where on the calendar that lies: what most of them say.

Event files to records: of all lives, all hosts, and with a last line that was cut short.

A record is one line of ``agent.jsonl`` or ``rank-N.jsonl``; what each event says is in its class.
Times are whole milliseconds since 1970 from here on, so that sums are exact.

Which launchers of a run have begun and not said that they end (pure).

The clocks of several hosts, held against each other.
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
    """Return the records by time, each as long after another as went by on their machine.

    Those that do not say which machine's seconds they tell keep their time of day.
    """
    told = list(records)
    offsets = _offsets_ms(told)
    return sorted((_moved(one, offsets) for one in told), key=lambda one: one.at_ms)


def present_ms(records: Iterable[EventRecord], clock: Clock, now_ms: int) -> int:
    """Return the present where :func:`steady` would put a record that this process told now.

    Args:
        records: of the run, as told.
        clock: of this process.
        now_ms: its time of day, for a run of which nothing was told on this machine.
    """
    boot = boot_name()
    offset_ms = _offsets_ms(one for one in records if one.text("boot") == boot).get(boot)
    return now_ms if offset_ms is None else round(1000 * clock.monotonic_seconds()) + offset_ms


def _offsets_ms(records: Iterable[EventRecord]) -> Mapping[str, int]:
    """Return what to add to the milliseconds of each start of a machine."""
    found: dict[str, list[int]] = defaultdict(list)
    for one in records:
        if _is_steady(one):
            found[one.text("boot")].append(one.at_ms - _since_boot_ms(one))
    return {boot: statistics.median_low(offsets) for boot, offsets in found.items()}


def _moved(one: EventRecord, offsets: Mapping[str, int]) -> EventRecord:
    if not _is_steady(one):
        return one
    return replace(one, at_ms=max(0, _since_boot_ms(one) + offsets[one.text("boot")]))


def _is_steady(one: EventRecord) -> bool:
    return bool(one.text("boot")) and one.number("monotonic", -1.0) >= 0.0


def _since_boot_ms(one: EventRecord) -> int:
    return one.milliseconds("monotonic")


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
class EventRecord:
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


def read_records(folders: Sequence[Path]) -> list[EventRecord]:
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
    return correct_clock_steps(found)


def parse_line(line: str, source: str = "") -> EventRecord | None:
    """Return the record that a line holds, None if it is none that is wanted."""
    fields = parse_fields(line)
    event, at = fields.get("event"), fields.get("at")
    if not isinstance(at, str) or not isinstance(event, str) or event not in WANTED:
        return None
    at_ms = _parse_time(at)
    return None if at_ms is None else EventRecord(at_ms, event, source, fields)


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


def _read(folder: Path, path: Path) -> Iterator[EventRecord]:
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


_ENDS = ("RunEnded", "RunGivenUp")


@dataclass(frozen=True, slots=True)
class Agent:
    """A launcher, as its events tell.

    Attributes:
        host: the machine that it runs on.
        pid: its process there.
        began_ms: its first word.
        boot: the start of its machine at which that was; empty where it did not tell.
        since_boot_ms: how long after that, by seconds that nobody can set.
        exit_code: what it said at its end; None while it has not.
        reason: of its end.
    """

    host: str
    pid: int
    began_ms: int
    exit_code: int | None = None
    reason: str = ""
    boot: str = ""
    since_boot_ms: int = 0


def agents(records: Iterable[EventRecord]) -> list[Agent]:
    """Return the launchers of a run in the order in which they began.

    One that was killed never said that it ends: only its host knows whether it lives.

    Args:
        records: by time.
    """
    found: dict[tuple[str, int], Agent] = {}
    for one in records:
        host, _, number = one.agent.rpartition(":")
        if not host or not number.isdigit():
            continue
        key = (host, int(number))
        if one.event == "AgentStarted" or key not in found:
            found.pop(key, None)  # its number was another's once
            boot = one.text("boot") if one.number("monotonic", -1.0) >= 0.0 else ""
            since_boot_ms = one.milliseconds("monotonic")
            found[key] = Agent(*key, one.at_ms, boot=boot, since_boot_ms=since_boot_ms)
        if one.event in _ENDS:
            code = int(one.number("exit_code", 1))
            found[key] = replace(found[key], exit_code=code, reason=one.text("reason"))
    return list(found.values())


TOLERANCE_MS = 2_000
"""Hosts begin a life within that; clocks that differ by less are believed."""


def align(records: Sequence[EventRecord]) -> list[EventRecord]:
    """Return the records with the times of all hosts as the first one's clock has them, by time.

    All hosts of a life leave its rendezvous together. So what their clocks say of that moment
    differs by their error, the median over all lives. Records of a host that met no other stay.
    """
    offsets = offsets_ms(records)
    if not any(offsets.values()):
        return list(records)
    moved = [replace(one, at_ms=one.at_ms - offsets.get(one.host, 0)) for one in records]
    return sorted(moved, key=lambda one: one.at_ms)


def offsets_ms(records: Sequence[EventRecord]) -> Mapping[str, int]:
    """Return by how much each host's clock is ahead of the first host's, 0 within the tolerance."""
    met: dict[str, dict[str, int]] = defaultdict(dict)
    for one in records:
        if one.event == "WorkerGroupStarted" and one.host and one.text("attempt"):
            met[one.text("attempt")].setdefault(
                one.host, one.at_ms - one.milliseconds("start_seconds")
            )
    first = next((host for hosts in met.values() for host in hosts), "")
    ahead: dict[str, list[int]] = defaultdict(list)
    for hosts in met.values():
        for host, at_ms in hosts.items():
            if first in hosts:
                ahead[host].append(at_ms - hosts[first])
    medians = {host: round(statistics.median(values)) for host, values in ahead.items()}
    return {host: one if abs(one) > TOLERANCE_MS else 0 for host, one in medians.items()}
