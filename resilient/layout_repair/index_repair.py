"""Repair of files and names that locate data: indexes, ``latest`` files and folder names.

A distributed checkpoint of torch stores tensors in slices. A slice contains its type, its shape and
a checksum, but not the name of its tensor. Only the index has the names. If the index is lost, the
repair takes the names from the index of another step of the same run. Both steps have the same
names in the same order. Each slice must have the type and the shape that the other index gives for
its position.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from resilient.layout_repair.case import AGREEMENT, read_and_verify
from resilient.layout_repair.zip_repair import dump, scan_members
from resilient.layouts import deepspeed, deepspeed_universal
from resilient.layouts.consistency import LOSES as RENAMED
from resilient.layouts.dcp import INDEX, SLICES, read_index
from resilient.layouts.json_files import JSON_BYTES_MAX, read_json
from resilient.layouts.model import Unreadable
from resilient.layouts.pickle_reader import BYTES_MAX, PickledCall, TensorRef, read_pickle
from resilient.layouts.torch_zip import open_archive
from resilient.layouts.weights import ORPHAN, SHARD, STALE, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.layout_repair.case import Donor, RepairCase, VirtualFolder
    from resilient.layouts.dcp import Index

_RUN_WIDE = ("metadata.json", "config.json")
"""Files with the same content in every step of a run."""
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte order mark -> encoding of the text."""
_COUNTING = ("hf-trainer", "torchtitan", "megatron")
"""Layouts whose folder names contain a step."""
_STEP_NAME = re.compile(r"((?:checkpoint|step|iter)[-_])(\d{1,12})")


def repair_index(case: RepairCase) -> None:
    """Rewrite the index of a sharded model from the headers of the shards."""
    for problem in [problem for problem in case.problems if problem.what in (STALE, ORPHAN)]:
        case.draft.drop(problem.place)
        case.done(problem.place, "left out: nothing reads it", "what names the weights")
    shards: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in case.listing.sizes:
        if match := SHARD.fullmatch(name):
            shards.setdefault((match[2], match[4], match[5]), {})[int(match[3])] = name
    for (stem, count, end), files in shards.items():
        index = f"{stem}{end}.index.json"
        is_lost = not case.is_layout_known or index in case.broken()
        is_single = f"{stem}{end}" in case.listing.sizes
        if not is_lost or is_single:
            continue
        if refusal := _index_obstacle(case, int(count), files):
            case.refused[index] = refusal
            continue
        try:
            text = _index(case, index, [files[number] for number in sorted(files)])
        except Unreadable as error:
            case.refused[index] = str(error)
            continue
        case.draft.put(index, text)
        case.done(index, "written again", f"the headers of {len(files)} shards")


def _index_obstacle(case: RepairCase, count: int, file_by_number: Mapping[int, str]) -> str:
    """Return the reason why an index of these shards would be wrong; empty without one."""
    missing_numbers = [number for number in range(1, count + 1) if number not in file_by_number]
    if missing_numbers:
        return f"shards of {count} are missing: {', '.join(map(str, missing_numbers[:8]))}"
    if any(problem.loses == RENAMED for problem in case.problems):
        return "a name in a shard is wrong, and an index of it would be wrong too"
    return ""


def _index(case: RepairCase, index: str, shards: list[str]) -> bytes:
    """Return an index of the shards.

    Raises:
        Unreadable: A shard is damaged, or the present index names a tensor that no shard has.
    """
    mapped: dict[str, str] = {}
    size_bytes = elements = 0
    for name in shards:
        for tensor in read_file(case.draft, case.listing, name):
            if mapped.setdefault(tensor.name, name) != name:
                raise Unreadable(f"`{tensor.name[:80]}` is in two shards")
            size_bytes, elements = size_bytes + tensor.size_bytes, elements + tensor.elements
    _require_all_named(case, index, mapped)
    metadata = {"total_parameters": elements, "total_size": size_bytes}
    document = {"metadata": metadata, "weight_map": dict(sorted(mapped.items()))}
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def _require_all_named(case: RepairCase, index: str, mapped: Mapping[str, str]) -> None:
    """Raise if a new index would hide the loss of a tensor that no shard has.

    But if a name in the index is only misspelled, a shard has a tensor that the index lacks.

    Raises:
        Unreadable: The present index names more tensors than the shards have.
    """
    try:
        old_names = set(read_json(case.draft, case.listing, index)["weight_map"])
    except (Unreadable, KeyError, TypeError):
        return  # the present index names nothing
    lost_names = sorted(old_names - set(mapped))
    if len(lost_names) > len(set(mapped) - old_names):
        raise Unreadable(
            f"{len(lost_names)} of its tensors are in no shard, including `{lost_names[0][:80]}`: "
            "a new index would hide the loss"
        )


def repair_latest(case: RepairCase) -> None:
    """Rewrite the latest tag with the highest number of an intact tag."""
    for name, tags in (
        (deepspeed.LATEST, _engines(case.draft)),
        (
            deepspeed_universal.LATEST,
            [entry.rstrip("/") for entry in deepspeed_universal.tag_in(case.listing)],
        ),
    ):
        if not case.is_broken(name):
            continue
        for tag in sorted(tags, key=_number, reverse=True):
            trial = case.draft.copy()
            trial.put(name, tag.encode())
            _, problems = read_and_verify(trial)
            if not any(problem.is_fatal for problem in problems):
                case.draft.take(trial)
                case.done(name, f"names `{tag}` again", "the newest complete folder beside it")
                break
        else:
            if tags:
                case.refused[name] = "no tag beside it is complete"


def _engines(draft: VirtualFolder) -> list[str]:
    listing = draft.list()
    heads = {file.partition("/")[0] for file in listing.sizes if "/" in file}
    return [prefix for prefix in heads if deepspeed.is_engine(listing, f"{prefix}/")]


def _number(name: str) -> int:
    digits = re.search(r"(\d{1,12})$", name)
    return int(digits[1]) if digits else -1


def repair_encodings(case: RepairCase) -> None:
    """Rewrite JSON files in UTF-8, without the byte order mark of an editor."""
    for name in sorted(case.broken()):
        if not name.endswith(".json") or name not in case.listing.sizes:
            continue
        data = case.draft.read(name, 0, min(case.listing.sizes[name], JSON_BYTES_MAX))
        marks = (mark for mark in _MARKS if data.startswith(mark))
        try:
            text = data.decode(_MARKS[next(marks)])
        except (StopIteration, UnicodeDecodeError):
            continue
        trial = case.draft.copy()
        trial.put(name, text.encode())
        with suppress(Unreadable):
            read_json(trial, trial.list(), name)
            case.draft.take(trial)
            case.done(name, "in UTF-8, without a byte order mark", "its own text")


def repair_documents(case: RepairCase) -> None:
    """Copy files that are equal in all steps from another step."""
    for name in _RUN_WIDE:
        if name not in case.broken():
            continue
        for donor in case.near:
            try:
                read_json(donor.folder, donor.listing, name)
            except Unreadable:
                continue
            trial = case.draft.copy()
            trial.put(name, donor.folder.read(name, 0, donor.listing.sizes[name]))
            _, problems = read_and_verify(trial)
            if any(problem.place == name for problem in problems):
                # the problem remains, for example because the other file also belongs to another
                # model
                continue
            case.draft.take(trial)
            case.done(name, "the same in each step of the run", donor.url)
            break
        else:
            case.refused[name] = "no other step of the run is here to take the value from"


def repair_name(case: RepairCase) -> None:
    """Rename a folder to the step in its files."""
    name = case.draft.url.rstrip("/").rpartition("/")[2]
    match = _STEP_NAME.fullmatch(name)
    if match is None or case.contents.layout not in _COUNTING or not _is_at_odds(case):
        return
    contents = case.contents
    steps = (
        contents.step,
        contents.schedule.step if contents.schedule else None,
        contents.optimizer.step if contents.optimizer else None,
    )
    votes_by_step = Counter(entry for entry in steps if entry is not None)
    step, votes = votes_by_step.most_common(1)[0] if votes_by_step else (None, 0)
    if step is None or votes < 2 or step == int(match[2]):  # noqa: PLR2004 - needs two agreeing files
        return
    width = len(match[2]) if match[2].startswith("0") else 1
    name = f"{match[1]}{step:0{width}d}"
    if refusal := _name_obstacle(case, name, votes_by_step):
        case.refused["."] = refusal
        return
    case.draft.renamed(name)
    case.done(".", f"named for step {step}, as {votes} of its files say", "its files")


def _name_obstacle(case: RepairCase, name: str, counted: Counter[int]) -> str:
    """Return the reason against a folder name; empty without one.

    The Trainer's optimizer may have skipped steps, and Megatron's scheduler counts samples.
    """
    if len(counted) > 1 and case.contents.layout == "torchtitan":
        return "its files are of different steps, and the right one is unknown"
    if any(donor.url.rstrip("/").rpartition("/")[2] == name for donor in case.near):
        return (
            f"`{name}` is beside it, and its files may be mixed with this one; `--from` another "
            "copy"
        )
    return ""


def _is_at_odds(case: RepairCase) -> bool:
    return any(problem.place == "." and problem.loses == AGREEMENT for problem in case.problems)


_END, _END_BYTES, _TAIL_BYTES = b"PK\x05\x06", 22, 1 << 20
_ALONE = (
    "the names of its tensors were only there; another step of the same run has them: put it "
    "beside this one, or name it with `--from`"
)


def repair_indexes(case: RepairCase) -> None:
    """Rewrite a lost DCP index if all slices exist."""
    prefixes = {file[: file.rfind("/") + 1] for file in case.listing.sizes if file.endswith(SLICES)}
    for prefix in sorted(prefixes):
        name = f"{prefix}{INDEX}"
        try:
            read_index(case.draft, case.listing, prefix)
            continue
        except Unreadable:
            case.refused[name] = _ALONE
        for donor in case.near:
            try:
                index = _index_from_donor(case, donor, prefix)
            except Unreadable as error:
                case.refused[name] = f"{donor.url} does not fit: {error}"
                continue
            trial = case.draft.copy()
            trial.put(name, index)
            try:
                read_index(trial, trial.list(), prefix)
            except Unreadable as error:
                case.refused[name] = str(error)
                continue
            case.draft.take(trial)
            source = f"{donor.url} and the slices, each verified by its checksums"
            case.done(name, "written again", source)
            break


def _index_from_donor(case: RepairCase, other: Donor, prefix: str) -> bytes:
    """Return an index with the names from another step and the locations of this step.

    Raises:
        Unreadable: The other index is invalid, or does not fit the slices here.
    """
    donor_index = read_index(other.folder, other.listing, prefix)
    value = read_pickle(other.folder.read(f"{prefix}{INDEX}", 0, BYTES_MAX)).value
    by_file = _entries(value)
    slice_files = {
        entry[len(prefix) :] for entry in case.listing.sizes if _is_slices(entry, prefix)
    }
    if slice_files != set(by_file):
        raise Unreadable("it has other files of slices")
    kinds = _kinds(donor_index)
    for file, entries in by_file.items():
        slices = _slices(case, f"{prefix}{file}")
        if len(slices) != len(entries):
            raise Unreadable(f"`{file}` has {len(slices)} slices, and {len(entries)} there")
        for (_, key, info), (start, size_bytes, data) in zip(entries, slices, strict=True):
            fqn, offsets = key.get("fqn"), _numbers(key.get("offset"))
            if data != kinds.get((fqn, offsets)):
                raise Unreadable(f"`{file}` has no `{str(fqn)[:80]}` at its place")
            info.state = {**info.state, "offset": start, "length": size_bytes}
    value.state = {**value.state, "storage_meta": None}  # this field names the other checkpoint
    return dump(value)


def _entries(value: Any) -> dict[str, list[tuple[int, PickledCall, PickledCall]]]:
    """Return the entries of an index by file, as offset, key and location, sorted by offset."""
    storage_data = value.get("storage_data") if isinstance(value, PickledCall) else None
    if not isinstance(storage_data, dict) or not isinstance(value.state, dict):
        raise Unreadable("its index is not valid")
    entries_by_name: dict[str, list[tuple[int, PickledCall, PickledCall]]] = {}
    for key, info in storage_data.items():
        if info.get("transform_descriptors"):
            raise Unreadable("its slices are compressed")
        entries_by_name.setdefault(info.get("relative_path"), []).append(
            (info.get("offset"), key, info)
        )
    return {name: sorted(entries, key=itemgetter(0)) for name, entries in entries_by_name.items()}


_Kind = tuple[str, tuple[int, ...]]


def _kinds(index: Index) -> dict[tuple[Any, tuple[int, ...] | None], _Kind]:
    """Return the type and the shape of each tensor piece, by name and offsets."""
    return {
        (tensor.name, piece.region.offsets): (tensor.dtype, piece.region.lengths)
        for tensor in index.tensors
        for piece in tensor.pieces
    }


def _is_slices(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.endswith(SLICES) and "/" not in name[len(prefix) :]


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Return the numbers of a shape in a pickle."""
    if isinstance(value, PickledCall):
        value = value.args[0] if isinstance(value.args, tuple) and value.args else ()
    return tuple(value) if isinstance(value, tuple) else None


def _slices(case: RepairCase, name: str) -> list[tuple[int, int, _Kind | None]]:
    """Return offset and length of each slice of a file, with type and shape for a tensor.

    Raises:
        Unreadable: A slice is damaged.
    """
    slices = []
    at, file_bytes = 0, case.listing.sizes[name]
    while at < file_bytes:
        scan = scan_members(case.draft, name, at, file_bytes - at)
        if not scan.has_all or not all(member.is_whole for member in scan.members):
            raise Unreadable(f"a slice of `{name}` is damaged")
        tail = case.draft.read(name, at + scan.end, _TAIL_BYTES)
        end = tail.find(_END)
        if end < 0 or at + scan.end + end + _END_BYTES > file_bytes:
            raise Unreadable(f"a slice of `{name}` has no end")
        size_bytes = scan.end + end + _END_BYTES
        value = open_archive(case.draft, case.listing, name, at, size_bytes).value
        is_tensor = isinstance(value, TensorRef)
        slices.append((at, size_bytes, (value.dtype, value.shape) if is_tensor else None))
        at += size_bytes
    return slices
