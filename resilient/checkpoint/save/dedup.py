"""Reference unchanged regions instead of writing them.

Which files are worth a reference, and what protects those: whole groups, or none does.

Digests of staged regions, and which of them need none because they changed for certain.

What the store has already is not written again: regions that did not change are referred to.

A rank compares each region that it staged with the newest committed checkpoint of its life: same
tensor, dtype, box and digest means that the bytes are there. A reference names the place where
they lie, never a checkpoint that refers in turn, and only places that are known to hold them:
written by this life, or read from the store and proved when it resumed.

Three bounds keep a repository simple. A small region is written all the same. A file is only
referred to while a good part of it is needed, so what is dead in it stays small against what is
alive. And a checkpoint refers to a bounded number of folders.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.restore.memory_store import MemoryCachedStore
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.errors import KeyNotFound, ResilientError
from resilient.format.digest import digest_bytes, digest_slowly, no_progress
from resilient.format.keys import CheckpointId, origin_of, parse_checkpoint
from resilient.format.parity import parity_bytes
from resilient.format.partial_read import PartialFile
from resilient.format.safetensors_file import reduce_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from resilient.checkpoint.restore.read import VerifiedCheckpoint
    from resilient.format.manifest import (
        FileEntry,
        Manifest,
        PartEntry,
        Receipt,
        StoredRegion,
        TensorEntry,
    )
    from resilient.format.parity import ParityGroup
    from resilient.format.regions import Region
    from resilient.format.safetensors_file import FileContent, ReducedFile, StagedFile
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class DedupThresholds:
    """What decides whether a file is referred to, or written in part.

    Attributes:
        share_min: one in how many bytes is enough.
        lengths: bytes of the files there, by key, and of the staged ones, by name.
        tensors: how many each staged file holds.
        copies_bytes_max: memory for what is left of a staged file; None if nothing bounds it.
    """

    share_min: int
    lengths: Mapping[str, int]
    tensors: Mapping[str, int]
    copies_bytes_max: int | None

    def allow(self, name: str, taken_bytes: int, taken: int) -> bool:
        """Say whether enough of a file is referred to, and what is left of it can be copied.

        Args:
            name: of a staged file, or the key of one that is there.
            taken_bytes: that are referred to.
            taken: in how many tensors.
        """
        length, room_bytes = self.lengths[name], self.copies_bytes_max
        if taken_bytes * self.share_min < length:
            return False
        is_copied = taken < self.tensors.get(name, 0)
        return not is_copied or room_bytes is None or length - taken_bytes <= room_bytes


def groups_of_origin(manifest: Manifest) -> list[ParityGroup]:
    """Return the groups of a checkpoint with the names by which a newer one refers to them."""
    return [
        replace(
            group,
            files=tuple(manifest.key(name) for name in group.files),
            parity=tuple(manifest.key(name) for name in group.parity),
        )
        for group in manifest.parity
    ]


def is_worth_referencing(
    group: ParityGroup, wanted: Mapping[str, int], lengths: Mapping[str, int], share_min: int
) -> bool:
    """Say whether a good part of a group is needed; all of it must stay for the sake of any.

    Args:
        group: the group.
        wanted: bytes that are needed, by name of the file.
        lengths: bytes of each file.
        share_min: one in how many bytes is enough.
    """
    needed = sum(wanted.get(name, 0) for name in group.files)
    return 0 < sum(lengths[name] for name in group.files) <= share_min * needed


def is_there(store: Store, keys: Iterable[str], lengths: Mapping[str, int]) -> bool:
    """Say whether files have their full lengths; if the store does not say, they are in doubt.

    Crash: reads only.
    """
    try:
        return all(store.stat(key).size_bytes == lengths[key] for key in keys)
    except ResilientError:
        return False


_GLIMPSE_BYTES = 4096


class RegionFingerprints:
    """Remembers a few bytes of every region that a rank staged last.

    Where they differ the region has changed, so it is not digested only to find that out: a
    save of state that is all trained costs no second pass over it. Where they are the same
    the digest decides. So this spares work and never changes what is referred to wrongly.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Region], str] = {}

    def changed(self, file: StagedFile) -> set[int]:
        """Return where regions begin in ``file`` that are not what they were; remember all."""
        data, found = memoryview(file.data), set()
        for tensor in file.tensors:
            for one in tensor.regions:
                glimpse = digest_bytes(_few(data, one))
                if self._seen.get((tensor.name, one.region), glimpse) != glimpse:
                    found.add(one.start)
                self._seen[tensor.name, one.region] = glimpse
        return found


def _few(data: memoryview, one: StoredRegion) -> bytes:
    """Return bytes from the start, the middle and the end of a region."""
    last = max(one.size_bytes - _GLIMPSE_BYTES, 0)
    places = (one.start + offset for offset in (0, last // 2, last))
    length = min(one.size_bytes, _GLIMPSE_BYTES)
    return b"".join(data[start : start + length] for start in places)


def digested(
    file: StagedFile, changed: Collection[int] = (), told: Callable[[int], None] = no_progress
) -> StagedFile:
    """Return the file with the digest of each region's own bytes, where there is none yet.

    Args:
        file: as it was staged.
        changed: where regions begin that need none.
        told: told of each piece's length when it is done, and may take its time.
    """
    data = memoryview(file.data)

    def proved(one: StoredRegion) -> StoredRegion:
        if one.digest or one.start in changed:
            return one
        content = data[one.start : one.start + one.size_bytes]
        return replace(one, digest=digest_slowly(content, told))

    return replace(
        file,
        tensors=tuple(
            replace(tensor, regions=tuple(map(proved, tensor.regions))) for tensor in file.tensors
        ),
    )


_What = tuple[str, str, tuple[int, ...], "Region"]

REFER_BYTES_MIN = 16 << 10
"""A smaller region is always written: it costs less than what must be kept for its sake."""
SHARE_MIN = 4
"""A file is referred to, or written in part, only if that concerns a quarter of it or more."""
FOLDERS_MAX = 16
"""One rank refers to files in at most so many folders; the rest is written anew."""


@dataclass(frozen=True, slots=True)
class DedupBase:
    """A checkpoint whose bytes may be referred to, if it is committed.

    Attributes:
        checkpoint: which.
        proved: (file, first byte, byte after the last) of all that this rank has read of it from
            the store and proved; None means everything, because this life wrote it.
    """

    checkpoint: CheckpointId
    proved: tuple[tuple[str, int, int], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {"checkpoint": self.checkpoint.folder, "proved": self.proved}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DedupBase:
        """Return what ``to_json`` described.

        Raises:
            ValueError: it describes nothing.
        """
        checkpoint, proved = parse_checkpoint(value["checkpoint"]), value["proved"]
        if checkpoint is None:
            raise ValueError(f"{value['checkpoint']!r} is no checkpoint")
        if proved is not None:
            proved = tuple((str(file), int(start), int(stop)) for file, start, stop in proved)
        return DedupBase(checkpoint, proved)


def make_dedup_base(proved: VerifiedCheckpoint, store: Store) -> DedupBase:
    """Return the checkpoint that was resumed from, as far as this rank has proved what is stored.

    What came from the keeper's memory says nothing about the store's copy of it, what came from
    the durable tier nothing about a near one, and what was computed back from parity is damaged.

    Crash: reads nothing.

    Args:
        proved: what was read.
        store: what it was read from.
    """
    recalled = store.recalled if isinstance(store, MemoryCachedStore | TieredStore) else set[str]()
    ranges: list[tuple[str, int, int]] = []
    for name, content in proved.files.items():
        if proved.manifest.key(name) not in recalled and name not in proved.mended:
            parts = content.ranges if isinstance(content, PartialFile) else [(0, len(content))]
            ranges += [(name, start, stop) for start, stop in parts]
    return DedupBase(proved.manifest.checkpoint, tuple(ranges))


@dataclass(frozen=True, slots=True)
class DedupResult:
    """One rank's save, divided into what is to be written and what is there already.

    Attributes:
        files: what is to be written.
        referred: tensors that are not written, with the places of their regions.
        origins: the files that those lie in, all of older checkpoints, and those that protect
            them.
        parity: how many of the files that are written may be lost.
        groups: the groups that protect files of ``origins``.
    """

    files: tuple[FileContent, ...]
    referred: tuple[TensorEntry, ...] = ()
    origins: tuple[FileEntry, ...] = ()
    parity: int = 0
    groups: tuple[ParityGroup, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes that are to be written."""
        sizes = [file.size_bytes for file in self.files]
        return sum(sizes) + parity_bytes(sizes, self.parity)

    def complete(self, written: Receipt) -> Receipt:
        """Return the receipt of all: what was written, and what was there."""
        return replace(
            written,
            files=(*written.files, *self.origins),
            tensors=(*written.tensors, *self.referred),
            parity=(*written.parity, *self.groups),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Match:
    """A staged region whose bytes are in the store: where here, and where there."""

    file: str
    start: int
    tensor: TensorEntry
    place: StoredRegion


def deduplicate(  # noqa: PLR0913 - a save as one rank sees it
    store: Store,
    checkpoint: CheckpointId,
    files: Sequence[StagedFile],
    parts: Sequence[PartEntry],
    bases: Sequence[DedupBase],
    *,
    parity: int = 0,
    glimpses: RegionFingerprints | None = None,
    copies_bytes_max: int | None = None,
    told: Callable[[int], None] = no_progress,
) -> DedupResult:
    """Return what must be written of ``files``, and where the rest of it is.

    Whatever is in doubt is written: a base that is gone or damaged or cannot be asked for, a file
    that is not there with its full length.

    Crash: reads only.

    Args:
        store: the repository.
        checkpoint: what is about to be saved.
        files: what this rank staged.
        parts: the parts whose documents are among ``files``; documents are always written.
        bases: what may be referred to, the likeliest first; the first that is committed counts.
        parity: how many files of this rank may be lost; if any, only files are referred to that
            are protected where they lie.
        glimpses: of what this rank staged last; spare work.
        copies_bytes_max: memory for what is left of a file, if it is bounded: one of which more
            is left is written as it lies.
        told: told of each piece's length when it is digested, and may take its time.
    """
    documents = {one.document for one in parts}
    seen = glimpses or RegionFingerprints()
    changed = {one.name: seen.changed(one) for one in files if one.name not in documents}
    # Nothing is asked of the store where nothing can be referred to: so most saves are.
    found = None if _is_new(files, changed) else _first_committed(store, checkpoint, bases)
    if found is None:
        return DedupResult(tuple(files), parity=parity)
    manifest, base = found
    files = [
        digested(one, changed[one.name], told) if one.name in changed else one for one in files
    ]
    places = _places(manifest, base, checkpoint)
    matches = [one for file in files if file.name in changed for one in _matches(file, places)]
    entries = {manifest.key(one.name): one for one in manifest.files}
    lengths = {key: one.size_bytes for key, one in entries.items()}
    lengths |= {file.name: file.size_bytes for file in files}
    tensors = {file.name: len(file.tensors) for file in files}
    bounds = DedupThresholds(SHARE_MIN, lengths, tensors, copies_bytes_max)
    matches = _bounded(_there(store, _bounded(matches, bounds), lengths), bounds)
    groups: tuple[ParityGroup, ...] = ()
    if parity:
        matches, groups = _protected(store, manifest, matches, bounds)
    origins = dict.fromkeys(one.place.file for one in matches)
    origins |= dict.fromkeys(name for group in groups for name in group.shares)
    return DedupResult(
        tuple(thin for file in files for thin in _rest(file, matches)),
        tuple(replace(one.tensor, regions=(one.place,)) for one in matches),
        tuple(replace(entries[key], name=key) for key in origins),
        parity,
        groups,
    )


def _protected(
    store: Store, manifest: Manifest, matches: list[_Match], bounds: DedupThresholds
) -> tuple[list[_Match], tuple[ParityGroup, ...]]:
    """Drop what lies in files that nothing protects; return the rest and its groups.

    A group protects only as a whole, so all of it must stay as long as a file of it is needed.
    That is worth it for a good part of the group, and only if all of it is there.
    """
    groups = groups_of_origin(manifest)
    while True:
        wanted = Counter[str]()
        for one in matches:
            wanted[one.place.file] += one.place.size_bytes
        groups = [
            one for one in groups if is_worth_referencing(one, wanted, bounds.lengths, SHARE_MIN)
        ]
        groups = [one for one in groups if is_there(store, one.shares, bounds.lengths)]
        safe = {name for group in groups for name in group.files}
        fewer = _bounded([one for one in matches if one.place.file in safe], bounds)
        if len(fewer) == len(matches):
            return matches, tuple(groups)
        matches = fewer


def _is_new(files: Sequence[StagedFile], changed: Mapping[str, set[int]]) -> bool:
    """Say whether no region of the files in ``changed`` can be what it was: all have changed.

    What is too small to refer to does not count: a random state that nobody drew from must not
    make every rank read a manifest of all ranks.
    """
    return all(
        one.start in changed[file.name]
        for file in files
        if file.name in changed
        for tensor in file.tensors
        for one in tensor.regions
        if one.size_bytes >= REFER_BYTES_MIN
    )


def _first_committed(
    store: Store, checkpoint: CheckpointId, bases: Sequence[DedupBase]
) -> tuple[Manifest, DedupBase] | None:
    """Return the first of ``bases`` that has a manifest; None if it is in doubt which that is."""
    for base in bases:
        if base.checkpoint < checkpoint:
            try:
                return read_manifest(store, base.checkpoint), base
            except KeyNotFound:
                continue
            except ResilientError:
                return None
    return None


def _places(
    manifest: Manifest, base: DedupBase, checkpoint: CheckpointId
) -> dict[_What, StoredRegion]:
    """Return where the regions of a checkpoint lie that may be referred to, by what they are."""
    proved: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for file, start, stop in base.proved or ():
        proved[file].append((start, stop))
    return {
        _what(tensor, one): replace(one, file=manifest.key(one.file))
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.size_bytes >= REFER_BYTES_MIN
        and (origin_of(one.file) or manifest.checkpoint) < checkpoint
        and (
            base.proved is None
            or any(
                start <= one.start and one.start + one.size_bytes <= stop
                for start, stop in proved[one.file]
            )
        )
    }


def _what(tensor: TensorEntry, one: StoredRegion) -> _What:
    return tensor.name, tensor.dtype, tensor.shape, one.region


def _matches(file: StagedFile, places: Mapping[_What, StoredRegion]) -> Iterator[_Match]:
    for tensor in file.tensors:
        for one in tensor.regions:
            place = places.get(_what(tensor, one))
            if place is not None and place.digest == one.digest:
                yield _Match(file.name, one.start, tensor, place)


def _bounded(matches: list[_Match], bounds: DedupThresholds) -> list[_Match]:
    """Drop what is not worth a reference, or leaves too much to copy, until all bounds hold."""
    folders = Counter[CheckpointId | None]()
    for one in matches:
        folders[origin_of(one.place.file)] += one.place.size_bytes
    few = {folder for folder, _ in folders.most_common(FOLDERS_MAX)}
    kept = [one for one in matches if origin_of(one.place.file) in few]
    while True:
        share, count = Counter[str](), Counter[str]()
        for one in kept:
            for name in (one.file, one.place.file):
                share[name] += one.place.size_bytes
                count[name] += 1
        worth = {name for name, size in share.items() if bounds.allow(name, size, count[name])}
        fewer = [one for one in kept if one.file in worth and one.place.file in worth]
        if len(fewer) == len(kept):
            return kept
        kept = fewer


def _there(store: Store, matches: list[_Match], lengths: Mapping[str, int]) -> list[_Match]:
    """Drop what refers to a file that is gone, or not as long as it was."""
    files = {one.place.file for one in matches}
    there = {key for key in files if is_there(store, [key], lengths)}
    return [one for one in matches if one.place.file in there]


def _rest(file: StagedFile, matches: Sequence[_Match]) -> Iterator[StagedFile | ReducedFile]:
    """Yield what must be written of a staged file: all, a part, or nothing."""
    starts = {one.start for one in matches if one.file == file.name}
    if not starts:
        yield file
    elif len(starts) < len(file.tensors):
        yield reduce_file(digested(file), starts)
