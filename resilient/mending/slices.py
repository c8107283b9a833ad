"""The index of a distributed checkpoint, from another step's and from the slices themselves.

The slices say what they are (type, shape, and their own checksums) and not what they are called.
Another step of the same run has the same names in the same order, so its index fits if every
slice of every file is what it says at that place.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import open_archive
from resilient.layouts.distributed import INDEX, SLICES, read_index
from resilient.layouts.pickled import Made, TensorRef
from resilient.layouts.pickles import BYTES_MAX, read_pickle
from resilient.layouts.values import Unreadable
from resilient.mending.pickling import dump
from resilient.mending.zips import scan_members

if TYPE_CHECKING:
    from resilient.layouts.distributed import Index
    from resilient.mending.case import Case, Near

_END, _END_BYTES, _TAIL_BYTES = b"PK\x05\x06", 22, 1 << 20
_ALONE = (
    "the names of its tensors stood in it alone; another step of the same run has them: leave it "
    "beside this one, or name it with `--from`"
)


def mend_indexes(case: Case) -> None:
    """Write an index anew whose slices are all there."""
    prefixes = {one[: one.rfind("/") + 1] for one in case.listing.sizes if one.endswith(SLICES)}
    for prefix in sorted(prefixes):
        name = f"{prefix}{INDEX}"
        try:
            read_index(case.draft, case.listing, prefix)
            continue
        except Unreadable:
            case.refused[name] = _ALONE
        for other in case.near:
            try:
                made = _index(case, other, prefix)
            except Unreadable as error:
                case.refused[name] = f"{other.url} does not fit: {error}"
                continue
            trial = case.draft.copy()
            trial.put(name, made)
            try:
                read_index(trial, trial.list(), prefix)
            except Unreadable as error:
                case.refused[name] = str(error)
                continue
            case.draft.take(trial)
            source = f"{other.url} and the slices, each proved by its checksums"
            case.done(name, "written anew", source)
            break


def _index(case: Case, other: Near, prefix: str) -> bytes:
    """Return an index: the names of another step's, the places of what is here.

    Raises:
        Unreadable: the other index is none, or does not fit what is here.
    """
    theirs = read_index(other.folder, other.listing, prefix)
    value = read_pickle(other.folder.read(f"{prefix}{INDEX}", 0, BYTES_MAX)).value
    by_file = _entries(value)
    here = {one[len(prefix) :] for one in case.listing.sizes if _is_slices(one, prefix)}
    if here != set(by_file):
        raise Unreadable("it has other files of slices")
    kinds = _kinds(theirs)
    for file, entries in by_file.items():
        found = _slices(case, f"{prefix}{file}")
        if len(found) != len(entries):
            raise Unreadable(f"`{file}` has {len(found)} slices, and {len(entries)} there")
        for (_, key, info), (start, size_bytes, held) in zip(entries, found, strict=True):
            fqn, offsets = key.get("fqn"), _numbers(key.get("offset"))
            if held != kinds.get((fqn, offsets)):
                raise Unreadable(f"`{file}` has no `{str(fqn)[:80]}` at its place")
            info.state = {**info.state, "offset": start, "length": size_bytes}
    value.state = {**value.state, "storage_meta": None}  # it names the other checkpoint
    return dump(value)


def _entries(value: Any) -> dict[str, list[tuple[int, Made, Made]]]:
    """Return what an index says of each file: place, name, and where it says both."""
    stored = value.get("storage_data") if isinstance(value, Made) else None
    if not isinstance(stored, dict) or not isinstance(value.state, dict):
        raise Unreadable("its index is none")
    found: dict[str, list[tuple[int, Made, Made]]] = {}
    for key, info in stored.items():
        if info.get("transform_descriptors"):
            raise Unreadable("its slices are compressed")
        found.setdefault(info.get("relative_path"), []).append((info.get("offset"), key, info))
    return {name: sorted(entries, key=itemgetter(0)) for name, entries in found.items()}


_Kind = tuple[str, tuple[int, ...]]


def _kinds(index: Index) -> dict[tuple[Any, tuple[int, ...] | None], _Kind]:
    """Return type and shape of each piece of each tensor, by name and place."""
    return {
        (one.name, piece.region.offsets): (one.dtype, piece.region.lengths)
        for one in index.tensors
        for piece in one.pieces
    }


def _is_slices(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.endswith(SLICES) and "/" not in name[len(prefix) :]


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Return the numbers of a shape as it stands in a pickle."""
    if isinstance(value, Made):
        value = value.args[0] if isinstance(value.args, tuple) and value.args else ()
    return tuple(value) if isinstance(value, tuple) else None


def _slices(case: Case, name: str) -> list[tuple[int, int, _Kind | None]]:
    """Return where each slice of a file is, and its type and shape if it is a tensor.

    Raises:
        Unreadable: one of them is not whole.
    """
    found = []
    at, whole = 0, case.listing.sizes[name]
    while at < whole:
        scan = scan_members(case.draft, name, at, whole - at)
        if not scan.has_all or not all(one.is_whole for one in scan.members):
            raise Unreadable(f"a slice of `{name}` is damaged")
        tail = case.draft.read(name, at + scan.end, _TAIL_BYTES)
        end = tail.find(_END)
        if end < 0 or at + scan.end + end + _END_BYTES > whole:
            raise Unreadable(f"a slice of `{name}` has no end")
        size_bytes = scan.end + end + _END_BYTES
        value = open_archive(case.draft, case.listing, name, at, size_bytes).value
        is_tensor = isinstance(value, TensorRef)
        found.append((at, size_bytes, (value.dtype, value.shape) if is_tensor else None))
        at += size_bytes
    return found
