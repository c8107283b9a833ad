"""Checkpoints in the run folder of another tool: their list, and resolution of references.

A reference is ``latest``, ``latest~2`` (two checkpoints before the latest), ``step:500`` or a name.
The list needs only the names of files. The exception is Lightning's ``last.ckpt``, whose name does
not contain its step, so this file is opened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.layouts import deepspeed, hf_trainer, megatron
from resilient.layouts.detect import layout_of
from resilient.layouts.incomplete import SENTINEL, saved_name
from resilient.layouts.json_files import read_json, read_text, whole
from resilient.layouts.model import Unreadable
from resilient.layouts.neighbours import REPAIRED, REPORT
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from resilient.storage.folder import DirectoryListing, Folder

_STEP_FOLDER = re.compile(r"([^/]*?(\d{1,12}))/")
WEIGHTS = "hf-model"
FILE = "file"
_DEPTH_MAX = 4
_DIGITS_MAX = 12
_RUNS_MAX = 16
"""Largest number of runs in a folder for which trackers and states are read."""
_POINTERS = (deepspeed.LATEST, megatron.TRACKER)
_FILES = (".ckpt", ".pt", ".pth")
_STATES = re.compile(r"\d|best|ckpt|checkpoint|final|last|model")
"""Names of a script's own files that are checkpoints, and not data or parts of a checkpoint."""
_PARTS = re.compile(r"args|loader|optim|random|rng|scaler|sched")
_STEP = re.compile(r"(?:step|iter|ckpt|checkpoint|^)[=_-]?(\d{1,12})(?!\d|[_-]\d)")
_NUMBER = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
_METRIC = re.compile(r"\d+\.\d+")
_LAST = re.compile(r"last(?:-v(\d{1,6}))?\.ckpt")
"""Name of Lightning's newest checkpoint, from which ``ckpt_path="last"`` resumes."""
_LAST_READ_MAX = 16
_REST = "meta.pt"
REPORTS = (REPORT, "rebuilt.json")
"""Names of repair reports; a folder with a report is a repaired copy of a checkpoint."""
_REFERENCE = re.compile(r"latest(?:~(\d{1,6}))?|step:(\d{1,12})")


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint of a run.

    Attributes:
        name: Path in the run's folder.
        step: Step in the name; None without one.
        order: Sort key within a run: the step, or the numbers in the name.
        layout: ``Contents.layout`` according to file names; the contents may show another layout.
        size_bytes: Total size of the files.
        files: Number of files.
        changed: Time of the last write, in seconds since 1970; None if unknown.
        is_unfinished: Whether the name or a marker file shows an incomplete save.
        is_repaired: Whether our repair wrote the checkpoint beside the damaged one.
    """

    name: str
    step: int | None
    order: tuple[int, ...]
    layout: str
    size_bytes: int
    files: int
    changed: float | None = None
    is_unfinished: bool = False
    is_repaired: bool = False

    @property
    def folder(self) -> str:
        """Parent folder of the checkpoint; empty for the run's own folder."""
        return self.name.rpartition("/")[0]

    @property
    def base(self) -> str:
        """Name of the checkpoint in its parent folder."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Pointers:
    """References of runs to their checkpoints.

    Attributes:
        latest: Checkpoints that a tracker names.
        best: Checkpoints that a Trainer calls its best.
        stale: Trackers that name a missing checkpoint, each with this name.
    """

    latest: frozenset[str]
    best: frozenset[str]
    stale: Mapping[str, str]


def checkpoints_in(listing: DirectoryListing) -> list[str]:
    """Return the inner folders with names of checkpoints, newest first."""
    steps = {
        match[1]: int(match[2])
        for file in listing.sizes
        if (match := _STEP_FOLDER.match(file)) and not saved_name(match[1])
    }
    return sorted(steps, key=lambda checkpoint: (-steps[checkpoint], checkpoint))


def checkpoints_of(listing: DirectoryListing) -> list[RunCheckpoint]:
    """Return the checkpoints below a folder, newest first; checkpoints without a number are last.

    A folder of weights may contain other checkpoints, as in a finished run. Any other checkpoint
    contains no checkpoints.

    Args:
        listing: Listing of the run's folder.
    """
    folders = _folders(listing)
    layouts = {name: layout_of(sizes) for name, sizes in folders.items()}
    root_layout = layout_of(listing.sizes)
    if root_layout not in ("", WEIGHTS, *layouts.values()):
        return []
    holders = _holders(layouts)
    state_folders: set[str] = set()
    checkpoints = []
    for name in sorted(folders, key=lambda folder: (folder.count("/"), folder)):
        layout = layouts[name]
        if not layout or _is_below(name, state_folders) or (name, layout) in holders:
            continue
        if layout != WEIGHTS:
            state_folders.add(name)
        paths = (f"{name}/{folder}" for folder in folders[name])
        checkpoints.append(
            _run_checkpoint(name, layout, folders[name], _last_write(listing, paths))
        )
    for name, size_bytes in listing.sizes.items():
        if _is_state(name) and not _is_below(name, state_folders):
            checkpoints.append(
                _run_checkpoint(name, FILE, {name: size_bytes}, _last_write(listing, [name]))
            )
    by_name = sorted(checkpoints, key=lambda checkpoint: checkpoint.name)
    return sorted(_with_repaired(by_name), key=lambda checkpoint: checkpoint.order, reverse=True)


def _with_repaired(checkpoints: list[RunCheckpoint]) -> list[RunCheckpoint]:
    """Mark the checkpoints that a repair wrote into a folder below the run."""
    run_folders = {checkpoint.folder for checkpoint in checkpoints if not checkpoint.is_repaired}
    marked_checkpoints = [
        replace(
            checkpoint,
            is_repaired=checkpoint.is_repaired
            and bool(run_folders.intersection(_parent_folders(checkpoint.folder))),
        )
        for checkpoint in checkpoints
    ]
    names = {checkpoint.name for checkpoint in checkpoints}
    return [
        replace(checkpoint, is_repaired=True)
        if checkpoint.layout == FILE and _repaired_file(checkpoint, names)
        else checkpoint
        for checkpoint in marked_checkpoints
    ]


def _repaired_file(checkpoint: RunCheckpoint, names: set[str]) -> bool:
    """Return True for a file in ``repaired/`` beside the damaged file of the same name."""
    parent, _, last = checkpoint.folder.rpartition("/")
    return last == REPAIRED and f"{parent}/{checkpoint.base}".removeprefix("/") in names


def _parent_folders(folder: str) -> list[str]:
    """Return the parent folders of a folder; the run's own folder has the empty name."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:depth]) for depth in range(len(parts))]


def with_last(
    folder: Folder, listing: DirectoryListing, checkpoints: Sequence[RunCheckpoint]
) -> list[RunCheckpoint]:
    """Return the checkpoints of a run with the steps of Lightning's ``last.ckpt``, newest first.

    The name of ``last.ckpt`` contains no step, so its own state is read.

    Args:
        folder: Folder of the runs.
        listing: Files in the folder.
        checkpoints: The checkpoints.

    Raises:
        StoreError: A file could not be read.
    """
    lasts = [
        checkpoint
        for checkpoint in checkpoints
        if _LAST.fullmatch(checkpoint.base) and checkpoint.step is None
    ]
    steps = {path.name: _step_inside(folder, listing, path) for path in lasts[:_LAST_READ_MAX]}
    read_checkpoints = [
        replace(checkpoint, step=step, order=(step,))
        if (step := steps.get(checkpoint.name)) is not None
        else checkpoint
        for checkpoint in checkpoints
    ]
    return sorted(
        read_checkpoints,
        key=lambda checkpoint: (checkpoint.order, checkpoint.name in steps),
        reverse=True,
    )


def _step_inside(folder: Folder, listing: DirectoryListing, kept: RunCheckpoint) -> int | None:
    name = kept.name if kept.layout == FILE else f"{kept.name}/{_REST}"
    try:
        value = open_archive(folder, listing, name).value
    except Unreadable:
        return None
    return whole(value.get("global_step")) if isinstance(value, dict) else None


def _last_of(run: Iterable[RunCheckpoint]) -> RunCheckpoint | None:
    """Return the newest ``last.ckpt``, from which Lightning resumes."""
    numbered = [
        (match, checkpoint) for checkpoint in run if (match := _LAST.fullmatch(checkpoint.base))
    ]
    newest = sorted(numbered, key=lambda pair: (pair[1].changed or 0.0, int(pair[0][1] or 0)))
    return newest[-1][1] if newest else None


def pointed_at(
    folder: Folder, listing: DirectoryListing, checkpoints: Sequence[RunCheckpoint]
) -> Pointers:
    """Return the checkpoints that trackers name, and those that a Trainer calls its best.

    Args:
        folder: Folder of the runs.
        listing: Its files.
        checkpoints: The checkpoints, newest first.

    Raises:
        StoreError: A file could not be read.
    """
    latest, best, stale = set(), set(), {}
    for place, run in list(_by_folder(checkpoints).items())[:_RUNS_MAX]:
        checkpoint_by_base = {checkpoint.base: checkpoint for checkpoint in run}
        head = f"{place}/" if place else ""
        for pointer in _POINTERS:
            target = read_text(folder, listing, f"{head}{pointer}")
            tag = target.rstrip("/").removeprefix("./")
            names = (tag, _iteration(tag), *(f"{tag}{end}" for end in _FILES))
            checkpoint = next(
                (checkpoint_by_base[name] for name in names if name in checkpoint_by_base), None
            )
            if checkpoint is not None:
                latest.add(checkpoint.name)
            elif tag and not _is_any_there(listing, head, names):
                stale[f"{head}{pointer}"] = tag[:80]
        last = _last_of(run)
        if last is not None:
            latest.add(last.name)
        best_by_pointer = checkpoint_by_base.get(
            _best(folder, listing, checkpoint_by_base.values())
        )
        if best_by_pointer is not None:
            best.add(best_by_pointer.name)
    return Pointers(frozenset(latest), frozenset(best), stale)


def referred(
    reference: str, checkpoints: Sequence[RunCheckpoint], latest: Collection[str] = ()
) -> list[RunCheckpoint]:
    """Resolve ``latest``, ``latest~2``, ``step:500`` or a name to one checkpoint of each run.

    Args:
        reference: The reference to resolve.
        checkpoints: The checkpoints, newest first.
        latest: Checkpoints that trackers name. A run without a tracker uses its newest checkpoint.
    """
    matches = [
        checkpoint for checkpoint in checkpoints if reference in (checkpoint.name, checkpoint.base)
    ]
    match = _REFERENCE.fullmatch(reference)
    if matches or match is None:
        return matches
    if match[2] is not None:
        return [checkpoint for checkpoint in checkpoints if checkpoint.step == int(match[2])]
    states = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.layout != WEIGHTS
        and not checkpoint.is_unfinished
        and not checkpoint.is_repaired
        if checkpoint.order or checkpoint.name in latest
    ]
    runs = _by_folder(states).values()
    distance = int(match[1] or 0)
    return [
        checkpoint
        for run in runs
        for checkpoint in _from_latest(run, latest)[distance : distance + 1]
    ]


def _from_latest(run: list[RunCheckpoint], latest: Collection[str]) -> list[RunCheckpoint]:
    at = next((nth for nth, checkpoint in enumerate(run) if checkpoint.name in latest), 0)
    if not run or not _LAST.fullmatch(run[at].base):
        return run[at:]
    # Lightning writes the newest checkpoint twice: as last.ckpt and under its own name.
    step = run[at].step
    return [
        run[at],
        *(
            checkpoint
            for checkpoint in run[at + 1 :]
            if checkpoint.step is None or checkpoint.step != step
        ),
    ]


def _is_any_there(listing: DirectoryListing, head: str, names: Iterable[str]) -> bool:
    """Return True if any file or folder has one of the names."""
    file_names = {f"{head}{name}" for name in names if name}
    starts = tuple(f"{name}/" for name in file_names)
    return any(file in file_names or file.startswith(starts) for file in listing.sizes)


def _iteration(tag: str) -> str:
    """Return the folder of a tracker's iteration, as Megatron names it."""
    return f"iter_{int(tag):07d}" if tag.isdecimal() and len(tag) < _DIGITS_MAX else ""


def _best(folder: Folder, listing: DirectoryListing, beside: Iterable[RunCheckpoint]) -> str:
    newest = next((checkpoint for checkpoint in beside if checkpoint.layout == "hf-trainer"), None)
    if newest is None:
        return ""
    try:
        state = read_json(folder, listing, f"{newest.name}/{hf_trainer.STATE}")
    except Unreadable:
        return ""
    best = state.get("best_model_checkpoint")
    return best.replace("\\", "/").rstrip("/").rpartition("/")[2] if isinstance(best, str) else ""


def _last_write(listing: DirectoryListing, names: Iterable[str]) -> float | None:
    """Return the time of the last write of some files; None if unknown."""
    return max((listing.changed[name] for name in names if name in listing.changed), default=None)


def order_of(name: str, layout: str) -> tuple[int | None, tuple[int, ...]]:
    """Return the step in a checkpoint's name (None without one), and its sort key within a run.

    Args:
        name: Path in the run's folder.
        layout: Name of its layout.
    """
    base = _METRIC.sub("", name.rpartition("/")[2].removesuffix(".ckpt"))
    steps = _STEP.findall(base)
    # The number in a name of accelerate counts saves, not steps.
    step = int(steps[-1]) if steps and layout != "accelerate" else None
    return step, tuple(map(int, _NUMBER.findall(base))) if step is None else (step,)


def _run_checkpoint(
    name: str, layout: str, sizes: Mapping[str, int], changed: float | None
) -> RunCheckpoint:
    step, order = order_of(name, layout)
    return RunCheckpoint(
        name,
        step,
        order,
        layout,
        sum(sizes.values()),
        len(sizes),
        changed,
        is_unfinished=SENTINEL in sizes or bool(saved_name(name)),
        is_repaired=any(report in sizes for report in REPORTS),
    )


def _is_state(name: str) -> bool:
    """Return True if the name of a file may be that of a checkpoint."""
    parts = name.split("/")
    is_hidden = any(part.startswith(".") for part in parts)
    base = parts[-1].lower()
    is_own = _STATES.search(base) is not None and _PARTS.search(base) is None
    is_named = name.endswith(_FILES[0]) or is_own
    return name.endswith(_FILES) and is_named and not is_hidden and len(parts) <= _DEPTH_MAX + 1


def _folders(listing: DirectoryListing) -> dict[str, dict[str, int]]:
    sizes_by_folder: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size_bytes in listing.sizes.items():
        parts = name.split("/")
        if any(part.startswith(".") for part in parts[:-1]):
            continue
        for depth in range(1, min(len(parts), _DEPTH_MAX + 1)):
            sizes_by_folder["/".join(parts[:depth])]["/".join(parts[depth:])] = size_bytes
    return sizes_by_folder


def _is_below(name: str, taken: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:depth]) in taken for depth in range(1, len(parts)))


def _holders(layouts: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return pairs of a folder and the layout of an inner folder.

    If a folder and an inner folder have the same layout, only the inner folder is a checkpoint.
    """
    holders = set()
    for name, layout in layouts.items():
        parts = name.split("/")
        holders |= {("/".join(parts[:depth]), layout) for depth in range(1, len(parts))}
    return holders


def _by_folder(checkpoints: Iterable[RunCheckpoint]) -> dict[str, list[RunCheckpoint]]:
    runs: dict[str, list[RunCheckpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        runs[checkpoint.folder].append(checkpoint)
    return runs
