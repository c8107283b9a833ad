"""Repair of single files from their own content, and salvage of intact tensors.

The module repairs zip files of torch, headers of safetensors files, and pairs of files with swapped
names. It also repairs the slices of distributed checkpoints, which are the pieces of tensors that a
rank writes to one file. A tensor of a damaged file is intact if its checksum is right. Without
checksums, the tensor is intact if a valid header describes it and the file has all its bytes.
Intact tensors are written as safetensors, a format that runs no code. The repair report names the
lost tensors.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from resilient.diff.foreign_verify import NAMED_MAX, ZEROS
from resilient.layout_repair.case import FileSpan, VirtualFolder, read_and_verify, size_of, sliced
from resilient.layout_repair.zip_repair import repaired_zip, scan_members
from resilient.layouts.checksums import BEHIND
from resilient.layouts.consistency import check_wrapper_names, unwrapped_names
from resilient.layouts.dcp import INDEX, SLICES, read_index
from resilient.layouts.json_files import HEADER_BYTES_MAX, read_header, read_json
from resilient.layouts.model import ITEM_BITS, MODEL, Unreadable
from resilient.layouts.pickle_names import rebuild
from resilient.layouts.pickle_reader import read_pickle
from resilient.layouts.torch_zip import Archive, open_archive, resolve_pieces, tensors_in
from resilient.layouts.weights import PEFT, SAFE, TORCH, is_adapter_file, peft_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.layout_repair.case import Donor, Piece, RepairCase
    from resilient.layouts.model import Problem, Tensor

_LENGTH = struct.Struct("<Q")
_BITS_MAX = 8
"""Largest number of bytes by which a damaged header may differ from the header of another step."""
_SWAPS_MAX = 6
"""Largest number of broken files for which swaps are tried."""
_OWN = "its own checksums"
_METADATA = "__metadata__"


def repair_zips(case: RepairCase) -> None:
    """Repair torch files, and slices of distributed checkpoints, from their own content."""
    for name in case.broken():
        if name not in case.listing.sizes:
            continue
        pieces = None
        if name.endswith(TORCH) and not _is_sound(case, name):
            pieces = repaired_zip(case.draft, name, 0, case.listing.sizes[name])
        elif name.endswith(SLICES):
            pieces = _repaired_slices(case, name)
        if pieces is None:
            continue
        change_text = _describe_change(case, name, pieces)
        original_draft, trial = case.draft.copy(), case.draft.copy()
        trial.put(name, *pieces)
        if not change_text or not _opens(trial, name):
            continue
        case.draft.take(trial)
        case.done(name, change_text, _OWN)
        if not _is_sound(case, name):
            case.draft.take(original_draft)
            case.undo()


def _describe_change(case: RepairCase, name: str, pieces: tuple[Piece, ...]) -> str:
    """Return a description of the change to a file; empty if nothing changes."""
    old_bytes, new_bytes = case.listing.sizes[name], sum(map(size_of, pieces))
    trial = case.draft.copy()
    trial.put(name, *pieces)
    if old_bytes == new_bytes and all(
        old_block == new_block
        for old_block, new_block in zip(case.draft.blocks(name), trial.blocks(name), strict=False)
    ):
        return ""
    if any("checksum" in problem.what for problem in case.problems if problem.place == name):
        return "the flipped bit restored, which its checksum identifies"
    if new_bytes < old_bytes:
        return f"{old_bytes - new_bytes} bytes after its end removed"
    return "the directory at its end written again from the headers of its members"


def _is_sound(case: RepairCase, name: str) -> bool:
    """Return True if a torch file has no structural damage; tensor data may be damaged."""
    marks = ("checksum", "directory", BEHIND, "not a complete zip")
    is_reported = any(
        problem.place == name and any(mark in problem.what for mark in marks)
        for problem in case.problems
    )
    return not is_reported and _opens(case.draft, name)


def _opens(draft: VirtualFolder, name: str) -> bool:
    if name.endswith(SLICES):
        return True
    try:
        open_archive(draft, draft.list(), name)
    except Unreadable:
        return False
    return True


def _repaired_slices(case: RepairCase, name: str) -> tuple[Piece, ...] | None:
    """Return a file of slices with all slices whole, None if impossible."""
    prefix = name[: name.rfind("/") + 1]
    try:
        index = read_index(case.draft, case.listing, prefix)
    except Unreadable:
        return None
    places = sorted(
        (piece.start, piece.size_bytes)
        for pieces in index.slices.values()
        for piece in pieces
        if piece.file == name
    )
    file_bytes, at = case.listing.sizes[name], 0
    new_pieces: list[Piece] = []
    for start, size_bytes in places:
        available = min(size_bytes, file_bytes - start)
        if start != at or available <= 0:
            return None
        replacement: tuple[Piece, ...] | None = sliced(
            case.draft.pieces(name), start, start + available
        )
        if available < size_bytes or not _is_whole(case, name, start, available):
            replacement = repaired_zip(case.draft, name, start, available)
        if replacement is None or sum(map(size_of, replacement)) != size_bytes:
            return None
        new_pieces += replacement
        at = start + size_bytes
    return tuple(new_pieces) if places else None


def _is_whole(case: RepairCase, name: str, start: int, size_bytes: int) -> bool:
    scan = scan_members(case.draft, name, start, size_bytes)
    if not scan.has_all or not all(member.is_whole for member in scan.members):
        return False
    try:
        open_archive(case.draft, case.listing, name, start, size_bytes)
    except Unreadable:
        return False
    return True


def repair_headers(case: RepairCase) -> None:
    """Repair headers of safetensors files, and remove bytes after the tensors."""
    for name in case.broken():
        if not name.endswith(SAFE) or name not in case.listing.sizes:
            continue
        for repair in (_cut_behind, _without_doubles, _with_header_of_another, _with_peft_names):
            trial = case.draft.copy()
            description = repair(case, trial, name)
            if description and _is_header(trial, name):
                case.draft.take(trial)
                case.done(name, *description)
                break


def repair_wrapper_names(case: RepairCase) -> None:
    """Remove the prefix of a wrapper from the names of weights, if other names have none."""
    weights = [tensor for tensor in case.contents.tensors if tensor.part == MODEL]
    renamed = unwrapped_names([weight.name for weight in weights])
    if not renamed or not check_wrapper_names(weights):
        return
    files = {file for weight in weights if weight.name in renamed for file in weight.files}
    if not all(file.endswith(SAFE) and _is_header(case.draft, file) for file in files):
        return
    stored = {name for file in files for name in _parsed(_head(case.draft, file), {})}
    if not renamed.keys() <= stored:
        return  # the names of a named adapter are longer than those in its file
    trial = case.draft.copy()
    for file in files:
        _rename_in_header(case, trial, file, renamed)
    if f"model{SAFE}.index.json" in case.listing.sizes:
        _rename_in_index(case, trial, f"model{SAFE}.index.json", renamed)
    case.draft.take(trial)
    count = f"{len(renamed)} name{'s' if len(renamed) > 1 else ''}"
    change_text = f"the prefix of a wrapper removed from {count}"
    case.done(", ".join(sorted(files)), change_text, "the names of its other weights")


def _rename_in_index(
    case: RepairCase, trial: VirtualFolder, index: str, renamed: Mapping[str, str]
) -> None:
    try:
        document = read_json(case.draft, case.listing, index)
    except Unreadable:
        return  # the index is rebuilt from the shards
    mapped = document.get("weight_map")
    if isinstance(mapped, dict):
        document["weight_map"] = {renamed.get(name, name): file for name, file in mapped.items()}
        trial.put(index, json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")


def _is_header(draft: VirtualFolder, name: str) -> bool:
    try:
        read_header(draft, draft.list(), name)
    except Unreadable:
        return False
    return True


def _head(draft: VirtualFolder, name: str) -> bytes:
    size_bytes = draft.list().sizes[name]
    head = draft.read(name, 0, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    length = min(_LENGTH.unpack(head)[0], HEADER_BYTES_MAX, size_bytes)
    return draft.read(name, _LENGTH.size, length)


def _cut_behind(case: RepairCase, trial: VirtualFolder, name: str) -> tuple[str, str] | None:
    head = _head(case.draft, name)
    ends = [
        value["data_offsets"][1]
        for value in _parsed(head, {}).values()
        if isinstance(value, dict) and _is_pair(value.get("data_offsets"))
    ]
    size_bytes = case.listing.sizes[name]
    end = _LENGTH.size + len(head) + max(ends, default=0)
    if not ends or end >= size_bytes:
        return None
    trial.put(name, *sliced(case.draft.pieces(name), 0, end))
    return f"{size_bytes - end} bytes after its tensors removed", "its own header"


def _without_doubles(case: RepairCase, trial: VirtualFolder, name: str) -> tuple[str, str] | None:
    """Return a header without the second of two equal entries with one name."""
    head = _head(case.draft, name)
    doubles: dict[str, list[Any]] = {}
    header = _parsed(head, doubles)
    if (
        not header
        or not doubles
        or any(copy != header[key] for key in doubles for copy in doubles[key])
    ):
        return None
    data = json.dumps(header, separators=(",", ":")).encode()
    if len(data) > len(head):
        return None
    at, end = _LENGTH.size + len(head), case.listing.sizes[name]
    tensor_pieces = sliced(case.draft.pieces(name), at, end)
    trial.put(name, _LENGTH.pack(len(head)) + data.ljust(len(head)), *tensor_pieces)
    return "a duplicate name removed from its header: both entries are equal", "its header"


def _with_header_of_another(
    case: RepairCase, trial: VirtualFolder, name: str
) -> tuple[str, str] | None:
    """Use the header of another step, if the file has equal length and a similar header.

    A valid header may be undamaged, so the repair replaces it only if exactly one bit differs.
    """
    size_bytes, is_valid = case.listing.sizes[name], _is_header(case.draft, name)
    for donor in case.near:
        if donor.listing.sizes.get(name) != size_bytes:
            continue
        length = donor.folder.read(name, 0, _LENGTH.size)
        stop = _LENGTH.size + min(_LENGTH.unpack(length)[0], HEADER_BYTES_MAX)
        donor_header, own_header = donor.folder.read(name, 0, stop), case.draft.read(name, 0, stop)
        changed_bytes = [
            byte ^ own_byte
            for byte, own_byte in zip(donor_header, own_header, strict=True)
            if byte != own_byte
        ]
        changed_count = len(changed_bytes)
        if is_valid and (changed_count != 1 or changed_bytes[0].bit_count() != 1):
            continue
        if 0 < changed_count <= _BITS_MAX:
            trial.put(name, donor_header, *sliced(case.draft.pieces(name), stop, size_bytes))
            return (
                f"its header, with {changed_count} byte corrected, as in the other step",
                donor.url,
            )
    return None


def _with_peft_names(case: RepairCase, trial: VirtualFolder, name: str) -> tuple[str, str] | None:
    """Return a header with the prefix of PEFT before each name of an adapter, if it is unique."""
    head = _head(case.draft, name)
    header = _parsed(head, {})
    names = [key for key in header if key != _METADATA]
    if not is_adapter_file(name) or all(key.startswith(PEFT) for key in names):
        return None
    config_name = f"{name.rpartition('adapter_model')[0]}adapter_config.json"
    try:
        renames = peft_names(names, read_json(case.draft, case.listing, config_name))
    except Unreadable:
        return None
    source = "its configuration"
    if len(renames) != 1:
        names_beside = [(_names_in(donor, name), donor.url) for donor in case.near]
        votes = [
            (rename, url)
            for rename in renames
            for own_names, url in names_beside
            if own_names == set(rename.values())
        ]
        renames, source = [rename for rename, _ in votes[:1]], votes[0][1] if votes else ""
    if not renames:
        return None
    _rename_in_header(case, trial, name, renames[0])
    return "the prefix of PEFT before the names of its weights", source


def _rename_in_header(
    case: RepairCase, trial: VirtualFolder, name: str, renamed: Mapping[str, str]
) -> None:
    """Write new names of tensors into a header, whose length may change."""
    head = _head(case.draft, name)
    header = {renamed.get(key, key): value for key, value in _parsed(head, {}).items()}
    data = json.dumps(header, separators=(",", ":")).encode()
    data = data.ljust(len(data) + -len(data) % _LENGTH.size)
    at, end = _LENGTH.size + len(head), case.listing.sizes[name]
    trial.put(name, _LENGTH.pack(len(data)) + data, *sliced(case.draft.pieces(name), at, end))


def _names_in(donor: Donor, name: str) -> set[str]:
    folder = name.rpartition("adapter_model")[0]
    return {
        tensor.name.removeprefix(folder)
        for tensor in donor.contents.tensors
        if name in tensor.files
    }


def _parsed(head: bytes, doubles: dict[str, list[Any]]) -> dict[str, Any]:
    def pairs(pairs_of_object: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs_of_object)
        if len(fields) != len(pairs_of_object):
            for key, value in pairs_of_object:
                doubles.setdefault(key, []).append(value)
        return fields

    try:
        value = json.loads(head, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[1]) is int  # noqa: PLR2004


def swap_back(case: RepairCase) -> None:
    """Swap two broken files if both files then match their names."""
    damaged_files = sorted({problem.place for problem in case.fatal()} & set(case.listing.sizes))
    for first_file, second_file in combinations(damaged_files[:_SWAPS_MAX], 2):
        trial = case.draft.copy()
        trial.put(first_file, *case.draft.pieces(second_file))
        trial.put(second_file, *case.draft.pieces(first_file))
        _, problems = read_and_verify(trial)
        if not {first_file, second_file} & {
            problem.place for problem in problems if problem.is_fatal
        }:
            case.draft.take(trial)
            case.done(
                first_file,
                f"swapped with `{second_file}`: each file has the content of the other",
                "both",
            )
            return


def cut_slices(case: RepairCase) -> None:
    """Remove slice files that the index does not name, and bytes after the last slice."""
    for problem in case.problems:
        name = problem.place
        if not name.endswith(SLICES) or problem.is_fatal or name not in case.listing.sizes:
            continue
        try:
            index = read_index(case.draft, case.listing, name[: name.rfind("/") + 1])
        except Unreadable:
            continue
        ends = [
            piece.start + piece.size_bytes
            for pieces in index.slices.values()
            for piece in pieces
            if piece.file == name
        ]
        if not ends:
            case.draft.drop(name)
            case.done(
                name, "left out: it belongs to another save, and the index does not name it", INDEX
            )
        elif max(ends) < case.listing.sizes[name]:
            case.draft.put(name, *sliced(case.draft.pieces(name), 0, max(ends)))
            case.done(name, "the bytes after its last slice removed", INDEX)


_PICKLE = "data.pkl"
_HEAD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class IntactTensor:
    """One intact tensor of a damaged file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: FileSpan


@dataclass(frozen=True, slots=True)
class SalvagedFile:
    """Intact and lost tensors of one damaged file.

    Attributes:
        file: Name of the file.
        saved: Intact tensors.
        lost: Names of the lost tensors.
    """

    file: str
    saved: tuple[IntactTensor, ...]
    lost: tuple[str, ...]


def is_saved_so(problem: Problem) -> bool:
    """Return True for NaN or infinite numbers in an undamaged file, which were saved so."""
    return " NaN and " in problem.what


def salvage(case: RepairCase) -> tuple[SalvagedFile, ...]:
    """Return the intact tensors of the files that cannot be repaired.

    Raises:
        StoreError: A file could not be read.
    """
    salvaged_files = []
    damaged_places = {problem.place for problem in case.fatal() if not is_saved_so(problem)}
    for name in sorted(damaged_places & set(case.listing.sizes)):
        try:
            lost_file = _split_file(case.draft, name)
        except Unreadable:
            continue
        lost_file = _without_damaged(case, lost_file)
        if lost_file.saved:
            salvaged_files.append(lost_file)
    return tuple(salvaged_files)


def _without_damaged(case: RepairCase, part: SalvagedFile) -> SalvagedFile:
    """Move tensors with damaged numbers or shapes from the intact to the lost tensors."""
    problems = [problem for problem in case.fatal() if problem.place == part.file]
    tensor_names = {problem.tensor for problem in case.fatal() if problem.tensor}
    is_scanned = sum(bool(problem.tensor) for problem in case.problems) < NAMED_MAX
    if not is_scanned or any(problem.what == ZEROS for problem in problems):
        lost_names = (*(tensor.name for tensor in part.saved), *part.lost)
        return SalvagedFile(part.file, (), lost_names)
    saved = tuple(tensor for tensor in part.saved if tensor.name not in tensor_names)
    lost_names = tuple(tensor.name for tensor in part.saved if tensor.name in tensor_names)
    return SalvagedFile(part.file, saved, (*lost_names, *part.lost))


def _split_file(draft: VirtualFolder, name: str) -> SalvagedFile:
    if name.endswith(SAFE):
        return _split_safetensors(draft, name)
    if name.endswith(SLICES):
        return _split_slices(draft, name)
    if name.endswith(TORCH):
        return _split_zip(draft, name)
    raise Unreadable("not a file of tensors")


def _split_zip(draft: VirtualFolder, name: str) -> SalvagedFile:
    scan = scan_members(draft, name, 0, draft.list().sizes[name])
    pickles = [member for member in scan.members if member.name.rpartition("/")[2] == _PICKLE]
    if len(pickles) != 1 or not pickles[0].is_whole:
        raise Unreadable("the description of its tensors is damaged")
    root = pickles[0].name.removesuffix(_PICKLE)
    value = read_pickle(draft.read(name, pickles[0].data, pickles[0].size_bytes), rebuild)
    intact_members = {
        member.name.removeprefix(root): (member.header, member.size_bytes)
        for member in scan.members
        if member.is_whole
    }
    archive = Archive(draft, name, value.value, value.names, intact_members)
    return _split(draft, name, tensors_in(archive, value.value, MODEL))


def _split_slices(draft: VirtualFolder, name: str) -> SalvagedFile:
    prefix = name[: name.rfind("/") + 1]
    index = read_index(draft, draft.list(), prefix)
    sizes = draft.list().sizes
    intact_slices = set()
    for entry in (piece for pieces in index.slices.values() for piece in pieces):
        available = min(entry.size_bytes, sizes.get(entry.file, 0) - entry.start)
        scan = (
            scan_members(draft, entry.file, entry.start, available)
            if available == entry.size_bytes
            else None
        )
        if scan and scan.has_all and all(member.is_whole for member in scan.members):
            intact_slices.add((entry.file, entry.start))
    tensors = [tensor for tensor in index.tensors if name in tensor.files]
    intact_tensors = [
        tensor
        for tensor in tensors
        if tensor.pieces
        and all((piece.file, piece.start) in intact_slices for piece in tensor.pieces)
    ]
    salvaged = _split(draft, name, intact_tensors)
    return SalvagedFile(
        name,
        salvaged.saved,
        tuple(tensor.name for tensor in tensors if tensor not in intact_tensors),
    )


def _split_safetensors(draft: VirtualFolder, name: str) -> SalvagedFile:
    size_bytes = draft.list().sizes[name]
    (length,) = _HEAD.unpack(draft.read(name, 0, _HEAD.size).ljust(_HEAD.size, b"\0"))
    if length > min(HEADER_BYTES_MAX, size_bytes):
        raise Unreadable("its header is damaged")
    try:
        entries = json.loads(draft.read(name, _HEAD.size, length))
        entries.pop("__metadata__", None)
        intact_tensors, lost_names = [], []
        for key, entry in entries.items():
            begin, end = entry["data_offsets"]
            shape, at = tuple(entry["shape"]), _HEAD.size + length + begin
            fits = end - begin == math.prod(shape) * ITEM_BITS[entry["dtype"]] // 8
            if fits and 0 <= begin <= end and at + end - begin <= size_bytes:
                span = FileSpan(draft, name, at, end - begin)
                intact_tensors.append(IntactTensor(key, entry["dtype"], shape, span))
            else:
                lost_names.append(key)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise Unreadable("its header is damaged") from error
    return SalvagedFile(name, tuple(intact_tensors), tuple(lost_names))


def _split(
    draft: VirtualFolder, name: str, tensors: Iterator[Tensor] | list[Tensor] | tuple[Tensor, ...]
) -> SalvagedFile:
    intact_tensors, lost_names = [], []
    for tensor in tensors:
        try:
            intact_tensors.append(_saved(draft, tensor))
        except Unreadable:
            lost_names.append(tensor.name)
    return SalvagedFile(name, tuple(intact_tensors), tuple(lost_names))


def _saved(draft: VirtualFolder, tensor: Tensor) -> IntactTensor:
    """Return the location of a contiguous tensor.

    Raises:
        Unreadable: The tensor is not contiguous, or its bytes are missing.
    """
    if len(tensor.pieces) != 1:
        raise Unreadable("it is in several pieces" if tensor.pieces else "its bytes are not here")
    piece = resolve_pieces(draft, draft.list(), tensor.pieces[0], tensor.dtype)
    item = ITEM_BITS.get(tensor.dtype, 0) // 8
    if not item or piece.is_swapped or not _is_row(piece.strides, tensor.shape):
        raise Unreadable("its bytes are not contiguous")
    at, size_bytes = piece.start + piece.first * item, tensor.size_bytes
    if piece.first * item + size_bytes > piece.size_bytes:
        raise Unreadable("its bytes are not here")
    return IntactTensor(
        tensor.name, tensor.dtype, tensor.shape, FileSpan(draft, piece.file, at, size_bytes)
    )


def _is_row(strides: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    if strides is None:
        return True
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            return False
        step *= max(length, 1)
    return True


def safetensors_pieces(saved: tuple[IntactTensor, ...]) -> tuple[FileSpan | bytes, ...]:
    """Return a safetensors file with these tensors, as pieces."""
    entries, at = {}, 0
    for tensor in saved:
        end = at + tensor.span.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, end],
        }
        at = end
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return (_HEAD.pack(len(head)) + head, *(tensor.span for tensor in saved))
