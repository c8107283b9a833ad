"""What a run logged, from the files that it leaves beside its checkpoints.

Three kinds: ``log.jsonl`` and the events of our trainer, to the last digit; and the event files of
TensorBoard, as the Trainer of Transformers writes them to ``runs``, in single precision. A run that
was resumed left several lives in them, and only those count that led to the checkpoint.
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
"""What stands in an entry of losses and in one of an evaluation, both times as of training."""
_PREFIXES = {"train": "", "eval": "eval_", "test": "test_"}


@dataclass(frozen=True, slots=True)
class MetricsLog:
    """What one source says of a run.

    Attributes:
        where: the files.
        lives: the entries of each life, in the order in which they began.
        is_exact: whether its numbers are those that were logged, to the last digit.
        broken: what is wrong with it; empty of what is whole.
    """

    where: str
    lives: tuple[tuple[Entry, ...], ...]
    is_exact: bool
    broken: str = ""

    def until(self, step: int) -> list[Entry]:
        """Return the entries of the lives that led to a step, as far as they are here."""
        found = woven(self.lives, step)
        # What sums a training up is logged behind its last save.
        return [one for one in found if one["step"] < step or _SUMMARY not in one]

    def reach(self) -> int:
        """Return the last step that anything was logged of."""
        return max((one["step"] for life in self.lives for one in life), default=0)


def logs_beside(url: str) -> list[MetricsLog]:
    """Return what is logged beside a checkpoint on this machine; elsewhere it has to be named.

    Raises:
        StoreError: it could not be read.
    """
    if protocol_of(url) != "file":
        return []
    parent, found = Path(url).absolute().parent, []
    for name in (*_FOLDERS, LINES):
        place = parent / name
        # A link leads to what somebody else may have put there.
        if place.exists() and not place.is_symlink():
            folder = open_folder(str(place))
            found += logs_in(folder, folder.list())
    return found


def logs_in(folder: Folder, listing: DirectoryListing) -> list[MetricsLog]:
    """Return what is logged in a folder, or in a file that is named itself.

    Raises:
        StoreError: it could not be read.
    """
    names = sorted(listing.sizes)
    found = [
        log
        for name in names
        if name in (LINES, _EVENTS, _EVENTS.rpartition("/")[2])
        and (log := _of_lines(folder, listing, name))
    ]
    board = _of_board(folder, listing, [one for one in names if FILE.fullmatch(one)])
    return [*found, *([board] if board else [])]


def _of_board(folder: Folder, listing: DirectoryListing, names: list[str]) -> MetricsLog | None:
    told, broken = [], ""
    for name in names[:_FILES_MAX]:
        try:
            one = read_scalars(folder, listing, name)
        except Unreadable as error:
            broken = broken or f"{name}: {error}"
            continue
        broken = broken or (f"{name}: {one.broken}" if one.broken else "")
        if entries := list(entries_of(one.found)):
            told.append((one.began, entries))
    if not told:
        return None
    told.sort(key=lambda one: one[0])
    lives = tuple(life for _, entries in told for life in _lives(entries))
    where = f"{len(told)} event files of TensorBoard in {folder.url}"
    return MetricsLog(where, lives, is_exact=False, broken=broken)


def entries_of(scalars: Iterable[Scalar]) -> Iterator[Entry]:
    """Yield the entries that the Trainer of Transformers wrote number by number (pure)."""
    entry: Entry = {}
    kind = ""
    for one in scalars:
        family, _, name = one.tag.partition("/")
        if family not in _PREFIXES or not name:
            continue
        key = _PREFIXES[family] + name
        is_shared = family == "train" and name in SHARED
        is_other = entry and not is_shared and family != kind
        if entry and (is_other or one.step != entry["step"] or key in entry):
            yield entry
            entry, kind = {}, ""
        kind = kind if is_shared and kind else family
        entry |= {key: one.value, "step": one.step}
    if entry:
        yield entry


def _of_lines(folder: Folder, listing: DirectoryListing, name: str) -> MetricsLog | None:
    size_bytes = listing.sizes[name]
    data = folder.read(name, 0, _LINES_BYTES_MAX)
    lives: dict[int, list[Entry]] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        life, entry = _line(line)
        if entry:
            lives.setdefault(life, []).append(entry)
    broken = "" if size_bytes <= _LINES_BYTES_MAX else "of its lines the first are read"
    if not lives:
        return None
    where = folder.url if listing.is_file else f"{folder.url}/{name}"
    told = tuple(life for one in sorted(lives) for life in _lives(lives[one]))
    return MetricsLog(where, told, is_exact=True, broken=broken)


def _lives(entries: Sequence[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Yield the stretches in which steps only rise; a run that went back begins another."""
    begin = 0
    for at in range(1, len(entries) + 1):
        if at == len(entries) or entries[at]["step"] < entries[at - 1]["step"]:
            yield tuple(entries[begin:at])
            begin = at


def _line(text: str) -> tuple[int, Entry]:
    """Return the life and the entry of a line; empty of one that is none, or was cut."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return 0, {}
    if not isinstance(line, dict):
        return 0, {}
    found = {key: one for key, one in line.items() if key not in _NOTED}
    if "event" in line:
        metrics = line.get("metrics")
        found = metrics if line["event"] == "MetricsLogged" and isinstance(metrics, dict) else {}
    # Speeds are told with the same words, but are no part of a history: they have no epoch.
    is_entry = "epoch" in found and whole(found.get("step")) is not None
    plain = {key: one for key, one in found.items() if isinstance(one, str | int | float | None)}
    return whole(line.get("generation")) or 0, plain if is_entry else {}


def woven(lives: Sequence[Sequence[Entry]], step: int) -> list[Entry]:
    """Return the entries that led to a step, of lives that each went on from some step (pure).

    The life that reached it last counts, from where it began; before that, of the earlier ones, the
    one that reached this place last, and so on. What went on from elsewhere is passed over.
    """
    found: list[Entry] = []
    limit, count = step, len(lives)
    while count and limit > 0:
        ends = [_end(one, limit) for one in lives[:count]]
        at = max(range(count), key=lambda one: (ends[one], one))
        taken = [one for one in lives[at] if one["step"] <= limit]
        if taken:
            found = [*taken, *found]
            limit = taken[0]["step"] - 1
        count = at
    return found


def _end(entries: Sequence[Entry], limit: int) -> int:
    """Return how far a life goes up to a limit; one that went beyond it went through it."""
    first = min((one["step"] for one in entries), default=limit + 1)
    last = max((one["step"] for one in entries), default=0)
    return min(last, limit) if first <= limit else 0


def read_beside(url: str, name: str) -> bytes:
    """Return a small file beside a checkpoint on this machine; empty where there is none.

    Raises:
        StoreError: it could not be read.
    """
    place = Path(url).absolute().parent / name
    if protocol_of(url) != "file" or place.is_symlink() or not place.is_file():
        return b""
    folder = open_folder(str(place))
    try:
        return folder.read(place.name, 0, _LINES_BYTES_MAX)
    except (KeyNotFound, StoreError):
        return b""
