"""State of a repair: the planned result, its problems, and sources of intact data (donors).

This module writes nothing. The planned result is a virtual folder, whose files consist of parts of
existing files and of new bytes. The checkpoint readers accept a virtual folder like any other
folder. A repair can therefore verify its result before it writes the first byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from resilient.diff.foreign_verify import verify_foreign
from resilient.diff.other_steps import STALE
from resilient.errors import KeyNotFound
from resilient.layouts.detect import read_layout
from resilient.layouts.model import Contents, Problem
from resilient.layouts.single_file import ALONE
from resilient.storage.folder import DirectoryListing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.layout_repair.training_logs import MetricsLog
    from resilient.storage.folder import Folder

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of an existing file.

    Attributes:
        folder: Folder of the file.
        name: Name of the file.
        start: Offset of the first byte.
        size_bytes: Number of bytes.
    """

    folder: Folder
    name: str
    start: int
    size_bytes: int

    def read(self, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, relative to the start of the span.

        Raises:
            StoreError: The file could not be read.
        """
        length = min(length, self.size_bytes - start)
        return self.folder.read(self.name, self.start + start, length) if length > 0 else b""


Piece = FileSpan | bytes


class VirtualFolder:
    """A folder whose files consist of pieces of existing files and of new bytes.

    Attributes:
        url: URL of the planned folder, because some facts depend on the folder's name.
        changed: Names of changed and removed files.
    """

    def __init__(self, base: Folder, listing: DirectoryListing) -> None:
        self.url = base.url
        self.changed: set[str] = set()
        self._files: dict[str, tuple[Piece, ...]] = {
            name: (FileSpan(base, name, 0, size_bytes),)
            for name, size_bytes in listing.sizes.items()
        }
        self._listing = listing

    def copy(self) -> VirtualFolder:
        """Return a copy, on which a repair can try a change."""
        duplicate = VirtualFolder.__new__(VirtualFolder)
        duplicate.url, duplicate.changed = self.url, set(self.changed)
        duplicate._files, duplicate._listing = dict(self._files), self._listing  # noqa: SLF001 - its own kind
        return duplicate

    def take(self, other: VirtualFolder) -> None:
        """Replace the content with that of another virtual folder."""
        self.url, self.changed = other.url, set(other.changed)
        self._files = dict(other._files)

    def put(self, name: str, *pieces: Piece) -> None:
        """Set the content of a file."""
        self._files[name] = pieces
        self.changed.add(name)

    def drop(self, name: str) -> None:
        """Remove a file."""
        self._files.pop(name, None)
        self.changed.add(name)

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Return the pieces of a file."""
        return self._files[name]

    def list(self) -> DirectoryListing:
        """Return the listing of the planned result."""
        sizes = {name: sum(map(size_of, pieces)) for name, pieces in self._files.items()}
        outside = tuple(name for name in self._listing.outside if name not in self.changed)
        changed = {
            name: time
            for name, time in self._listing.changed.items()
            if name in sizes and name not in self.changed
        }
        return DirectoryListing(
            sizes,
            outside,
            self._listing.is_whole,
            self._listing.is_file,
            self._listing.kinds,
            changed,
        )

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        if name not in self._files:
            raise KeyNotFound(f"no `{name[:200]}` in {self.url}", key=name)
        chunks, at = [], 0
        for piece in self._files[name]:
            size_bytes = size_of(piece)
            begin = max(start - at, 0)
            if begin < size_bytes and length > 0:
                data = _cut(piece, begin, min(length, size_bytes - begin))
                chunks.append(data)
                start, length = start + len(data), length - len(data)
            at += size_bytes
        return b"".join(chunks)

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file, block by block.

        Raises:
            StoreError: A file could not be read.
        """
        for piece in self._files[name]:
            for at in range(0, size_of(piece), BLOCK_BYTES):
                yield _cut(piece, at, BLOCK_BYTES)

    def renamed(self, name: str) -> None:
        """Change the name of the folder, or of its single file."""
        self.url = str(PurePosixPath(self.url).with_name(name))


def size_of(piece: Piece) -> int:
    """Return the number of bytes of a piece."""
    return len(piece) if isinstance(piece, bytes) else piece.size_bytes


def sliced(pieces: tuple[Piece, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of a file between two offsets."""
    part_pieces: list[Piece] = []
    at = 0
    for piece in pieces:
        size_bytes = size_of(piece)
        begin, end = max(start - at, 0), min(stop - at, size_bytes)
        if begin < end:
            is_full = begin == 0 and end == size_bytes
            part_pieces.append(piece if is_full else _part(piece, begin, end))
        at += size_bytes
    return tuple(part_pieces)


def _part(piece: Piece, begin: int, end: int) -> Piece:
    if isinstance(piece, bytes):
        return piece[begin:end]
    return FileSpan(piece.folder, piece.name, piece.start + begin, end - begin)


def _cut(piece: Piece, start: int, length: int) -> bytes:
    return piece[start : start + length] if isinstance(piece, bytes) else piece.read(start, length)


AGREEMENT = "the consistency of its files"
"""Loss that readers report if two files belong to different steps."""
UNKNOWN = "not a checkpoint of a supported tool"


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One applied repair.

    Attributes:
        file: Repaired file, or ``.``.
        what: Description of the change.
        source: Origin of the restored data.
    """

    file: str
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class Donor:
    """Source of intact data: another step of the same run, or another copy of the checkpoint."""

    folder: Folder
    listing: DirectoryListing
    contents: Contents

    @property
    def url(self) -> str:
        """URL of the donor."""
        return self.folder.url


@dataclass
class RepairCase:
    """A damaged checkpoint and the state of its repair.

    Attributes:
        draft: Planned result.
        contents: Contents of the draft.
        problems: Problems of the draft, including those of its bytes.
        near: Other steps of the same run, with the nearest step first.
        copies: Other copies of the same checkpoint.
        logs: Logs of the run that the user named.
        steps: Applied repairs, in order.
        losses: Lost state -> consequence.
        refused: Place -> reason why the place is not repaired.
    """

    draft: VirtualFolder
    contents: Contents
    problems: tuple[Problem, ...]
    near: tuple[Donor, ...] = ()
    copies: tuple[Donor, ...] = ()
    logs: tuple[MetricsLog, ...] = ()
    steps: list[RepairAction] = field(default_factory=list)
    losses: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def listing(self) -> DirectoryListing:
        """Listing of the draft."""
        return self.draft.list()

    @property
    def is_layout_known(self) -> bool:
        """True if the layout was detected."""
        return bool(self.contents.layout)

    def fatal(self) -> list[Problem]:
        """Return the problems that prevent a resume, except a missing optimizer."""
        return [problem for problem in self.problems if problem.is_fatal and problem.what != ALONE]

    def broken(self) -> list[str]:
        """Return the files that are unusable or have wrong content.

        A file of an older step is not among them, because its bytes are intact.
        """
        places = (
            problem.place
            for problem in self.problems
            if problem.what != ALONE and not problem.what.startswith(STALE)
        )
        return [text for text in dict.fromkeys(places) if text != "."]

    def is_broken(self, name: str) -> bool:
        """Return True if a file is missing or damaged."""
        return any(
            problem.place == name
            and (problem.is_fatal or problem.loses)
            and not problem.what.startswith(STALE)
            for problem in self.problems
        )

    def done(self, file: str, change_text: str, source: str) -> None:
        """Record a repair, and verify the draft again."""
        self.steps.append(RepairAction(file, change_text, source))
        self.refused.pop(file, None)
        self.look()

    def undo(self) -> None:
        """Remove the last repair from the record, after the caller has restored the draft."""
        self.steps.pop()
        self.look()

    def look(self) -> None:
        """Detect, assess and verify the draft again.

        Raises:
            StoreError: A file could not be read.
        """
        self.contents, self.problems = read_and_verify(self.draft)


def read_and_verify(folder: Folder) -> tuple[Contents, tuple[Problem, ...]]:
    """Read every byte of a folder, and return its contents and its problems.

    Raises:
        StoreError: A file could not be read.
    """
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        problem = Problem(".", UNKNOWN, is_fatal=True)
        return Contents("", UNKNOWN, problems=(problem,)), (problem,)
    problems = (*contents.problems, *verify_foreign(folder, listing, contents))
    return replace(contents, problems=problems), problems


def names_of(problems: Iterable[Problem]) -> set[tuple[str, str]]:
    """Return place and text of each problem, for a comparison with later problems."""
    return {(problem.place, problem.what) for problem in problems}
