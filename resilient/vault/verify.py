"""Checkpoint to Findings: what is wrong with it, where, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.digest import CHUNK_BYTES, damaged_ranges
from resilient.format.dtypes import ITEM_BYTES
from resilient.format.names import MANIFEST, MANIFEST_COPY
from resilient.format.shard import read_header
from resilient.vault.catalog import read_copy, read_manifest
from resilient.vault.damage import join_names, tensors_hit
from resilient.vault.mend import can_mend

if TYPE_CHECKING:
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

Level = Literal["quick", "full", "deep"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong.

    Attributes:
        file: file name inside the checkpoint's folder; ``folder/name`` of a file that an older
            one wrote and that this one needs.
        tensor: names of the tensors hit, comma separated; empty if none is known.
        problem: what is wrong.
        severity: ``damaged`` (resume refuses it) or ``warning`` (resume does not need it).
        start: first byte of the damage in the file.
        stop: the byte after its last.
        fix: what would mend it.
    """

    file: str
    tensor: str
    problem: str
    severity: Literal["damaged", "warning"] = "damaged"
    start: int = 0
    stop: int = 0
    fix: str = "resume takes the newest whole checkpoint by itself"


def verify(store: Store, checkpoint: CheckpointId, level: Level = "full") -> list[Finding]:
    """Return everything wrong with a committed checkpoint; nothing means intact.

    Crash: reads only.

    Args:
        store: the repository.
        checkpoint: which one.
        level: ``quick`` reads the manifest and asks for presence and sizes; ``full`` reads every
            byte; ``deep`` also opens every tensor file and holds its header against the manifest.

    Raises:
        KeyNotFound: the checkpoint was never committed.
        IncompatibleCheckpoint: a newer format.
        StoreError: the store failed, which says nothing about the checkpoint.
    """
    try:
        manifest = read_manifest(store, checkpoint)
    except IntegrityError as error:
        lost = Finding(MANIFEST, "", error.message)
        if copy_problem(store, checkpoint, "full"):
            return [lost]
        return [replace(lost, fix=repair_command(store, checkpoint))]
    except IncompatibleCheckpoint as error:
        return [Finding(MANIFEST, "", error.message, "warning", fix=error.hint)]
    found = damages(store, manifest, level)
    chunks = {one.finding.file: one.chunks for one in found if one.chunks is not None}
    fix = repair_command(store, checkpoint)
    findings = [
        replace(one.finding, fix=fix)
        if can_mend(manifest, one.finding.file, chunks)
        else one.finding
        for one in found
    ]
    problem = copy_problem(store, checkpoint, level) if manifest.parity else ""
    if problem:
        findings.append(Finding(MANIFEST_COPY, "", problem, "warning", fix=fix))
    return findings


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with one file, as closely as it is known.

    Attributes:
        finding: the same for people.
        chunks: numbers of the chunks that are not what was committed; None if all bytes are what
            was committed, and it was wrong already then.
        tensors: names of all tensors hit.
    """

    finding: Finding
    chunks: frozenset[int] | None
    tensors: tuple[str, ...] = ()


def damages(store: Store, manifest: Manifest, level: Level) -> list[Damage]:
    """Return what is wrong with the files of a manifest, parity included.

    Crash: reads only.

    Args:
        store: the repository.
        manifest: of a checkpoint that is committed there, or was.
        level: as for :func:`verify`.

    Raises:
        StoreError: the store failed, which says nothing about the checkpoint.
    """
    found = [_verify_file(store, manifest, entry, level) for entry in manifest.files]
    needed = manifest.needed
    return [
        one if one.finding.file in needed else _lighter(one) for one in found if one is not None
    ]


def repair_command(store: Store, checkpoint: CheckpointId) -> str:
    """Return what to type to mend a checkpoint.

    Crash: reads nothing.
    """
    return f"resilient ckpt repair {checkpoint} {store.url}"


def copy_problem(store: Store, checkpoint: CheckpointId, level: Level) -> str:
    """Return what is wrong with the second copy of a manifest; empty for nothing.

    Crash: reads only.
    """
    try:
        if level == "quick":
            store.stat(checkpoint.copy_key)
        else:
            read_copy(store, checkpoint)
    except KeyNotFound:
        return "missing"
    except (IntegrityError, IncompatibleCheckpoint) as error:
        return error.message
    return ""


def _lighter(damage: Damage) -> Damage:
    """Return damage of what no restore reads: parity, or what only serves to repair others."""
    return replace(damage, finding=replace(damage.finding, severity="warning"))


def _verify_file(store: Store, manifest: Manifest, entry: FileEntry, level: Level) -> Damage | None:
    key = manifest.key(entry.name)
    try:
        size_bytes = store.stat(key).size_bytes
        data = store.get(key) if level != "quick" else None
        if data is not None and damaged_ranges(data, entry.proof):
            # Once more, as in vault/fetch.py: it may have happened on the way.
            data = store.get(key)
    except KeyNotFound:
        hit = tuple(tensors_hit(manifest, entry.name, b""))
        finding = Finding(entry.name, join_names(hit), "missing", stop=entry.size_bytes)
        return Damage(finding, frozenset(range(len(entry.chunks))), hit)
    if data is None:
        return None if size_bytes == entry.size_bytes else _resized(entry, size_bytes)
    ranges = damaged_ranges(data, entry.proof)
    if not ranges:
        problem = _header_problem(manifest, entry, data) if level == "deep" else ""
        return Damage(Finding(entry.name, "", problem), None) if problem else None
    if len(data) != entry.size_bytes:
        problem = f"{len(data)} bytes, committed with {entry.size_bytes}"
    else:
        problem = "content is not what was committed"
    hit = tuple(tensors_hit(manifest, entry.name, data))
    start, stop = ranges[0][0], ranges[-1][1]
    finding = Finding(entry.name, join_names(hit), problem, start=start, stop=stop)
    # What was appended damages nothing, although the last chunk ends elsewhere with it.
    within = damaged_ranges(memoryview(data)[: entry.size_bytes], entry.proof)
    chunks = frozenset(start // CHUNK_BYTES for start, _ in within)
    return Damage(finding, chunks, hit)


def _resized(entry: FileEntry, size_bytes: int) -> Damage:
    first, last = sorted((size_bytes, entry.size_bytes))
    problem = f"{size_bytes} bytes, committed with {entry.size_bytes}"
    # Nobody has read it: what is still there counts as whole.
    cut = range(size_bytes // CHUNK_BYTES, len(entry.chunks)) if size_bytes == first else ()
    return Damage(Finding(entry.name, "", problem, start=first, stop=last), frozenset(cut))


def _header_problem(manifest: Manifest, entry: FileEntry, data: bytes) -> str:
    """Hold a tensor file's own header against the manifest; return what is wrong with it."""
    placed = [
        (tensor.dtype, tuple(one.region.lengths), one.start, one.start + one.size_bytes)
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == entry.name
    ]
    if not entry.name.endswith(".safetensors"):
        return ""
    try:
        header, base = read_header(data, entry.name)
        stated = [
            (one["dtype"], tuple(one["shape"]), *(base + offset for offset in one["data_offsets"]))
            for name, one in header.items()
            if name != "__metadata__" and one["dtype"] in ITEM_BYTES
        ]
    except (IntegrityError, KeyError, TypeError) as error:
        return f"its header cannot be read ({error})"
    wanted, there = sorted(map(repr, placed)), sorted(map(repr, stated))
    # Of an older checkpoint's file a part may be all that is needed.
    if not set(wanted) <= set(there) if entry.origin else wanted != there:
        return "its header and the manifest disagree"
    return ""
