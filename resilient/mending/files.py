"""Files that hold what mends them: zips of torch, headers of safetensors, two that were swapped."""

from __future__ import annotations

import json
import struct
from itertools import combinations
from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import open_archive
from resilient.layouts.checksums import BEHIND
from resilient.layouts.distributed import INDEX, SLICES, read_index
from resilient.layouts.documents import HEADER_BYTES_MAX, read_header
from resilient.layouts.values import Unreadable
from resilient.layouts.weights import SAFE, TORCH
from resilient.mending.case import looked_through
from resilient.mending.drafts import Draft, size_of, sliced
from resilient.mending.zips import mended_zip, scan_members

if TYPE_CHECKING:
    from resilient.mending.case import Case
    from resilient.mending.drafts import Piece

_LENGTH = struct.Struct("<Q")
_BITS_MAX = 8
"""Bytes of a header that may differ from that of another step, to be the same but for damage."""
_SWAPS_MAX = 6
"""Broken files among which two may have been swapped."""
_OWN = "its own checksums"


def mend_zips(case: Case) -> None:
    """Mend files of torch, and slices of distributed checkpoints, out of themselves."""
    for name in case.broken():
        if name not in case.listing.sizes:
            continue
        pieces = None
        if name.endswith(TORCH) and not _is_sound(case, name):
            pieces = mended_zip(case.draft, name, 0, case.listing.sizes[name])
        elif name.endswith(SLICES):
            pieces = _mended_slices(case, name)
        if pieces is None:
            continue
        what = _told(case, name, pieces)
        before, trial = case.draft.copy(), case.draft.copy()
        trial.put(name, *pieces)
        if not what or not _opens(trial, name):
            continue
        case.draft.take(trial)
        case.done(name, what, _OWN)
        if not _is_sound(case, name):
            case.draft.take(before)
            case.undo()


def _told(case: Case, name: str, pieces: tuple[Piece, ...]) -> str:
    """Return what is done to a file; nothing if it stays what it is."""
    before, after = case.listing.sizes[name], sum(map(size_of, pieces))
    trial = case.draft.copy()
    trial.put(name, *pieces)
    if before == after and all(
        one == other
        for one, other in zip(case.draft.blocks(name), trial.blocks(name), strict=False)
    ):
        return ""
    if any("checksum" in one.what for one in case.problems if one.place == name):
        return "the flipped bit put back that its checksum gives away"
    if after < before:
        return f"{before - after} bytes behind its end cut off"
    return "the directory at its end written anew from the headers of its members"


def _is_sound(case: Case, name: str) -> bool:
    """Say whether a file of torch is what torch wrote, whatever that says."""
    marks = ("checksum", "directory", BEHIND, "no whole zip")
    is_told = any(
        one.place == name and any(mark in one.what for mark in marks) for one in case.problems
    )
    return not is_told and _opens(case.draft, name)


def _opens(draft: Draft, name: str) -> bool:
    if name.endswith(SLICES):
        return True
    try:
        open_archive(draft, draft.list(), name)
    except Unreadable:
        return False
    return True


def _mended_slices(case: Case, name: str) -> tuple[Piece, ...] | None:
    """Return a file of slices with each of them whole, None if one cannot be."""
    prefix = name[: name.rfind("/") + 1]
    try:
        index = read_index(case.draft, case.listing, prefix)
    except Unreadable:
        return None
    places = sorted(
        (one.start, one.size_bytes)
        for pieces in index.slices.values()
        for one in pieces
        if one.file == name
    )
    whole, at = case.listing.sizes[name], 0
    found: list[Piece] = []
    for start, size_bytes in places:
        held = min(size_bytes, whole - start)
        if start != at or held <= 0:
            return None
        made: tuple[Piece, ...] | None = sliced(case.draft.pieces(name), start, start + held)
        if held < size_bytes or not _is_whole(case, name, start, held):
            made = mended_zip(case.draft, name, start, held)
        if made is None or sum(map(size_of, made)) != size_bytes:
            return None
        found += made
        at = start + size_bytes
    return tuple(found) if places else None


def _is_whole(case: Case, name: str, start: int, size_bytes: int) -> bool:
    scan = scan_members(case.draft, name, start, size_bytes)
    if not scan.has_all or not all(one.is_whole for one in scan.members):
        return False
    try:
        open_archive(case.draft, case.listing, name, start, size_bytes)
    except Unreadable:
        return False
    return True


def mend_headers(case: Case) -> None:
    """Mend headers of safetensors, and cut off what is behind their tensors."""
    for name in case.broken():
        if not name.endswith(SAFE) or name not in case.listing.sizes:
            continue
        for mend in (_cut_behind, _without_doubles, _with_header_of_another):
            trial = case.draft.copy()
            said = mend(case, trial, name)
            if said and _is_header(trial, name):
                case.draft.take(trial)
                case.done(name, *said)
                break


def _is_header(draft: Draft, name: str) -> bool:
    try:
        read_header(draft, draft.list(), name)
    except Unreadable:
        return False
    return True


def _head(draft: Draft, name: str) -> bytes:
    size_bytes = draft.list().sizes[name]
    head = draft.read(name, 0, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    length = min(_LENGTH.unpack(head)[0], HEADER_BYTES_MAX, size_bytes)
    return draft.read(name, _LENGTH.size, length)


def _cut_behind(case: Case, trial: Draft, name: str) -> tuple[str, str] | None:
    head = _head(case.draft, name)
    ends = [
        one["data_offsets"][1]
        for one in _parsed(head, {}).values()
        if isinstance(one, dict) and _is_pair(one.get("data_offsets"))
    ]
    size_bytes = case.listing.sizes[name]
    end = _LENGTH.size + len(head) + max(ends, default=0)
    if not ends or end >= size_bytes:
        return None
    trial.put(name, *sliced(case.draft.pieces(name), 0, end))
    return f"{size_bytes - end} bytes behind its tensors cut off", "its own header"


def _without_doubles(case: Case, trial: Draft, name: str) -> tuple[str, str] | None:
    """Write a header without a name that stands in it twice and says the same both times."""
    head = _head(case.draft, name)
    doubles: dict[str, list[Any]] = {}
    found = _parsed(head, doubles)
    if (
        not found
        or not doubles
        or any(one != found[key] for key in doubles for one in doubles[key])
    ):
        return None
    data = json.dumps(found, separators=(",", ":")).encode()
    if len(data) > len(head):
        return None
    at, end = _LENGTH.size + len(head), case.listing.sizes[name]
    behind = sliced(case.draft.pieces(name), at, end)
    trial.put(name, _LENGTH.pack(len(head)) + data.ljust(len(head)), *behind)
    return "the name that stands in its header twice left out once: both say the same", "its header"


def _with_header_of_another(case: Case, trial: Draft, name: str) -> tuple[str, str] | None:
    """Take the header of another step, whose file has the same length and nearly this header."""
    size_bytes = case.listing.sizes[name]
    for other in case.near:
        if other.listing.sizes.get(name) != size_bytes:
            continue
        length = other.folder.read(name, 0, _LENGTH.size)
        stop = _LENGTH.size + min(_LENGTH.unpack(length)[0], HEADER_BYTES_MAX)
        theirs, ours = other.folder.read(name, 0, stop), case.draft.read(name, 0, stop)
        changed = sum(one != two for one, two in zip(theirs, ours, strict=True))
        if 0 < changed <= _BITS_MAX:
            trial.put(name, theirs, *sliced(case.draft.pieces(name), stop, size_bytes))
            return (
                f"its header, of which {changed} byte was another, as in the other step",
                other.url,
            )
    return None


def _parsed(head: bytes, doubles: dict[str, list[Any]]) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        kept = dict(found)
        if len(kept) != len(found):
            for key, value in found:
                doubles.setdefault(key, []).append(value)
        return kept

    try:
        value = json.loads(head, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[1]) is int  # noqa: PLR2004


def swap_back(case: Case) -> None:
    """Give two broken files each other's place, if each is then what its name says."""
    broken = sorted({one.place for one in case.fatal()} & set(case.listing.sizes))
    for one, other in combinations(broken[:_SWAPS_MAX], 2):
        trial = case.draft.copy()
        trial.put(one, *case.draft.pieces(other))
        trial.put(other, *case.draft.pieces(one))
        _, problems = looked_through(trial)
        if not {one, other} & {it.place for it in problems if it.is_fatal}:
            case.draft.take(trial)
            case.done(one, f"swapped with `{other}`: each is what the other should be", "both")
            return


def cut_slices(case: Case) -> None:
    """Leave out files of slices that no index knows, and bytes behind the last slice."""
    for problem in case.problems:
        name = problem.place
        if not name.endswith(SLICES) or problem.is_fatal or name not in case.listing.sizes:
            continue
        try:
            index = read_index(case.draft, case.listing, name[: name.rfind("/") + 1])
        except Unreadable:
            continue
        ends = [
            one.start + one.size_bytes
            for pieces in index.slices.values()
            for one in pieces
            if one.file == name
        ]
        if not ends:
            case.draft.drop(name)
            case.done(name, "left out: it is of another save, the index knows nothing of it", INDEX)
        elif max(ends) < case.listing.sizes[name]:
            case.draft.put(name, *sliced(case.draft.pieces(name), 0, max(ends)))
            case.done(name, "what is behind its last slice cut off", INDEX)
