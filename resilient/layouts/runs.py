"""The checkpoints of another tool's run, by the names in its folder; no checkpoint is opened."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.layouts import deepspeed, hf_trainer, megatron
from resilient.layouts.archives import open_archive
from resilient.layouts.documents import read_json, read_text, whole
from resilient.layouts.incomplete import SENTINEL, saved_name
from resilient.layouts.recognizing import LAYOUTS
from resilient.layouts.values import Unreadable
from resilient.storage.folder import Listing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from resilient.storage.folder import Folder

WEIGHTS = "hf-model"
FILE = "file"
_REPAIRED = "repaired"
_DEPTH_MAX = 4
_DIGITS_MAX = 12
_RUNS_MAX = 16
"""Runs in a folder whose trackers and states are read."""
_POINTERS = (deepspeed.LATEST, megatron.TRACKER)
_FILES = (".ckpt", ".pt", ".pth")
_STATES = re.compile(r"\d|best|ckpt|checkpoint|final|last|model")
"""What files of a script's own are called that are checkpoints, and not data or part of one."""
_PARTS = re.compile(r"args|loader|optim|random|rng|scaler|sched")
_STEP = re.compile(r"(?:step|iter|ckpt|checkpoint|^)[=_-]?(\d{1,12})(?!\d|[_-]\d)")
_NUMBER = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
_METRIC = re.compile(r"\d+\.\d+")
_LAST = re.compile(r"last(?:-v(\d{1,6}))?\.ckpt")
"""The name of the newest checkpoint of Lightning: ``ckpt_path="last"`` resumes from it."""
_LAST_READ_MAX = 16
_REST = "meta.pt"
REPORTS = ("repaired.json", "rebuilt.json")
"""Reports of our repairs; a folder with one is a copy of the checkpoint that was repaired."""
_REFERENCE = re.compile(r"latest(?:~(\d{1,6}))?|step:(\d{1,12})")


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint of a run.

    Attributes:
        name: where it is in the run's folder.
        step: by its name; None of one that says none.
        order: the step, or else the numbers in its name; those of a run are ordered by it.
        layout: as ``Contents.layout`` mostly is, which is known only when it is read.
        size_bytes: of its files.
        files: how many.
        changed: when the last of them was written, seconds since 1970; None where nobody tells.
        is_unfinished: Whether its save never ended, by its name or the mark in it.
        is_repaired: Whether our repair wrote it beside the damaged one.
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
        """The folder that it is in, empty for the run's own."""
        return self.name.rpartition("/")[0]

    @property
    def base(self) -> str:
        """Its name in that folder."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Pointers:
    """What runs say of their checkpoints.

    Attributes:
        latest: the names of those that a tracker names.
        best: of those that a Trainer calls its best.
        stale: each tracker that names what is not there, and what that is.
    """

    latest: frozenset[str]
    best: frozenset[str]
    stale: Mapping[str, str]


def checkpoints_of(listing: Listing) -> list[Kept]:
    """Return the checkpoints below a folder, newest first; those without any number are last.

    A folder of weights is one, and may hold others: so a finished run looks. One that is a
    checkpoint itself holds none.

    Args:
        listing: of the run's folder.
    """
    folders = _folders(listing)
    layouts = {name: _layout(sizes) for name, sizes in folders.items()}
    own = _layout(listing.sizes)
    if own not in ("", WEIGHTS, *layouts.values()):
        return []
    holders = _holders(layouts)
    taken: set[str] = set()
    found = []
    for name in sorted(folders, key=lambda one: (one.count("/"), one)):
        layout = layouts[name]
        if not layout or _is_below(name, taken) or (name, layout) in holders:
            continue
        if layout != WEIGHTS:
            taken.add(name)
        paths = (f"{name}/{one}" for one in folders[name])
        found.append(_kept(name, layout, folders[name], _last(listing, paths)))
    for name, size_bytes in listing.sizes.items():
        if _is_state(name) and not _is_below(name, taken):
            found.append(_kept(name, FILE, {name: size_bytes}, _last(listing, [name])))
    by_name = sorted(found, key=lambda one: one.name)
    return sorted(_with_repaired(by_name), key=lambda one: one.order, reverse=True)


def _with_repaired(found: list[Kept]) -> list[Kept]:
    """Note which checkpoints a repair wrote into a folder below those of the run."""
    own = {one.folder for one in found if not one.is_repaired}
    below = [
        replace(one, is_repaired=one.is_repaired and bool(own.intersection(_above(one.folder))))
        for one in found
    ]
    names = {one.name for one in found}
    return [
        replace(one, is_repaired=True) if one.layout == FILE and _repaired_file(one, names) else one
        for one in below
    ]


def _repaired_file(one: Kept, names: set[str]) -> bool:
    """Return True for a file in ``repaired/`` beside the damaged file of the same name."""
    above, _, last = one.folder.rpartition("/")
    return last == _REPAIRED and f"{above}/{one.base}".removeprefix("/") in names


def _above(folder: str) -> list[str]:
    """Return the folders that a folder is in; the run's own is the empty name."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:depth]) for depth in range(len(parts))]


def with_last(folder: Folder, listing: Listing, found: Sequence[Kept]) -> list[Kept]:
    """Return the checkpoints of a run with the steps of Lightning's ``last.ckpt``, newest first.

    The name of ``last.ckpt`` says no step, so its own state is read.

    Args:
        folder: The folder of the runs.
        listing: The files in the folder.
        found: The checkpoints.

    Raises:
        StoreError: A file could not be read.
    """
    lasts = [one for one in found if _LAST.fullmatch(one.base) and one.step is None]
    steps = {one.name: _step_inside(folder, listing, one) for one in lasts[:_LAST_READ_MAX]}
    read = [
        replace(one, step=step, order=(step,)) if (step := steps.get(one.name)) is not None else one
        for one in found
    ]
    return sorted(read, key=lambda one: (one.order, one.name in steps), reverse=True)


def _step_inside(folder: Folder, listing: Listing, kept: Kept) -> int | None:
    name = kept.name if kept.layout == FILE else f"{kept.name}/{_REST}"
    try:
        value = open_archive(folder, listing, name).value
    except Unreadable:
        return None
    return whole(value.get("global_step")) if isinstance(value, dict) else None


def _last_of(run: Iterable[Kept]) -> Kept | None:
    """Return the ``last.ckpt`` that Lightning resumes from: the one that was written last."""
    numbered = [(match, one) for one in run if (match := _LAST.fullmatch(one.base))]
    newest = sorted(numbered, key=lambda one: (one[1].changed or 0.0, int(one[0][1] or 0)))
    return newest[-1][1] if newest else None


def pointed_at(folder: Folder, listing: Listing, found: Sequence[Kept]) -> Pointers:
    """Return what trackers name beside the checkpoints, and the best of Transformers' Trainer.

    Args:
        folder: of the runs.
        listing: what is in it.
        found: the checkpoints, newest first.

    Raises:
        StoreError: it could not be read.
    """
    latest, best, stale = set(), set(), {}
    for place, run in list(_by_folder(found).items())[:_RUNS_MAX]:
        beside = {one.base: one for one in run}
        head = f"{place}/" if place else ""
        for pointer in _POINTERS:
            told = read_text(folder, listing, f"{head}{pointer}")
            tag = told.rstrip("/").removeprefix("./")
            names = (tag, _iteration(tag), *(f"{tag}{end}" for end in _FILES))
            one = next((beside[name] for name in names if name in beside), None)
            if one is not None:
                latest.add(one.name)
            elif tag and not _is_any_there(listing, head, names):
                stale[f"{head}{pointer}"] = tag[:80]
        last = _last_of(run)
        if last is not None:
            latest.add(last.name)
        named = beside.get(_best(folder, listing, beside.values()))
        if named is not None:
            best.add(named.name)
    return Pointers(frozenset(latest), frozenset(best), stale)


def referred(reference: str, found: Sequence[Kept], latest: Collection[str] = ()) -> list[Kept]:
    """Return what ``latest``, ``latest~2``, ``step:500`` or a name means: one for each run.

    Args:
        reference: one of these.
        found: the checkpoints, newest first.
        latest: what trackers name; a run without one has its newest.
    """
    named = [one for one in found if reference in (one.name, one.base)]
    match = _REFERENCE.fullmatch(reference)
    if named or match is None:
        return named
    if match[2] is not None:
        return [one for one in found if one.step == int(match[2])]
    states = [
        one
        for one in found
        if one.layout != WEIGHTS and not one.is_unfinished and not one.is_repaired
        if one.order or one.name in latest
    ]
    runs = _by_folder(states).values()
    back = int(match[1] or 0)
    return [one for run in runs for one in _from_latest(run, latest)[back : back + 1]]


def _from_latest(run: list[Kept], latest: Collection[str]) -> list[Kept]:
    at = next((nth for nth, one in enumerate(run) if one.name in latest), 0)
    if not run or not _LAST.fullmatch(run[at].base):
        return run[at:]
    # Lightning writes the newest checkpoint twice: as last.ckpt and under its own name.
    step = run[at].step
    return [run[at], *(one for one in run[at + 1 :] if one.step is None or one.step != step)]


def _is_any_there(listing: Listing, head: str, names: Iterable[str]) -> bool:
    """Say whether there is anything under one of the names, be it a checkpoint or not."""
    wanted = {f"{head}{one}" for one in names if one}
    starts = tuple(f"{one}/" for one in wanted)
    return any(one in wanted or one.startswith(starts) for one in listing.sizes)


def _iteration(tag: str) -> str:
    """Return the folder of a tracker's number, as Megatron calls it."""
    return f"iter_{int(tag):07d}" if tag.isdecimal() and len(tag) < _DIGITS_MAX else ""


def _best(folder: Folder, listing: Listing, beside: Iterable[Kept]) -> str:
    newest = next((one for one in beside if one.layout == "hf-trainer"), None)
    if newest is None:
        return ""
    try:
        state = read_json(folder, listing, f"{newest.name}/{hf_trainer.STATE}")
    except Unreadable:
        return ""
    best = state.get("best_model_checkpoint")
    return best.replace("\\", "/").rstrip("/").rpartition("/")[2] if isinstance(best, str) else ""


def _last(listing: Listing, names: Iterable[str]) -> float | None:
    """Return when the last of some files was written, None where nobody tells."""
    return max((listing.changed[one] for one in names if one in listing.changed), default=None)


def _kept(name: str, layout: str, sizes: Mapping[str, int], changed: float | None) -> Kept:
    base = _METRIC.sub("", name.rpartition("/")[2].removesuffix(".ckpt"))
    said = _STEP.findall(base)
    # accelerate counts its saves.
    step = int(said[-1]) if said and layout != "accelerate" else None
    order = tuple(map(int, _NUMBER.findall(base))) if step is None else (step,)
    return Kept(
        name,
        step,
        order,
        layout,
        sum(sizes.values()),
        len(sizes),
        changed,
        is_unfinished=SENTINEL in sizes or bool(saved_name(name)),
        is_repaired=any(one in sizes for one in REPORTS),
    )


def _is_state(name: str) -> bool:
    """Say whether a file may be a checkpoint by its name."""
    parts = name.split("/")
    is_hidden = any(one.startswith(".") for one in parts)
    base = parts[-1].lower()
    is_own = _STATES.search(base) is not None and _PARTS.search(base) is None
    is_named = name.endswith(_FILES[0]) or is_own
    return name.endswith(_FILES) and is_named and not is_hidden and len(parts) <= _DEPTH_MAX + 1


def _folders(listing: Listing) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size_bytes in listing.sizes.items():
        parts = name.split("/")
        if any(one.startswith(".") for one in parts[:-1]):
            continue
        for depth in range(1, min(len(parts), _DEPTH_MAX + 1)):
            found["/".join(parts[:depth])]["/".join(parts[depth:])] = size_bytes
    return found


def _layout(sizes: Mapping[str, int]) -> str:
    inside = Listing(sizes)
    return next((one.name for one in LAYOUTS if one.is_it(inside)), "")


def _is_below(name: str, taken: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:depth]) in taken for depth in range(1, len(parts)))


def _holders(layouts: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return each folder with each layout of what is below it.

    One that has the layout of what it holds only looks like a checkpoint.
    """
    found = set()
    for name, layout in layouts.items():
        parts = name.split("/")
        found |= {("/".join(parts[:depth]), layout) for depth in range(1, len(parts))}
    return found


def _by_folder(found: Iterable[Kept]) -> dict[str, list[Kept]]:
    runs: dict[str, list[Kept]] = defaultdict(list)
    for one in found:
        runs[one.folder].append(one)
    return runs
