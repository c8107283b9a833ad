"""Security scan of a checkpoint for content that can harm a process or a user.

The scan only reads files, runs no code and follows no links. The scan looks for pickles that call
code, links and names that lead out of the folder, and archives that expand hugely. The scan also
finds invalid headers and documents, code that comes with a model, and text that controls a
terminal.

Control characters move the cursor of a terminal and change its title. Direction marks reverse the
displayed order of characters. The scan checks the texts that other programs display: names of
tensors and files, a Trainer's state and a configuration. The vocabulary of a tokenizer may contain
any characters, so the scan ignores it.
"""

from __future__ import annotations

import io
import unicodedata
import zipfile
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from lzma import LZMAError
from typing import TYPE_CHECKING, Any

from resilient.errors import KeyNotFound
from resilient.layouts.dcp import INDEX, SLICES, read_index
from resilient.layouts.json_files import read_header, read_json
from resilient.layouts.model import MODEL, Unreadable
from resilient.layouts.pickle_names import Effect, effect_of
from resilient.layouts.pickle_reader import BYTES_MAX, read_names
from resilient.layouts.torch_zip import RangeReader, open_archive
from resilient.layouts.weights import SAFE, TORCH
from resilient.storage.folder import LINK, leads_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.layouts.pickle_reader import PickledGlobal
    from resilient.storage.folder import DirectoryListing, Folder

_CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, direction marks and joiners, surrogates, line separators."""
_DOCUMENTS = ("trainer_state.json", "config.json")
_INDEX = ".index.json"
_SHOWN_MAX = 80
_DEPTH_MAX = 4


def has_control_chars(text: str) -> bool:
    """Return True if a text has characters that control a terminal or disguise the text."""
    return any(unicodedata.category(character) in _CONTROL_CATEGORIES for character in text)


def find_control_chars(folder: Folder, listing: DirectoryListing, name: str) -> tuple[str, int]:
    """Return the first text in a file with control characters, escaped, and their number.

    Raises:
        StoreError: A file could not be read.
    """
    texts = [text for text in _texts(folder, listing, name) if has_control_chars(text)]
    first = texts[0].encode("unicode_escape").decode("ascii")[:_SHOWN_MAX] if texts else ""
    return first, len(texts)


def _texts(folder: Folder, listing: DirectoryListing, name: str) -> Iterable[str]:
    base = name.rpartition("/")[2]
    texts: Iterable[str] = ()
    # Another check reports the unreadable file.
    with suppress(Unreadable):
        if base.endswith(SAFE):
            tensors, meta = read_header(folder, listing, name)
            texts = [
                *(tensor.name for tensor in tensors),
                *map(str, meta),
                *map(str, meta.values()),
            ]
        elif base == INDEX:
            index = read_index(folder, listing, name.removesuffix(INDEX))
            texts = [*(tensor.name for tensor in index.tensors), *index.values]
        elif base.endswith(_INDEX) or base in _DOCUMENTS:
            texts = list(_strings(read_json(folder, listing, name)))
        elif base.endswith(TORCH):
            texts = [tensor.name for tensor in open_archive(folder, listing, name).tensors(MODEL)]
    return texts


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the texts of a document, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < _DEPTH_MAX:
        for key, item in value.items():
            yield str(key)
            yield from _strings(item, depth + 1)
    elif isinstance(value, list) and depth < _DEPTH_MAX:
        for item in value:
            yield from _strings(item, depth + 1)


_PICKLES = (*TORCH, ".pickle", INDEX, ".joblib", ".dill", ".npy", ".npz")
_TEXTS = (".json", ".jsonl", ".txt", ".md", ".yaml", ".yml", ".toml", ".csv", ".log", SAFE)
_ZIP_MAGIC = b"PK\x03\x04"
_NPY_MAGIC = b"\x93NUMPY"
_PICKLE_MAGIC = tuple(bytes((0x80, version)) for version in range(2, 6))
_HEAD_BYTES = 64
_MEMBERS_MAX = 200_000
_EXPANSION_MAX = 100
_EXPANDED_BYTES_MIN = 64 << 20
_NAMES_SHOWN = 5
_SLICES_MAX = 100_000
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, LZMAError, OSError, ValueError, KeyNotFound, EOFError),
    RuntimeError,  # encrypted, or with an unknown compression
)


class Risk(StrEnum):
    """Severity of a finding."""

    DANGER = "danger"
    """The usual load runs code, or accesses files outside of the checkpoint."""
    WARNING = "warning"
    """The effect of a load is unknown, or the content breaks readers."""
    NOTE = "note"
    """A load needs classes of a library, or code that the user must allow."""


@dataclass(frozen=True, slots=True)
class ScanFinding:
    """Harmful content of a checkpoint.

    Attributes:
        risk: Severity.
        file: Path relative to the folder.
        what: Description of the content.
        consequence: Possible effect, and the process or user that it affects.
    """

    risk: Risk
    file: str
    what: str
    consequence: str


def scan(folder: Folder, listing: DirectoryListing) -> list[ScanFinding]:
    """Return the harmful content of a folder, with the worst content first.

    Crash: reads only. Memory is bounded by the largest accepted pickle (64 MiB).

    Raises:
        StoreError: The folder could not be read.
    """
    findings = [*_outside(listing), *_names(listing)]
    if not listing.is_whole:
        findings.append(
            ScanFinding(Risk.WARNING, "", "more files than are listed", "the others were not read")
        )
    for name in sorted(listing.sizes):
        findings += _file(folder, listing, name)
        findings += _talking(folder, listing, name)
    findings += _slices(folder, listing)
    order = list(Risk)
    return sorted(findings, key=lambda finding: (order.index(finding.risk), finding.file))


def _outside(listing: DirectoryListing) -> Iterator[ScanFinding]:
    for name in listing.outside:
        problem_text = listing.kinds.get(name, LINK)
        yield ScanFinding(
            Risk.DANGER, name, problem_text, "its reader reads or writes another file"
        )


def _names(listing: DirectoryListing) -> Iterator[ScanFinding]:
    for name in (*listing.sizes, *listing.outside):
        if has_control_chars(name):
            problem_text = "a name with control characters"
            yield ScanFinding(
                Risk.WARNING, name, problem_text, "a terminal that lists it executes them"
            )


def _talking(folder: Folder, listing: DirectoryListing, name: str) -> Iterator[ScanFinding]:
    first, count = find_control_chars(folder, listing, name)
    if count:
        count_text = f" and {count - 1} more" if count > 1 else ""
        problem_text = f"control characters or marks of direction in `{first}`{count_text}"
        yield ScanFinding(
            Risk.WARNING, name, problem_text, "a terminal that shows it executes them"
        )


def _file(folder: Folder, listing: DirectoryListing, name: str) -> Iterator[ScanFinding]:
    base = name.rpartition("/")[2]
    if base.endswith(SAFE):
        yield from _header(folder, listing, name)
    elif base.endswith(".json"):
        yield from _document(folder, listing, name)
    elif base.endswith((".py", ".pyc", ".so", ".pyd", ".dll")):
        problem_text = "code that comes with the checkpoint"
        yield ScanFinding(
            Risk.NOTE, name, problem_text, "runs when trust_remote_code=True, or when imported"
        )
    elif base.endswith(SLICES):
        return  # each slice is a zip, and the index lists its range
    elif not base.endswith(_TEXTS):
        yield from _binary(folder, listing, name, is_expected=base.endswith(_PICKLES))


def _header(folder: Folder, listing: DirectoryListing, name: str) -> Iterator[ScanFinding]:
    try:
        read_header(folder, listing, name)
    except Unreadable as error:
        yield ScanFinding(
            Risk.WARNING, name, str(error), "readers fail on it, or read another file"
        )


def _document(folder: Folder, listing: DirectoryListing, name: str) -> Iterator[ScanFinding]:
    try:
        document = read_json(folder, listing, name)
    except Unreadable as error:
        # A list or a number is valid JSON and harmless.
        if "not a JSON object" not in str(error):
            yield ScanFinding(Risk.WARNING, name, str(error), "readers fail on it")
        return
    if name.endswith(_INDEX):
        yield from _index(name, document.get("weight_map"))
    if "auto_map" in document:
        problem_text = "it names code of its own (auto_map)"
        yield ScanFinding(Risk.NOTE, name, problem_text, "runs when trust_remote_code=True")


def _index(name: str, weight_map: Any) -> Iterator[ScanFinding]:
    if not isinstance(weight_map, dict):
        return
    files = {str(value) for value in weight_map.values()}
    for file in sorted(filter(leads_out, files))[:_NAMES_SHOWN]:
        problem_text = f"it names a file outside: `{file[:80]}`"
        yield ScanFinding(
            Risk.DANGER, name, problem_text, "a loader that follows it reads another file"
        )


def _binary(
    folder: Folder, listing: DirectoryListing, name: str, *, is_expected: bool
) -> Iterator[ScanFinding]:
    size_bytes = listing.sizes[name]
    head = folder.read(name, 0, _HEAD_BYTES)
    if _ZIP_MAGIC in head[:4]:
        yield from _archive(folder, name, size_bytes)
    elif head.startswith(_NPY_MAGIC):
        if b"|O" in folder.read(name, 0, 4096):
            problem_text = "an array of objects, which is a pickle"
            yield ScanFinding(
                Risk.WARNING, name, problem_text, "numpy.load(allow_pickle=True) runs it"
            )
    elif is_expected or head.startswith(_PICKLE_MAGIC):
        if size_bytes > BYTES_MAX and not head.startswith(_PICKLE_MAGIC):
            return
        data = folder.read(name, 0, min(size_bytes, BYTES_MAX))
        yield from _pickles(name, data, is_whole=size_bytes <= BYTES_MAX)


def _slices(folder: Folder, listing: DirectoryListing) -> Iterator[ScanFinding]:
    """Yield problems of the slices of torch's distributed checkpoints."""
    indexed: set[tuple[str, int, int]] = set()
    for name in listing.sizes:
        if name.rpartition("/")[2] == INDEX:
            prefix = name.removesuffix(INDEX)
            try:
                index = read_index(folder, listing, prefix)
            except Unreadable as error:
                yield ScanFinding(Risk.WARNING, name, str(error), "its slices were not read")
                continue
            pieces = {piece for slices in index.slices.values() for piece in slices}
            indexed |= {(piece.file, piece.start, piece.size_bytes) for piece in pieces}
    if len(indexed) > _SLICES_MAX:
        problem_text = f"{len(indexed)} slices"
        yield ScanFinding(Risk.WARNING, "", problem_text, f"only the first {_SLICES_MAX} were read")
    for file, start, size_bytes in sorted(indexed)[:_SLICES_MAX]:
        yield from _archive(folder, file, size_bytes, start)
    unindexed_files = {name for name in listing.sizes if name.endswith(SLICES)} - {
        piece[0] for piece in indexed
    }
    for name in sorted(unindexed_files):
        yield ScanFinding(Risk.WARNING, name, "no index describes its content", "it was not read")


def _archive(folder: Folder, name: str, size_bytes: int, start: int = 0) -> Iterator[ScanFinding]:
    """Yield problems of a zip, and of the pickles in it."""
    error_text = ""
    try:
        with zipfile.ZipFile(RangeReader(folder, name, start, size_bytes)) as opened:
            members = opened.infolist()
            yield from _members(name, members, size_bytes)
            for member in members if len(members) <= _MEMBERS_MAX else ():
                try:
                    yield from _member(opened, name, member)
                except _BROKEN as error:
                    # A broken member may hide later members.
                    error_text = error_text or str(error)
    except _BROKEN as error:
        error_text = str(error)
    if error_text:
        problem_text = f"a zip that cannot be read ({error_text[:120]})"
        yield ScanFinding(Risk.WARNING, name, problem_text, "readers disagree about its kind")


def _members(name: str, members: list[zipfile.ZipInfo], size_bytes: int) -> Iterator[ScanFinding]:
    for member in members:
        if leads_out(member.filename):
            problem_text = f"a member that leads out: `{member.filename[:80]}`"
            yield ScanFinding(Risk.DANGER, name, problem_text, "unpacking it writes elsewhere")
    doubles = [
        path for path, count in Counter(member.filename for member in members).items() if count > 1
    ]
    if doubles:
        problem_text = f"`{doubles[0][:80]}` appears in it twice"
        yield ScanFinding(
            Risk.DANGER, name, problem_text, "two readers can see two different contents"
        )
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(_EXPANSION_MAX * size_bytes, _EXPANDED_BYTES_MIN):
        problem_text = f"{size_bytes} bytes that unpack to {unpacked}"
        yield ScanFinding(Risk.DANGER, name, problem_text, "unpacking it fills memory or disk")


def _member(opened: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> Iterator[ScanFinding]:
    """Yield problems of a pickle in a zip; other members are skipped."""
    is_pickle = info.filename.endswith((".pkl", ".pickle"))
    with opened.open(info) as file:
        head = file.read(_HEAD_BYTES)
        if not is_pickle and not head.startswith(_PICKLE_MAGIC):
            return
        # Never read more than the bound, whatever size the directory states.
        data = head + file.read(BYTES_MAX - len(head))
    findings = list(_pickles(name, data, is_whole=len(data) < BYTES_MAX))
    # Tensor bytes may look like a pickle by chance, but a pickle without names is harmless.
    yield from (finding for finding in findings if is_pickle or finding.risk is Risk.DANGER)


def _pickles(name: str, data: bytes, *, is_whole: bool) -> Iterator[ScanFinding]:
    """Yield findings for the names in consecutive pickles."""
    stream = io.BytesIO(data)
    names: set[PickledGlobal] = set()
    reason = "" if is_whole else f"more than {BYTES_MAX} bytes"
    while stream.tell() < len(data):
        at = stream.tell()
        if at and not data[at : at + 2].startswith(_PICKLE_MAGIC):
            break
        global_names, read_problem = read_names(stream)
        names |= global_names
        if read_problem:
            reason = reason or read_problem
            break
    yield from _effects(name, names)
    if reason:
        problem_text = f"a pickle that cannot be read to its end: {reason}"
        yield ScanFinding(Risk.WARNING, name, problem_text, "the rest of the pickle is unknown")


_CONSEQUENCES = {
    Effect.RUNS: (Risk.DANGER, "unpickling it runs code"),
    Effect.UNKNOWN: (Risk.WARNING, "unpickling it runs code that is unknown here"),
    Effect.LIBRARY: (Risk.NOTE, "reading it needs that library: weights_only=True rejects it"),
}


def _effects(name: str, names: set[PickledGlobal]) -> Iterator[ScanFinding]:
    for effect, (risk, consequence) in _CONSEQUENCES.items():
        names_of_effect = sorted(
            global_name.dotted for global_name in names if effect_of(global_name) is effect
        )
        if names_of_effect:
            count_text = (
                f" and {len(names_of_effect) - _NAMES_SHOWN} more"
                if len(names_of_effect) > _NAMES_SHOWN
                else ""
            )
            text = ", ".join(f"`{dotted[:80]}`" for dotted in names_of_effect[:_NAMES_SHOWN])
            yield ScanFinding(risk, name, f"a pickle that names {text}{count_text}", consequence)
