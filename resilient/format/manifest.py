"""Manifest of a checkpoint: consistency checks, and merge of the ranks' lists of written files.

The manifest is a checkpoint's table of contents. A checkpoint is committed if and only if its
manifest exists.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.errors import IncompatibleCheckpoint, IntegrityError
from resilient.format.digest import CHUNK_BYTES, FileDigest, join_chunks
from resilient.format.document import check_manifest, check_receipt, seal, unseal
from resilient.format.keys import (
    CheckpointId,
    is_file_name,
    key_of_file,
    origin_of,
    parse_checkpoint,
)
from resilient.format.parity import ParityGroup, check_groups
from resilient.format.regions import ITEM_BYTES, Region, covers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def check_manifest_consistency(manifest: Manifest, chunk_bytes: int) -> None:
    """Reject a manifest that contradicts itself, so that its readers can rely on it.

    Args:
        manifest: Decoded manifest.
        chunk_bytes: Chunk length that the manifest states.

    Raises:
        ValueError: A name leads out of the folder, an offset is outside its file, or a tensor has
            holes.
        KeyError: A region is in a file that is not listed.
    """
    _require(chunk_bytes == CHUNK_BYTES, f"chunks of {chunk_bytes} bytes")
    sizes: dict[str, int] = {}
    for entry in manifest.files:
        _require(_may_be_listed(entry.name, manifest), f"file name {entry.name!r}")
        _require(entry.name not in sizes, f"`{entry.name}` is listed twice")
        _require(join_chunks(entry.chunks) == entry.digest, f"digests of `{entry.name}`")
        _require(
            -(-entry.size_bytes // CHUNK_BYTES) == len(entry.chunks), f"chunks of {entry.name}"
        )
        sizes[entry.name] = entry.size_bytes
    _require(len({item.name for item in manifest.tensors}) == len(manifest.tensors), "tensor names")
    for tensor in manifest.tensors:
        _check_tensor(tensor, sizes)
    for part in manifest.parts:
        _require(
            part.document in sizes and is_file_name(part.document), f"document of `{part.name}`"
        )
    _require(isinstance(manifest.metrics, dict), "metrics")
    for name, value in manifest.metrics.items():
        _require(type(value) in (int, float) and math.isfinite(value), f"metric `{name}`")
    _require(manifest.format_version > 1 or not manifest.parity, "parity before version 2")
    if manifest.parity:
        check_groups(manifest.parity, sizes)


def _may_be_listed(name: str, manifest: Manifest) -> bool:
    """Return whether it names a file of this or, since version 2, of an older checkpoint.

    A file of a newer checkpoint is never allowed. References therefore have no cycles, and garbage
    collection knows which checkpoints an unreadable manifest may need.
    """
    origin = origin_of(name)
    if origin is None:
        return is_file_name(name)
    return manifest.format_version > 1 and origin < manifest.checkpoint


def _check_tensor(tensor: TensorEntry, sizes: Mapping[str, int]) -> None:
    _require(
        covers(tensor.shape, [region.region for region in tensor.regions]),
        f"holes in {tensor.name}",
    )
    for region in tensor.regions:
        _require(
            region.size_bytes == region.region.size * ITEM_BYTES[tensor.dtype]
            and 0 <= region.start <= region.start + region.size_bytes <= sizes[region.file],
            f"place of {tensor.name}{region.region}",
        )


def _require(holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(problem)


FORMAT = "resilient-checkpoint"
FORMAT_VERSION = 2
READABLE = (1, 2)
"""Versions that this release reads. Version 2 adds files of older checkpoints, and parity."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Length and digests of one stored file.

    Attributes:
        name: File name inside the checkpoint's folder; ``folder/name`` for a file in the folder of
            an older checkpoint.
        size_bytes: Length in bytes.
        digest: Digest over the chunk digests.
        chunks: Digest of each chunk of ``CHUNK_BYTES``.
        rank: Rank that wrote the file.
    """

    name: str
    size_bytes: int
    digest: str
    chunks: tuple[str, ...]
    rank: int

    @property
    def proof(self) -> FileDigest:
        """The digests, to verify content."""
        return FileDigest(self.size_bytes, self.digest, self.chunks)

    @property
    def origin(self) -> CheckpointId | None:
        """Older checkpoint whose folder has the file; None for the manifest's own folder."""
        return origin_of(self.name)


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """Place of a box of a tensor, stored row-major.

    Attributes:
        region: The box.
        file: Name of the file, as in :class:`FileEntry`.
        start: Offset of its first byte in the file.
        size_bytes: Length in bytes.
        digest: Digest of its bytes alone, so that damage names the tensor; empty before the write.
    """

    region: Region
    file: str
    start: int
    size_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor and the places of its regions.

    Attributes:
        name: Name of the part, a slash, and the path inside the part.
        part: Part that the tensor belongs to.
        dtype: Name in :data:`resilient.format.regions.ITEM_BYTES`.
        shape: Global shape.
        regions: Boxes that cover every element exactly once.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[StoredRegion, ...]

    @property
    def size_bytes(self) -> int:
        """Length of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One part: ``scope`` is ``replicated`` or ``rank``; ``document`` has its plain values."""

    name: str
    scope: str
    document: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """Files, tensors and parts that one rank stored."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    parts: tuple[PartEntry, ...] = ()
    parity: tuple[ParityGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value for the agreement among ranks."""
        return {
            "rank": self.rank,
            "files": [_file_fields(file) for file in self.files],
            "tensors": [_tensor_fields(tensor) for tensor in self.tensors],
            "parts": [_part_fields(part) for part in self.parts],
            "parity": [group.to_json() for group in self.parity],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Receipt:
        """Parse the output of ``to_json``.

        Raises:
            IntegrityError: The value is not a receipt.
        """
        try:
            check_receipt(value)
            return Receipt(
                value["rank"],
                tuple(_file(file) for file in value["files"]),
                tuple(_tensor(tensor) for tensor in value["tensors"]),
                tuple(PartEntry(**part) for part in value["parts"]),
                tuple(ParityGroup.from_json(group) for group in value["parity"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"this is not a receipt of a rank: {error}") from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a whole checkpoint.

    Attributes:
        run_id: Id of the run, the same in all attempts.
        checkpoint: Generation and step.
        parent: Checkpoint that this attempt resumed from, None if from scratch.
        created_at: Time of creation, UTC, ISO 8601.
        world: ``{"size": number of ranks that wrote it, "strategy": parallelism of the model}``.
        files: Every file that the checkpoint needs, without the manifest itself.
        tensors: Every tensor.
        parts: Every part.
        config: Resolved configuration of the run.
        software: Versions of the software that wrote it.
        data: Data position.
        metrics: Metrics of this step, finite numbers by name.
        protects: Checkpoints that the run wants to keep, for example its best.
        parity: Groups of files that protect each other.
        root: SHA-256 of the document, known after encoding or decoding.
    """

    run_id: str
    checkpoint: CheckpointId
    parent: CheckpointId | None
    created_at: str
    world: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    parts: tuple[PartEntry, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    protects: tuple[CheckpointId, ...] = ()
    parity: tuple[ParityGroup, ...] = ()
    format_version: int = FORMAT_VERSION
    root: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that the checkpoint needs, without the manifest."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def own_bytes(self) -> int:
        """Bytes of the files in its own folder; other files are in older checkpoints."""
        return sum(entry.size_bytes for entry in self.files if entry.origin is None)

    @property
    def needed(self) -> frozenset[str]:
        """Names of the files that a restore may read, without parity and files for parity only."""
        regions = (region.file for tensor in self.tensors for region in tensor.regions)
        return frozenset({*regions, *(part.document for part in self.parts)})

    def key(self, name: str) -> str:
        """Return the store's key of a file that the manifest lists."""
        return key_of_file(self.checkpoint, name)

    def file(self, name: str) -> FileEntry:
        """Return the entry of a listed file."""
        return next(entry for entry in self.files if entry.name == name)


def _file_fields(file: FileEntry) -> dict[str, Any]:
    """Return the fields of an entry; ``dataclasses.asdict`` takes ten times as long."""
    return {
        "name": file.name,
        "size_bytes": file.size_bytes,
        "digest": file.digest,
        "chunks": file.chunks,
        "rank": file.rank,
    }


def _tensor_fields(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "part": tensor.part,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "regions": [
            {
                "region": {
                    "offsets": stored_region.region.offsets,
                    "lengths": stored_region.region.lengths,
                },
                "file": stored_region.file,
                "start": stored_region.start,
                "size_bytes": stored_region.size_bytes,
                "digest": stored_region.digest,
            }
            for stored_region in tensor.regions
        ],
    }


def _part_fields(part: PartEntry) -> dict[str, Any]:
    return {"name": part.name, "scope": part.scope, "document": part.document}


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's bytes."""
    return seal(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "chunk_bytes": CHUNK_BYTES,
            "run_id": manifest.run_id,
            "generation": manifest.checkpoint.generation,
            "step": manifest.checkpoint.step,
            "parent": manifest.parent.folder if manifest.parent else None,
            "created_at": manifest.created_at,
            "world": dict(manifest.world),
            "files": [_file_fields(file) for file in manifest.files],
            "tensors": [_tensor_fields(tensor) for tensor in manifest.tensors],
            "parts": [_part_fields(part) for part in manifest.parts],
            "config": dict(manifest.config),
            "software": dict(manifest.software),
            "data": dict(manifest.data),
            "metrics": dict(manifest.metrics),
            "protects": [checkpoint.folder for checkpoint in manifest.protects],
            **(
                {"parity": [group.to_json() for group in manifest.parity]}
                if manifest.parity
                else {}
            ),
        }
    )


def decode(data: bytes, key: str) -> Manifest:
    """Parse, verify and check a manifest.

    Args:
        data: Bytes of the manifest.
        key: Key in the store; its folder must be the folder in the manifest.

    Raises:
        IntegrityError: The bytes are damaged, or the content contradicts itself.
        IncompatibleCheckpoint: This release does not read the format or version.
    """
    fields = unseal(data, key)
    if fields.get("format") != FORMAT or fields.get("version") not in READABLE:
        raise IncompatibleCheckpoint(
            f"`{key}` is of format {fields.get('format')!r} version {fields.get('version')!r}; "
            f"this release reads {FORMAT!r} version {' and '.join(map(str, READABLE))}",
            hint="pip install --upgrade resilient-train",
        )
    try:
        check_manifest(fields)
        manifest = _from_fields(fields)
        check_manifest_consistency(manifest, int(fields["chunk_bytes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"`{key}`: contradicts itself ({error})", key=key) from error
    if manifest.checkpoint.manifest_key != key:
        raise IntegrityError(f"`{key}` is the manifest of {manifest.checkpoint}", key=key)
    return manifest


def _from_fields(fields: Mapping[str, Any]) -> Manifest:
    parent = fields["parent"]
    return Manifest(
        run_id=fields["run_id"],
        checkpoint=CheckpointId(int(fields["generation"]), int(fields["step"])),
        parent=_parse_folder(parent) if parent is not None else None,
        created_at=fields["created_at"],
        world=fields["world"],
        files=tuple(_file(file) for file in fields["files"]),
        tensors=tuple(_tensor(tensor) for tensor in fields["tensors"]),
        parts=tuple(PartEntry(**part) for part in fields["parts"]),
        config=fields["config"],
        software=fields["software"],
        data=fields["data"],
        metrics=fields["metrics"],
        protects=tuple(_parse_folder(folder) for folder in fields["protects"]),
        parity=tuple(ParityGroup.from_json(group) for group in fields.get("parity", ())),
        format_version=fields["version"],
        root=fields["root"],
    )


def _parse_folder(folder: str) -> CheckpointId:
    checkpoint = parse_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(f"{folder!r} is not the name of a checkpoint")
    return checkpoint


def _file(value: Mapping[str, Any]) -> FileEntry:
    return FileEntry(**{**value, "chunks": tuple(value["chunks"])})


def _tensor(value: Mapping[str, Any]) -> TensorEntry:
    regions = tuple(
        StoredRegion(
            Region(tuple(region["region"]["offsets"]), tuple(region["region"]["lengths"])),
            region["file"],
            region["start"],
            region["size_bytes"],
            region["digest"],
        )
        for region in value["regions"]
    )
    return TensorEntry(**{**value, "shape": tuple(value["shape"]), "regions": regions})


def merge_receipt_files(receipts: Iterable[Receipt]) -> tuple[FileEntry, ...]:
    """Merge the files that ranks stored; a file that several ranks refer to is listed once.

    Raises:
        IntegrityError: Two ranks disagree about a file.
    """
    entry_by_name: dict[str, FileEntry] = {}
    for receipt in receipts:
        for file in receipt.files:
            if entry_by_name.setdefault(file.name, file) != file:
                raise IntegrityError(f"ranks disagree on `{file.name}`", key=file.name)
    return tuple(entry_by_name.values())


def merge_receipt_tensors(receipts: Iterable[Receipt]) -> tuple[TensorEntry, ...]:
    """Merge the regions that ranks wrote into whole tensors, in the order of names.

    Raises:
        IntegrityError: Two ranks disagree about a tensor's dtype or shape, or a region is missing.
    """
    first: dict[str, TensorEntry] = {}
    regions: defaultdict[str, list[StoredRegion]] = defaultdict(list)
    for receipt in receipts:
        for entry in receipt.tensors:
            first_entry = first.setdefault(entry.name, entry)
            if (first_entry.dtype, first_entry.shape, first_entry.part) != (
                entry.dtype,
                entry.shape,
                entry.part,
            ):
                raise IntegrityError(
                    f"ranks disagree on `{entry.name}`: "
                    f"{first_entry.dtype}{list(first_entry.shape)} and, "
                    f"on rank {receipt.rank}, {entry.dtype}{list(entry.shape)}",
                    tensor=entry.name,
                )
            regions[entry.name] += entry.regions
    for tensor in first.values():
        if not covers(tensor.shape, [region.region for region in regions[tensor.name]]):
            raise IntegrityError(f"ranks left holes in `{tensor.name}`", tensor=tensor.name)
    return tuple(replace(first[name], regions=tuple(regions[name])) for name in sorted(first))
