"""Verification of torch files, byte by byte, against the checksums that these files contain.

torch ignores these checksums when it loads a file, so a flipped bit changes a weight without an
error. A safetensors file has no checksum, so this module cannot verify its numbers.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound
from resilient.layouts.dcp import INDEX, read_index
from resilient.layouts.model import Problem, Remedy, Unreadable
from resilient.layouts.torch_zip import BROKEN, RangeReader, data_start, is_contradictory
from resilient.layouts.weights import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.storage.folder import DirectoryListing, Folder

_CHUNK_BYTES = 4 << 20
_ZIP, _END, _END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
BEHIND = "it has bytes after its end"
_RANDOM = re.compile(r"(?:.*/)?(?:rng_state|random_states)[^/]*")
_UNREAD = "training_args.bin"
"""A file that Transformers writes but does not read at a resume."""
_LOST_MAX = 64
"""Largest number of members that are reported."""


def check_bytes(folder: Folder, listing: DirectoryListing) -> tuple[Problem, ...]:
    """Return the members of torch files and slices whose checksum is wrong.

    The function reads every byte of these files once. It ignores unreadable files, which their
    readers report.

    Args:
        folder: Folder of the files.
        listing: Its files.

    Raises:
        StoreError: A file could not be read.
    """
    problems: list[Problem] = []
    for name, start, size_bytes in _archives(folder, listing):
        for problem_text in _changed_members(folder, name, start, size_bytes):
            is_random = bool(_RANDOM.fullmatch(name))
            loses = "random state" if is_random and problem_text != BEHIND else ""
            is_fatal = not is_random and problem_text != BEHIND and name != _UNREAD
            cure = Remedy.NEEDLESS if name == _UNREAD else Remedy.REPAIR
            problems.append(Problem(name, problem_text, loses, is_fatal=is_fatal, cure=cure))
            if len(problems) >= _LOST_MAX:
                return tuple(problems)
    return (*problems, *_files_with_trailing_bytes(folder, listing))


def _files_with_trailing_bytes(folder: Folder, listing: DirectoryListing) -> Iterator[Problem]:
    """Yield the slice files that have bytes after the last slice."""
    for name in listing.sizes:
        if name.rpartition("/")[2] != INDEX:
            continue
        ends: dict[str, int] = {}
        for file, start, size_bytes in _slices(folder, listing, name.removesuffix(INDEX)):
            ends[file] = max(ends.get(file, 0), start + size_bytes)
        for file, end in ends.items():
            if listing.sizes[file] > end:
                yield Problem(file, BEHIND)


def _archives(folder: Folder, listing: DirectoryListing) -> Iterator[tuple[str, int, int]]:
    """Yield candidates for torch files: file, start, length."""
    for name, size_bytes in sorted(listing.sizes.items()):
        if name.endswith(TORCH) and size_bytes:
            yield name, 0, size_bytes
        if name.rpartition("/")[2] == INDEX:
            yield from _slices(folder, listing, name.removesuffix(INDEX))


def _slices(
    folder: Folder, listing: DirectoryListing, prefix: str
) -> Iterable[tuple[str, int, int]]:
    try:
        index = read_index(folder, listing, prefix)
    except Unreadable:
        return ()
    spans = {
        (piece.file, piece.start, piece.size_bytes)
        for pieces in index.slices.values()
        for piece in pieces
        if piece.is_plain and piece.start + piece.size_bytes <= listing.sizes.get(piece.file, 0)
    }
    return sorted(spans)


def _changed_members(folder: Folder, name: str, start: int, size_bytes: int) -> Iterator[str]:
    try:
        with zipfile.ZipFile(RangeReader(folder, name, start, size_bytes)) as opened:
            members, comment = opened.infolist(), opened.comment
    except (*BROKEN, KeyNotFound, Unreadable) as error:
        if folder.read(name, start, len(_ZIP)) == _ZIP:
            yield f"it is not a complete zip ({str(error)[:80]})"
        return
    end = start + size_bytes - _END_BYTES - len(comment)
    if folder.read(name, end, len(_END)) != _END:
        yield BEHIND
    if any(is_contradictory(info) for info in members):
        yield "the directory of the zip contradicts itself"
    for member in members:
        try:
            at = data_start(folder, name, start + member.header_offset)
            is_whole = _sum(folder, name, at, member.file_size) == member.CRC
        except Unreadable as error:
            yield f"`{member.filename[:80]}`: {error}"
            continue
        # If checksums are disabled in torch, the field is zero.
        if member.CRC and not is_whole:
            yield f"the checksum of `{member.filename[:80]}` in it is wrong"


def _sum(folder: Folder, name: str, at: int, size_bytes: int) -> int:
    checksum, remaining_bytes = 0, size_bytes
    while remaining_bytes > 0:
        data = folder.read(name, at, min(remaining_bytes, _CHUNK_BYTES))
        if not data:
            raise Unreadable("it ends too early")
        checksum = zlib.crc32(data, checksum)
        at, remaining_bytes = at + len(data), remaining_bytes - len(data)
    return checksum
