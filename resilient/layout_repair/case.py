"""RepairCase, VirtualFolder.

A folder as it would be: pieces of files that are there, and bytes that are new.

Nothing is written. A draft is read like any folder, so what a repair would make is recognised,
judged and proved before the first byte of it exists.

One damaged checkpoint while it is mended: the draft, what is wrong with it, what stands near.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from resilient.diff.foreign_verify import verify_foreign
from resilient.diff.stale_copies import STALE
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
    """Bytes that are in a file already.

    Attributes:
        folder: where the file is.
        name: the file.
        start: the first of them.
        size_bytes: how many.
    """

    folder: Folder
    name: str
    start: int
    size_bytes: int

    def read(self, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, counted from the span's own beginning.

        Raises:
            StoreError: they could not be read.
        """
        length = min(length, self.size_bytes - start)
        return self.folder.read(self.name, self.start + start, length) if length > 0 else b""


Piece = FileSpan | bytes


class VirtualFolder:
    """A folder of pieces, to be read like any other.

    Attributes:
        url: where it would be said to be, for what is told by a folder's name.
        changed: the names that are not as they were, those that went away among them.
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
        """Return another one that is the same, to try something with."""
        found = VirtualFolder.__new__(VirtualFolder)
        found.url, found.changed = self.url, set(self.changed)
        found._files, found._listing = dict(self._files), self._listing  # noqa: SLF001 - its own kind
        return found

    def take(self, other: VirtualFolder) -> None:
        """Become what another one is."""
        self.url, self.changed = other.url, set(other.changed)
        self._files = dict(other._files)

    def put(self, name: str, *pieces: Piece) -> None:
        """Say what is in a file."""
        self._files[name] = pieces
        self.changed.add(name)

    def drop(self, name: str) -> None:
        """Leave a file out."""
        self._files.pop(name, None)
        self.changed.add(name)

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Return what a file is made of."""
        return self._files[name]

    def list(self) -> DirectoryListing:
        """Return what would be there."""
        sizes = {name: sum(map(size_of, pieces)) for name, pieces in self._files.items()}
        outside = tuple(one for one in self._listing.outside if one not in self.changed)
        return DirectoryListing(
            sizes,
            outside,
            self._listing.is_whole,
            self._listing.is_file,
            self._listing.kinds,
        )

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        if name not in self._files:
            raise KeyNotFound(f"no `{name[:200]}` in {self.url}", key=name)
        found, at = [], 0
        for piece in self._files[name]:
            size_bytes = size_of(piece)
            begin = max(start - at, 0)
            if begin < size_bytes and length > 0:
                data = _cut(piece, begin, min(length, size_bytes - begin))
                found.append(data)
                start, length = start + len(data), length - len(data)
            at += size_bytes
        return b"".join(found)

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file, a few at a time.

        Raises:
            StoreError: they could not be read.
        """
        for piece in self._files[name]:
            for at in range(0, size_of(piece), BLOCK_BYTES):
                yield _cut(piece, at, BLOCK_BYTES)

    def renamed(self, name: str) -> None:
        """Say what the folder, or its one file, is called."""
        self.url = str(PurePosixPath(self.url).with_name(name))


def size_of(piece: Piece) -> int:
    """Return how many bytes a piece has."""
    return len(piece) if isinstance(piece, bytes) else piece.size_bytes


def sliced(pieces: tuple[Piece, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of a file from one place to another."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        size_bytes = size_of(piece)
        begin, end = max(start - at, 0), min(stop - at, size_bytes)
        if begin < end:
            whole = begin == 0 and end == size_bytes
            found.append(piece if whole else _part(piece, begin, end))
        at += size_bytes
    return tuple(found)


def _part(piece: Piece, begin: int, end: int) -> Piece:
    if isinstance(piece, bytes):
        return piece[begin:end]
    return FileSpan(piece.folder, piece.name, piece.start + begin, end - begin)


def _cut(piece: Piece, start: int, length: int) -> bytes:
    return piece[start : start + length] if isinstance(piece, bytes) else piece.read(start, length)


AGREEMENT = "the agreement of its files"
"""What readers say is lost where two files speak of different steps."""
UNKNOWN = "no checkpoint of a tool that is known"


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One thing that was made whole.

    Attributes:
        file: which file, or ``.``.
        what: what is done.
        source: where what is needed for it comes from.
    """

    file: str
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class Donor:
    """A checkpoint that may help: another step of the same run, or another copy of this one."""

    folder: Folder
    listing: DirectoryListing
    contents: Contents

    @property
    def url(self) -> str:
        """Where it is."""
        return self.folder.url


@dataclass
class RepairCase:
    """A damaged checkpoint and what is known of it.

    Attributes:
        draft: what it would become.
        contents: what the draft holds.
        problems: what is wrong with the draft, its bytes looked at.
        near: other steps of the same run, the nearest first.
        copies: other places of the same checkpoint.
        logs: what its run logged, where that was named.
        steps: what was done, in order.
        losses: what is gone -> what follows from that.
        refused: place -> why nothing was done there.
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
        """The files of the draft."""
        return self.draft.list()

    @property
    def is_layout_known(self) -> bool:
        """Whether it is recognised."""
        return bool(self.contents.layout)

    def fatal(self) -> list[Problem]:
        """Return what forbids to go on; that there are weights alone is no damage."""
        return [one for one in self.problems if one.is_fatal and one.what != ALONE]

    def broken(self) -> list[str]:
        """Return the files that something forbids to use, or that say what is not so.

        A file of an older step is whole: no mender of damaged bytes may touch it.
        """
        places = (
            one.place
            for one in self.problems
            if one.what != ALONE and not one.what.startswith(STALE)
        )
        return [one for one in dict.fromkeys(places) if one != "."]

    def is_broken(self, name: str) -> bool:
        """Say whether a file is missing or damaged."""
        return any(
            one.place == name and (one.is_fatal or one.loses) and not one.what.startswith(STALE)
            for one in self.problems
        )

    def done(self, file: str, what: str, source: str) -> None:
        """Note what was done, and look at what there is now."""
        self.steps.append(RepairAction(file, what, source))
        self.refused.pop(file, None)
        self.look()

    def undo(self) -> None:
        """Take the last step back, whose draft was taken back already."""
        self.steps.pop()
        self.look()

    def look(self) -> None:
        """Recognise, judge and prove the draft anew.

        Raises:
            StoreError: it could not be read.
        """
        self.contents, self.problems = looked_through(self.draft)


def looked_through(folder: Folder) -> tuple[Contents, tuple[Problem, ...]]:
    """Return what a folder holds and what is wrong with it, every byte looked at.

    Raises:
        StoreError: it could not be read.
    """
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        problem = Problem(".", UNKNOWN, is_fatal=True)
        return Contents("", UNKNOWN, problems=(problem,)), (problem,)
    problems = (*contents.problems, *verify_foreign(folder, listing, contents))
    return replace(contents, problems=problems), problems


def names_of(problems: Iterable[Problem]) -> set[tuple[str, str]]:
    """Return what problems say, to tell new ones from others."""
    return {(one.place, one.what) for one in problems}
