"""Manifest, consistency checks, merging of rank receipts.

Whether a manifest that was read makes sense: names, places, sizes.

The Manifest: a checkpoint's table of contents; its presence is the commit.

Receipts of all ranks, joined into what one manifest says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
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
    """Refuse what contradicts itself, so that nothing that reads a manifest has to doubt it.

    Args:
        manifest: as it was decoded.
        chunk_bytes: the length of chunks that it states.

    Raises:
        ValueError: names climb, offsets leave files, or tensors have holes.
        KeyError: a region lies in a file that is not listed.
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
    _require(len({one.name for one in manifest.tensors}) == len(manifest.tensors), "tensor names")
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
    check_groups(manifest.parity, sizes)


def _may_be_listed(name: str, manifest: Manifest) -> bool:
    """Say whether it names a file of our own or, since version 2, of an older checkpoint.

    Never of a newer one: so references cannot run in a ring, and rotation knows how far the
    needs of a manifest that it cannot read may reach.
    """
    origin = origin_of(name)
    if origin is None:
        return is_file_name(name)
    return manifest.format_version > 1 and origin < manifest.checkpoint


def _check_tensor(tensor: TensorEntry, sizes: Mapping[str, int]) -> None:
    _require(
        covers(tensor.shape, [one.region for one in tensor.regions]), f"holes in {tensor.name}"
    )
    for one in tensor.regions:
        _require(
            one.size_bytes == one.region.size * ITEM_BYTES[tensor.dtype]
            and 0 <= one.start <= one.start + one.size_bytes <= sizes[one.file],
            f"place of {tensor.name}{one.region}",
        )


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(what)


FORMAT = "resilient-checkpoint"
FORMAT_VERSION = 2
READABLE = (1, 2)
"""Versions that this release reads. The second knows files of older checkpoints, and parity."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Proof of one stored file.

    Attributes:
        name: file name inside the checkpoint's folder; of a file that lies in an older
            checkpoint's, ``folder/name``.
        size_bytes: its length.
        digest: digest over the chunk digests.
        chunks: digest of each chunk of ``CHUNK_BYTES``.
        rank: who wrote it.
    """

    name: str
    size_bytes: int
    digest: str
    chunks: tuple[str, ...]
    rank: int

    @property
    def proof(self) -> FileDigest:
        """The digests, to hold content against."""
        return FileDigest(self.size_bytes, self.digest, self.chunks)

    @property
    def origin(self) -> CheckpointId | None:
        """The older checkpoint in whose folder the file lies; None for one of our own."""
        return origin_of(self.name)


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """Where a box of a tensor lies, row-major.

    Attributes:
        region: the box.
        file: name of the file that holds it, as :class:`FileEntry` spells it.
        start: its first byte in the file.
        size_bytes: its length.
        digest: of its bytes alone, so damage names the tensor; empty before it was written.
    """

    region: Region
    file: str
    start: int
    size_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: what it is, and where its regions lie.

    Attributes:
        name: the part's name, a slash, and the path inside the part.
        part: the part that it belongs to.
        dtype: a name of :data:`resilient.format.regions.ITEM_BYTES`.
        shape: the global shape.
        regions: boxes that hold every element exactly once.
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
    """One part: ``scope`` is ``replicated`` or ``rank``; ``document`` holds its plain values."""

    name: str
    scope: str
    document: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank stored."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    parts: tuple[PartEntry, ...] = ()
    parity: tuple[ParityGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value for the agreement among ranks."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Receipt:
        """Return the receipt that ``to_json`` described.

        Raises:
            IntegrityError: it is none.
        """
        try:
            check_receipt(value)
            return Receipt(
                value["rank"],
                tuple(_file(one) for one in value["files"]),
                tuple(_tensor(one) for one in value["tensors"]),
                tuple(PartEntry(**one) for one in value["parts"]),
                tuple(ParityGroup.from_json(one) for one in value["parity"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"this is no receipt of a rank: {error}") from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a checkpoint says of itself.

    Attributes:
        run_id: names the run through all of its lives.
        checkpoint: generation and step.
        parent: the checkpoint that this life began from, None when from scratch.
        created_at: UTC, ISO 8601.
        world: ``{"size": ranks that wrote it, "strategy": how the model was parallel}``.
        files: every file that it needs, the manifest itself left out.
        tensors: every tensor.
        parts: every part.
        config: the resolved configuration of the run.
        software: versions that wrote it.
        data: the data position.
        metrics: what was measured at this step, finite numbers by name.
        protects: checkpoints that the run wants kept, for example its best.
        parity: which files protect each other.
        root: SHA-256 of the document, known once it was encoded or decoded.
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
        """Bytes of all files that it needs, the manifest itself not counted."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def own_bytes(self) -> int:
        """Bytes of the files in its own folder; the rest lies in those of older checkpoints."""
        return sum(entry.size_bytes for entry in self.files if entry.origin is None)

    @property
    def needed(self) -> frozenset[str]:
        """Names of the files that a restore may read: all but parity, and what it needs alone."""
        regions = (one.file for tensor in self.tensors for one in tensor.regions)
        return frozenset({*regions, *(part.document for part in self.parts)})

    def key(self, name: str) -> str:
        """Return the store's key of a file that the manifest lists."""
        return key_of_file(self.checkpoint, name)

    def file(self, name: str) -> FileEntry:
        """Return the entry of a file; the name must be one of ours."""
        return next(entry for entry in self.files if entry.name == name)


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
            "files": [asdict(one) for one in manifest.files],
            "tensors": [asdict(one) for one in manifest.tensors],
            "parts": [asdict(one) for one in manifest.parts],
            "config": dict(manifest.config),
            "software": dict(manifest.software),
            "data": dict(manifest.data),
            "metrics": dict(manifest.metrics),
            "protects": [one.folder for one in manifest.protects],
            **({"parity": [one.to_json() for one in manifest.parity]} if manifest.parity else {}),
        }
    )


def decode(data: bytes, key: str) -> Manifest:
    """Return the manifest in ``data``, proved and checked.

    Args:
        data: the manifest's bytes.
        key: its key in the store; the folder must be the one that the manifest names.

    Raises:
        IntegrityError: the bytes are damaged, or the content contradicts itself.
        IncompatibleCheckpoint: a format or version that this release does not read.
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
        parent=_named(parent) if parent is not None else None,
        created_at=fields["created_at"],
        world=fields["world"],
        files=tuple(_file(one) for one in fields["files"]),
        tensors=tuple(_tensor(one) for one in fields["tensors"]),
        parts=tuple(PartEntry(**one) for one in fields["parts"]),
        config=fields["config"],
        software=fields["software"],
        data=fields["data"],
        metrics=fields["metrics"],
        protects=tuple(_named(one) for one in fields["protects"]),
        parity=tuple(ParityGroup.from_json(one) for one in fields.get("parity", ())),
        format_version=fields["version"],
        root=fields["root"],
    )


def _named(folder: str) -> CheckpointId:
    checkpoint = parse_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(f"{folder!r} names no checkpoint")
    return checkpoint


def _file(value: Mapping[str, Any]) -> FileEntry:
    return FileEntry(**{**value, "chunks": tuple(value["chunks"])})


def _tensor(value: Mapping[str, Any]) -> TensorEntry:
    regions = tuple(
        StoredRegion(
            Region(tuple(one["region"]["offsets"]), tuple(one["region"]["lengths"])),
            one["file"],
            one["start"],
            one["size_bytes"],
            one["digest"],
        )
        for one in value["regions"]
    )
    return TensorEntry(**{**value, "shape": tuple(value["shape"]), "regions": regions})


def merge_receipt_files(receipts: Iterable[Receipt]) -> tuple[FileEntry, ...]:
    """Join the files that ranks stored; what several refer to stands there once.

    Raises:
        IntegrityError: two ranks disagree on a file.
    """
    merged: dict[str, FileEntry] = {}
    for receipt in receipts:
        for one in receipt.files:
            if merged.setdefault(one.name, one) != one:
                raise IntegrityError(f"ranks disagree on `{one.name}`", key=one.name)
    return tuple(merged.values())


def merge_receipt_tensors(receipts: Iterable[Receipt]) -> tuple[TensorEntry, ...]:
    """Join the regions that ranks wrote into whole tensors, in the order of names.

    Raises:
        IntegrityError: two ranks disagree on a tensor's dtype or shape, or a part is missing.
    """
    first: dict[str, TensorEntry] = {}
    regions: defaultdict[str, list[StoredRegion]] = defaultdict(list)
    for receipt in receipts:
        for one in receipt.tensors:
            known = first.setdefault(one.name, one)
            if (known.dtype, known.shape, known.part) != (one.dtype, one.shape, one.part):
                raise IntegrityError(
                    f"ranks disagree on `{one.name}`: {known.dtype}{list(known.shape)} and, "
                    f"on rank {receipt.rank}, {one.dtype}{list(one.shape)}",
                    tensor=one.name,
                )
            regions[one.name] += one.regions
    for tensor in first.values():
        if not covers(tensor.shape, [one.region for one in regions[tensor.name]]):
            raise IntegrityError(f"ranks left holes in `{tensor.name}`", tensor=tensor.name)
    return tuple(replace(first[name], regions=tuple(regions[name])) for name in sorted(first))
