"""The checkpoints of another tool's run, by the names in its folder; no checkpoint is opened."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.layouts import deepspeed, hf_trainer, megatron
from resilient.layouts.documents import read_json, read_text
from resilient.layouts.recognizing import LAYOUTS
from resilient.layouts.values import Unreadable
from resilient.storage.folder import Listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.storage.folder import Folder

WEIGHTS = "hf-model"
FILE = "file"
_FILES = (".ckpt", ".pt", ".pth")
_DEPTH_MAX = 4
_DIGITS_MAX = 12
_STEP = re.compile(r"step[=_-]?(\d{1,12})")
_NUMBER = re.compile(r"\d{1,12}")
_REFERENCE = re.compile(r"latest(?:~(\d{1,6}))?|step:(\d{1,12})")


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint of a run.

    Attributes:
        name: where it is in the run's folder.
        step: by its name; None of one that says none.
        layout: as ``Contents.layout`` mostly is, which is known only when it is read.
        size_bytes: of its files.
        files: how many.
    """

    name: str
    step: int | None
    layout: str
    size_bytes: int
    files: int


def checkpoints_of(listing: Listing) -> list[Kept]:
    """Return the checkpoints below a folder, newest first; those without a step are last.

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
    taken: set[str] = set()
    found = []
    for name in sorted(folders, key=lambda one: (one.count("/"), one)):
        layout = layouts[name]
        if not layout or _is_below(name, taken) or _holds_its_like(name, layouts):
            continue
        if layout != WEIGHTS:
            taken.add(name)
        sizes = folders[name]
        found.append(Kept(name, _step(name), layout, sum(sizes.values()), len(sizes)))
    for name, size_bytes in listing.sizes.items():
        is_deep = name.count("/") > _DEPTH_MAX
        if name.endswith(_FILES) and not is_deep and not _is_below(name, taken):
            found.append(Kept(name, _step(name), FILE, size_bytes, 1))
    return sorted(found, key=lambda one: (one.step is None, -(one.step or 0), one.name))


def pointed_at(folder: Folder, listing: Listing, found: Iterable[Kept]) -> Mapping[str, str]:
    """Return what a run points at, by name: its engine's tracker, and the best of its Trainer.

    Raises:
        StoreError: it could not be read.
    """
    told: dict[str, str] = {}
    kept = list(found)
    names = {one.name: one for one in kept}
    for pointer in (deepspeed.LATEST, megatron.TRACKER):
        tag = read_text(folder, listing, pointer)
        is_number = tag.isdecimal() and len(tag) < _DIGITS_MAX
        wanted = {tag, f"iter_{int(tag):07d}" if is_number else tag}
        told |= dict.fromkeys(wanted & names.keys(), "latest")
    newest = next((one.name for one in kept if one.layout == "hf-trainer"), "")
    try:
        state = read_json(folder, listing, f"{newest}/{hf_trainer.STATE}") if newest else {}
    except Unreadable:
        state = {}
    best = state.get("best_model_checkpoint")
    base = best.replace("\\", "/").rstrip("/").rpartition("/")[2] if isinstance(best, str) else ""
    told |= {one: "best" for one in names if base and one.rpartition("/")[2] == base}
    return told


def referred(reference: str, found: Iterable[Kept]) -> Kept | None:
    """Return the checkpoint that ``latest``, ``latest~2``, ``step:500`` or a name means.

    Args:
        reference: one of these.
        found: the checkpoints, newest first.
    """
    kept = list(found)
    named = [one for one in kept if reference in (one.name, one.name.rpartition("/")[2])]
    if len(named) == 1:
        return named[0]
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return None
    if match[2] is not None:
        return next((one for one in kept if one.step == int(match[2])), None)
    states = [one for one in kept if one.step is not None and one.layout != WEIGHTS]
    back = int(match[1] or 0)
    return states[back] if back < len(states) else None


def _folders(listing: Listing) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size_bytes in listing.sizes.items():
        parts = name.split("/")
        for depth in range(1, min(len(parts), _DEPTH_MAX + 1)):
            found["/".join(parts[:depth])]["/".join(parts[depth:])] = size_bytes
    return found


def _layout(sizes: Mapping[str, int]) -> str:
    inside = Listing(sizes)
    return next((one.name for one in LAYOUTS if one.is_it(inside)), "")


def _is_below(name: str, taken: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:depth]) in taken for depth in range(1, len(parts)))


def _holds_its_like(name: str, layouts: Mapping[str, str]) -> bool:
    """Say whether a folder only looks like a checkpoint because it holds some of that layout."""
    return any(
        layout == layouts[name] and one.startswith(f"{name}/") for one, layout in layouts.items()
    )


def _step(name: str) -> int | None:
    base = name.rpartition("/")[2]
    said = _STEP.findall(base) or _NUMBER.findall(base)
    return int(said[-1]) if said else None
