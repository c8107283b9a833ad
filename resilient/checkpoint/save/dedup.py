"""Deduplication: references to unchanged regions of tensors that the store already has.

A region is a box of a tensor, with an offset and a length per axis. A rank compares each region to
save with the newest committed checkpoint of its attempt, or with the resumed checkpoint. If tensor,
dtype, box and digest are equal, the store already has the bytes. A reference names the file and the
offset of the stored bytes. A reference never points to another reference. A reference points only
to bytes that this attempt wrote, or read and verified when it resumed.

Three bounds keep a repository simple. A small region is always written. A file is referenced only
while a large part of the file is needed, so few stored bytes are unneeded. A checkpoint references
files in at most a fixed number of folders.
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
    """Thresholds that decide whether a file is referenced, or written in part.

    Attributes:
        share_min: Reciprocal of the smallest share of a file that is worth a reference.
        lengths: Bytes of the stored files, by key, and of the staged files, by name.
        tensors: Number of tensors in each staged file.
        copies_bytes_max: Memory for the remaining bytes of a staged file; None for no limit.
    """

    share_min: int
    lengths: Mapping[str, int]
    tensors: Mapping[str, int]
    copies_bytes_max: int | None

    def allow(self, name: str, taken_bytes: int, taken: int) -> bool:
        """Return whether enough of a file is referenced, and its remaining bytes may be copied.

        Args:
            name: Name of a staged file, or key of a stored one.
            taken_bytes: Bytes that are referenced.
            taken: Number of tensors that are referenced.
        """
        length, copies_bytes_max = self.lengths[name], self.copies_bytes_max
        if taken_bytes * self.share_min < length:
            return False
        is_copied = taken < self.tensors.get(name, 0)
        return not is_copied or copies_bytes_max is None or length - taken_bytes <= copies_bytes_max


def groups_of_origin(manifest: Manifest) -> list[ParityGroup]:
    """Return the parity groups of a checkpoint, with the names that a newer checkpoint uses."""
    return [
        replace(
            group,
            files=tuple(manifest.key(name) for name in group.files),
            parity=tuple(manifest.key(name) for name in group.parity),
        )
        for group in manifest.parity
    ]


def is_worth_referencing(
    group: ParityGroup,
    bytes_by_folder: Mapping[str, int],
    lengths: Mapping[str, int],
    share_min: int,
) -> bool:
    """Return whether a good part of a parity group is needed; a group is only kept as a whole.

    Args:
        group: Parity group.
        bytes_by_folder: Needed bytes by file name.
        lengths: Bytes of each file.
        share_min: Reciprocal of the smallest share that is worth a reference.
    """
    needed_bytes = sum(bytes_by_folder.get(name, 0) for name in group.files)
    return 0 < sum(lengths[name] for name in group.files) <= share_min * needed_bytes


def all_stored(store: Store, keys: Iterable[str], lengths: Mapping[str, int]) -> bool:
    """Return whether all files have their full lengths; after a store error the answer is False.

    Crash: reads only.
    """
    try:
        return all(store.stat(key).size_bytes == lengths[key] for key in keys)
    except ResilientError:
        return False


_SAMPLE_BYTES = 4096


class RegionFingerprints:
    """Fingerprints (a few bytes) of every region that a rank staged last.

    If a fingerprint differs, the region has changed, and no digest is needed. If every region
    changes between saves, no save needs a second pass over the bytes. For equal fingerprints the
    digest decides. So fingerprints save work and never cause a wrong reference.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[tuple[str, Region], str] = {}

    def changed(self, file: StagedFile) -> set[int]:
        """Return the start offsets of the changed regions of ``file``; remember all regions."""
        data, changes = memoryview(file.data), set()
        for tensor in file.tensors:
            for region in tensor.regions:
                fingerprint = digest_bytes(_sample_bytes(data, region))
                if self._fingerprints.get((tensor.name, region.region), fingerprint) != fingerprint:
                    changes.add(region.start)
                self._fingerprints[tensor.name, region.region] = fingerprint
        return changes


def _sample_bytes(data: memoryview, region: StoredRegion) -> bytes:
    """Return bytes from the start, the middle and the end of a region."""
    last = max(region.size_bytes - _SAMPLE_BYTES, 0)
    places = (region.start + offset for offset in (0, last // 2, last))
    length = min(region.size_bytes, _SAMPLE_BYTES)
    return b"".join(data[start : start + length] for start in places)


def digested(
    file: StagedFile,
    changed: Collection[int] = (),
    on_progress: Callable[[int], None] = no_progress,
) -> StagedFile:
    """Return the file with the digest of each region's own bytes, where it is missing.

    Args:
        file: Staged file.
        changed: Start offsets of regions that need no digest.
        on_progress: Callback with the length of each digested piece; it may block.
    """
    data = memoryview(file.data)

    def with_digest(region: StoredRegion) -> StoredRegion:
        if region.digest or region.start in changed:
            return region
        content = data[region.start : region.start + region.size_bytes]
        return replace(region, digest=digest_slowly(content, on_progress))

    return replace(
        file,
        tensors=tuple(
            replace(tensor, regions=tuple(map(with_digest, tensor.regions)))
            for tensor in file.tensors
        ),
    )


_RegionKey = tuple[str, str, tuple[int, ...], "Region"]

REFER_BYTES_MIN = 16 << 10
"""A smaller region is always written: a write costs less than keeping the older file."""
SHARE_MIN = 4
"""A file is referenced, or written in part, only if at least a quarter of it is affected."""
FOLDERS_MAX = 16
"""Most folders that one rank references; regions in other folders are written again."""


@dataclass(frozen=True, slots=True)
class DedupBase:
    """Checkpoint whose bytes a later save may reference, if the checkpoint is committed.

    Attributes:
        checkpoint: Id of the checkpoint.
        verified_ranges: (file, first byte, byte after the last) of all ranges that this rank has
            read from the store and verified. None means the whole checkpoint, because this
            attempt wrote it.
    """

    checkpoint: CheckpointId
    verified_ranges: tuple[tuple[str, int, int], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {"checkpoint": self.checkpoint.folder, "proved": self.verified_ranges}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DedupBase:
        """Return the dedup base that ``to_json`` described.

        Raises:
            ValueError: The value describes none.
        """
        checkpoint, verified_by_file = parse_checkpoint(value["checkpoint"]), value["proved"]
        if checkpoint is None:
            raise ValueError(f"{value['checkpoint']!r} is not a checkpoint")
        if verified_by_file is not None:
            verified_by_file = tuple(
                (str(file), int(start), int(stop)) for file, start, stop in verified_by_file
            )
        return DedupBase(checkpoint, verified_by_file)


def make_dedup_base(verified: VerifiedCheckpoint, store: Store) -> DedupBase:
    """Return the resumed checkpoint as a dedup base, limited to bytes verified in the store.

    Bytes from the daemon's memory prove nothing about the store's copy. Bytes from the durable
    tier prove nothing about the near tier. Files that were reconstructed from parity are damaged
    in the store.

    Crash: reads nothing.

    Args:
        verified: Verified checkpoint.
        store: Store from which it was read.
    """
    unverified_keys = (
        store.unverified_keys if isinstance(store, MemoryCachedStore | TieredStore) else set[str]()
    )
    ranges: list[tuple[str, int, int]] = []
    for name, content in verified.files.items():
        if (
            verified.manifest.key(name) not in unverified_keys
            and name not in verified.reconstructed
        ):
            parts = content.ranges if isinstance(content, PartialFile) else [(0, len(content))]
            ranges += [(name, start, stop) for start, stop in parts]
    return DedupBase(verified.manifest.checkpoint, tuple(ranges))


@dataclass(frozen=True, slots=True)
class DedupResult:
    """One rank's save, divided into bytes to write and bytes that are stored already.

    Attributes:
        files: Files to write.
        referred: Tensors that are not written, with the places of their regions.
        origins: Files of older checkpoints that have those regions, and the files that protect
            them.
        parity: Number of the written files that parity can reconstruct.
        groups: Parity groups that protect files of ``origins``.
    """

    files: tuple[FileContent, ...]
    referred: tuple[TensorEntry, ...] = ()
    origins: tuple[FileEntry, ...] = ()
    parity: int = 0
    groups: tuple[ParityGroup, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes to write, parity included."""
        sizes = [file.size_bytes for file in self.files]
        return sum(sizes) + parity_bytes(sizes, self.parity)

    def complete(self, written: Receipt) -> Receipt:
        """Return the receipt of the whole save: written files and references."""
        return replace(
            written,
            files=(*written.files, *self.origins),
            tensors=(*written.tensors, *self.referred),
            parity=(*written.parity, *self.groups),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Match:
    """Staged region whose bytes are in the store: its staged place and its stored place."""

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
    last_fingerprints: RegionFingerprints | None = None,
    copies_bytes_max: int | None = None,
    on_progress: Callable[[int], None] = no_progress,
) -> DedupResult:
    """Divide ``files`` into what must be written and what is stored already.

    In doubt a region is written: if the base is missing, damaged or unreachable, or the stored file
    does not have its full length.

    Crash: reads only.

    Args:
        store: Repository.
        checkpoint: Checkpoint about to be saved.
        files: Files that this rank staged.
        parts: Parts whose documents are among ``files``; documents are always written.
        bases: Dedup bases, the likeliest first; the first committed one counts.
        parity: Number of this rank's files that parity can reconstruct. If above 0, only files that
            parity already protects are referenced.
        last_fingerprints: Fingerprints of this rank's last save, which save work.
        copies_bytes_max: Memory for the remaining bytes of a file; None for no limit. A file with
            more remaining bytes is written whole.
        on_progress: Callback with the length of each digested piece; it may block.
    """
    documents = {part.document for part in parts}
    fingerprints = last_fingerprints or RegionFingerprints()
    changed_starts = {
        file.name: fingerprints.changed(file) for file in files if file.name not in documents
    }
    # The store is not asked if nothing can be referenced, which is the common case.
    bases_of_save = (
        None if _is_new(files, changed_starts) else _first_committed(store, checkpoint, bases)
    )
    if bases_of_save is None:
        return DedupResult(tuple(files), parity=parity)
    manifest, base = bases_of_save
    files = [
        digested(file, changed_starts[file.name], on_progress)
        if file.name in changed_starts
        else file
        for file in files
    ]
    places = _places(manifest, base, checkpoint)
    matches = [
        match for file in files if file.name in changed_starts for match in _matches(file, places)
    ]
    entries = {manifest.key(file.name): file for file in manifest.files}
    lengths = {key: entry.size_bytes for key, entry in entries.items()}
    lengths |= {file.name: file.size_bytes for file in files}
    tensors = {file.name: len(file.tensors) for file in files}
    bounds = DedupThresholds(SHARE_MIN, lengths, tensors, copies_bytes_max)
    matches = _bounded(_drop_missing(store, _bounded(matches, bounds), lengths), bounds)
    groups: tuple[ParityGroup, ...] = ()
    if parity:
        matches, groups = _protected(store, manifest, matches, bounds)
    origins = dict.fromkeys(match.place.file for match in matches)
    origins |= dict.fromkeys(name for group in groups for name in group.shares)
    return DedupResult(
        tuple(
            remaining_file for file in files for remaining_file in _remaining_parts(file, matches)
        ),
        tuple(replace(match.tensor, regions=(match.place,)) for match in matches),
        tuple(replace(entries[key], name=key) for key in origins),
        parity,
        groups,
    )


def _protected(
    store: Store, manifest: Manifest, matches: list[_Match], bounds: DedupThresholds
) -> tuple[list[_Match], tuple[ParityGroup, ...]]:
    """Drop matches in unprotected files; return the others and their parity groups.

    Only a complete group protects its files, so the whole group stays while one of its files is
    needed. A reference is worth this only for a large part of the group, and if the whole group is
    stored.
    """
    groups = groups_of_origin(manifest)
    while True:
        bytes_by_folder = Counter[str]()
        for match in matches:
            bytes_by_folder[match.place.file] += match.place.size_bytes
        groups = [
            group
            for group in groups
            if is_worth_referencing(group, bytes_by_folder, bounds.lengths, SHARE_MIN)
        ]
        groups = [group for group in groups if all_stored(store, group.shares, bounds.lengths)]
        safe = {name for group in groups for name in group.files}
        protected_matches = _bounded(
            [match for match in matches if match.place.file in safe], bounds
        )
        if len(protected_matches) == len(matches):
            return matches, tuple(groups)
        matches = protected_matches


def _is_new(files: Sequence[StagedFile], changed: Mapping[str, set[int]]) -> bool:
    """Return whether every region of the files in ``changed`` has certainly changed.

    Regions too small to reference do not count: an unused random state must not make every rank
    read a manifest of all ranks.
    """
    return all(
        region.start in changed[file.name]
        for file in files
        if file.name in changed
        for tensor in file.tensors
        for region in tensor.regions
        if region.size_bytes >= REFER_BYTES_MIN
    )


def _first_committed(
    store: Store, checkpoint: CheckpointId, bases: Sequence[DedupBase]
) -> tuple[Manifest, DedupBase] | None:
    """Return the first of ``bases`` that has a manifest; None if that is in doubt."""
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
) -> dict[_RegionKey, StoredRegion]:
    """Return the places of a checkpoint's regions that may be referenced, by region identity."""
    verified_by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for file, start, stop in base.verified_ranges or ():
        verified_by_file[file].append((start, stop))
    return {
        _region_key(tensor, region): replace(region, file=manifest.key(region.file))
        for tensor in manifest.tensors
        for region in tensor.regions
        if region.size_bytes >= REFER_BYTES_MIN
        and (origin_of(region.file) or manifest.checkpoint) < checkpoint
        and (
            base.verified_ranges is None
            or any(
                start <= region.start and region.start + region.size_bytes <= stop
                for start, stop in verified_by_file[region.file]
            )
        )
    }


def _region_key(tensor: TensorEntry, region: StoredRegion) -> _RegionKey:
    return tensor.name, tensor.dtype, tensor.shape, region.region


def _matches(file: StagedFile, places: Mapping[_RegionKey, StoredRegion]) -> Iterator[_Match]:
    for tensor in file.tensors:
        for region in tensor.regions:
            place = places.get(_region_key(tensor, region))
            if place is not None and place.digest == region.digest:
                yield _Match(file.name, region.start, tensor, place)


def _bounded(matches: list[_Match], bounds: DedupThresholds) -> list[_Match]:
    """Drop matches that are not worth a reference, or leave too much to copy, until bounds hold."""
    folders = Counter[CheckpointId | None]()
    for match in matches:
        folders[origin_of(match.place.file)] += match.place.size_bytes
    largest = {folder for folder, _ in folders.most_common(FOLDERS_MAX)}
    kept_matches = [match for match in matches if origin_of(match.place.file) in largest]
    while True:
        share, count = Counter[str](), Counter[str]()
        for match in kept_matches:
            for name in (match.file, match.place.file):
                share[name] += match.place.size_bytes
                count[name] += 1
        worth = {name for name, size in share.items() if bounds.allow(name, size, count[name])}
        bounded_matches = [
            match for match in kept_matches if match.file in worth and match.place.file in worth
        ]
        if len(bounded_matches) == len(kept_matches):
            return kept_matches
        kept_matches = bounded_matches


def _drop_missing(store: Store, matches: list[_Match], lengths: Mapping[str, int]) -> list[_Match]:
    """Drop matches in files that are missing or have another length."""
    files = {match.place.file for match in matches}
    existing_keys = {key for key in files if all_stored(store, [key], lengths)}
    return [match for match in matches if match.place.file in existing_keys]


def _remaining_parts(
    file: StagedFile, matches: Sequence[_Match]
) -> Iterator[StagedFile | ReducedFile]:
    """Yield what must be written of a staged file: all, a part, or nothing."""
    starts = {match.start for match in matches if match.file == file.name}
    if not starts:
        yield file
    elif len(starts) < len(file.tensors):
        yield reduce_file(digested(file), starts)
