"""Reader of a run's logged metrics from log files beside its checkpoints.

The module reads three kinds of files. The Trainer of this library writes ``log.jsonl`` and event
files, which have all digits of each number. The Trainer of Transformers writes event files of
TensorBoard to ``runs``, with numbers in single precision. If a run was resumed, the files contain
the entries of each start of the run (attempt). The module uses only the entries of the attempts
that led to the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import KeyNotFound, StoreError
from resilient.layouts.json_files import whole
from resilient.layouts.model import Unreadable
from resilient.layouts.tfevents import FILE, read_scalars
from resilient.storage.folder import open_folder
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from resilient.layouts.tfevents import Scalar
    from resilient.storage.folder import DirectoryListing, Folder

Entry = dict[str, Any]
LINES = "log.jsonl"
_EVENTS = "events/rank-0.jsonl"
_FOLDERS = ("runs", "events")
_FILES_MAX = 256
_LINES_BYTES_MAX = 32 << 20
_NOTED = ("at", "generation")
_SUMMARY = "train_runtime"
SHARED = ("step", "epoch", "num_input_tokens_seen")
"""Keys that entries of losses and of evaluations have in common."""
_PREFIXES = {"train": "", "eval": "eval_", "test": "test_"}


@dataclass(frozen=True, slots=True)
class MetricsLog:
    """Logged metrics of a run from one source.

    Attributes:
        where: Path of the log files.
        attempts: Entries of each attempt, in the order of their start.
        is_exact: Whether the numbers have all logged digits.
        broken: Description of the damage; empty for an intact log.
    """

    where: str
    attempts: tuple[tuple[Entry, ...], ...]
    is_exact: bool
    broken: str = ""

    def until(self, step: int) -> list[Entry]:
        """Return the entries of this log that led to a step."""
        entries = entries_until(self.attempts, step)
        # Omit the summary of a training, which is logged after the last save.
        return [entry for entry in entries if entry["step"] < step or _SUMMARY not in entry]

    def reach(self) -> int:
        """Return the last logged step."""
        return max(
            (entry["step"] for attempt_entries in self.attempts for entry in attempt_entries),
            default=0,
        )


def logs_beside(url: str) -> list[MetricsLog]:
    """Return the logs beside a checkpoint on this machine; empty for other URLs.

    Raises:
        StoreError: A file could not be read.
    """
    if protocol_of(url) != "file":
        return []
    parent, logs = Path(url).absolute().parent, []
    for name in (*_FOLDERS, LINES):
        place = parent / name
        # A link may lead to files of another user.
        if place.exists() and not place.is_symlink():
            folder = open_folder(str(place))
            logs += logs_in(folder, folder.list())
    return logs


def logs_in(folder: Folder, listing: DirectoryListing) -> list[MetricsLog]:
    """Return the logs in a folder, or in a single named file.

    Raises:
        StoreError: A file could not be read.
    """
    names = sorted(listing.sizes)
    logs = [
        log
        for name in names
        if name in (LINES, _EVENTS, _EVENTS.rpartition("/")[2])
        and (log := _read_lines(folder, listing, name))
    ]
    event_log = _read_tensorboard(folder, listing, [name for name in names if FILE.fullmatch(name)])
    return [*logs, *([event_log] if event_log else [])]


def _read_tensorboard(
    folder: Folder, listing: DirectoryListing, names: list[str]
) -> MetricsLog | None:
    points, problem = [], ""
    for name in names[:_FILES_MAX]:
        try:
            scalars = read_scalars(folder, listing, name)
        except Unreadable as error:
            problem = problem or f"{name}: {error}"
            continue
        problem = problem or (f"{name}: {scalars.broken}" if scalars.broken else "")
        if entries := list(entries_of(scalars.found)):
            points.append((scalars.began, entries))
    if not points:
        return None
    points.sort(key=lambda pair: pair[0])
    attempts = tuple(
        attempt_entries for _, entries in points for attempt_entries in _rising_ranges(entries)
    )
    origin = f"{len(points)} event files of TensorBoard in {folder.url}"
    return MetricsLog(origin, attempts, is_exact=False, broken=problem)


def entries_of(scalars: Iterable[Scalar]) -> Iterator[Entry]:
    """Yield the log entries that the Trainer of Transformers wrote as single numbers."""
    entry: Entry = {}
    kind = ""
    for scalar in scalars:
        family, _, name = scalar.tag.partition("/")
        if family not in _PREFIXES or not name:
            continue
        key = _PREFIXES[family] + name
        is_shared = family == "train" and name in SHARED
        is_other = entry and not is_shared and family != kind
        if entry and (is_other or scalar.step != entry["step"] or key in entry):
            yield entry
            entry, kind = {}, ""
        kind = kind if is_shared and kind else family
        entry |= {key: scalar.value, "step": scalar.step}
    if entry:
        yield entry


def _read_lines(folder: Folder, listing: DirectoryListing, name: str) -> MetricsLog | None:
    size_bytes = listing.sizes[name]
    data = folder.read(name, 0, _LINES_BYTES_MAX)
    attempts: dict[int, list[Entry]] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        attempt_entries, entry = _line(line)
        if entry:
            attempts.setdefault(attempt_entries, []).append(entry)
    problem = "" if size_bytes <= _LINES_BYTES_MAX else "only its first lines are read"
    if not attempts:
        return None
    origin = folder.url if listing.is_file else f"{folder.url}/{name}"
    entries = tuple(
        attempt_entries
        for attempt in sorted(attempts)
        for attempt_entries in _rising_ranges(attempts[attempt])
    )
    return MetricsLog(origin, entries, is_exact=True, broken=problem)


def _rising_ranges(entries: Sequence[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Yield the ranges in which steps only rise; a decrease starts a new range."""
    begin = 0
    for at in range(1, len(entries) + 1):
        if at == len(entries) or entries[at]["step"] < entries[at - 1]["step"]:
            yield tuple(entries[begin:at])
            begin = at


def _line(text: str) -> tuple[int, Entry]:
    """Return the attempt and the entry of a line; the entry of an invalid line is empty."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return 0, {}
    if not isinstance(line, dict):
        return 0, {}
    metrics_of_line = {key: value for key, value in line.items() if key not in _NOTED}
    if "event" in line:
        metrics = line.get("metrics")
        metrics_of_line = (
            metrics if line["event"] == "MetricsLogged" and isinstance(metrics, dict) else {}
        )
    # Entries of speed have the same keys but no epoch, and do not belong to a history.
    is_entry = "epoch" in metrics_of_line and whole(metrics_of_line.get("step")) is not None
    plain = {
        key: value
        for key, value in metrics_of_line.items()
        if isinstance(value, str | int | float | None)
    }
    return whole(line.get("generation")) or 0, plain if is_entry else {}


def entries_until(attempts: Sequence[Sequence[Entry]], step: int) -> list[Entry]:
    """Return the entries that led to a step, from several attempts of a run.

    The last attempt that reached the step counts from its start. For steps before that start, the
    last earlier attempt that reached the start counts, and so on. All other attempts are ignored.
    """
    entries: list[Entry] = []
    limit, count = step, len(attempts)
    while count and limit > 0:
        ends = [_end(attempt, limit) for attempt in attempts[:count]]
        at = max(range(count), key=lambda index: (ends[index], index))
        attempt_entries = [attempt for attempt in attempts[at] if attempt["step"] <= limit]
        if attempt_entries:
            entries = [*attempt_entries, *entries]
            limit = attempt_entries[0]["step"] - 1
        count = at
    return entries


def _end(entries: Sequence[Entry], limit: int) -> int:
    """Return the last step of an attempt up to a limit; 0 if the attempt began after the limit."""
    first = min((entry["step"] for entry in entries), default=limit + 1)
    last = max((entry["step"] for entry in entries), default=0)
    return min(last, limit) if first <= limit else 0


def read_beside(url: str, name: str) -> bytes:
    """Return a small file beside a checkpoint on this machine; empty if there is none.

    Raises:
        StoreError: The file could not be read.
    """
    place = Path(url).absolute().parent / name
    if protocol_of(url) != "file" or place.is_symlink() or not place.is_file():
        return b""
    folder = open_folder(str(place))
    try:
        return folder.read(place.name, 0, _LINES_BYTES_MAX)
    except (KeyNotFound, StoreError):
        return b""
