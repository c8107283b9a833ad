"""Checkpoint to Findings: what is wrong with it, where, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.digest import damaged_ranges
from resilient.format.dtypes import ITEM_BYTES
from resilient.format.shard import read_header
from resilient.vault.catalog import read_manifest
from resilient.vault.damage import join_names, tensors_hit

if TYPE_CHECKING:
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

Level = Literal["quick", "full", "deep"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong.

    Attributes:
        file: file name inside the checkpoint's folder.
        tensor: names of the tensors hit, comma separated; empty if none is known.
        problem: what is wrong.
        severity: ``damaged`` (resume refuses it) or ``warning``.
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
        return [Finding("manifest.json", "", error.message)]
    except IncompatibleCheckpoint as error:
        return [Finding("manifest.json", "", error.message, "warning", fix=error.hint)]
    findings = []
    for entry in manifest.files:
        findings += _verify_file(store, manifest, entry, level)
    return findings


def _verify_file(store: Store, manifest: Manifest, entry: FileEntry, level: Level) -> list[Finding]:
    key = manifest.checkpoint.key(entry.name)
    try:
        size_bytes = store.stat(key).size_bytes
        data = store.get(key) if level != "quick" else None
        if data is not None and damaged_ranges(data, entry.proof):
            # Once more, as in vault/fetch.py: it may have happened on the way.
            data = store.get(key)
    except KeyNotFound:
        hit = join_names(tensors_hit(manifest, entry.name, b""))
        return [Finding(entry.name, hit, "missing", stop=entry.size_bytes)]
    if data is None:
        return [] if size_bytes == entry.size_bytes else [_resized(entry, size_bytes)]
    ranges = damaged_ranges(data, entry.proof)
    if not ranges:
        return _verify_header(manifest, entry, data) if level == "deep" else []
    if len(data) != entry.size_bytes:
        problem = f"{len(data)} bytes, committed with {entry.size_bytes}"
    else:
        problem = "content is not what was committed"
    hit = join_names(tensors_hit(manifest, entry.name, data))
    return [Finding(entry.name, hit, problem, start=ranges[0][0], stop=ranges[-1][1])]


def _resized(entry: FileEntry, size_bytes: int) -> Finding:
    first, last = sorted((size_bytes, entry.size_bytes))
    problem = f"{size_bytes} bytes, committed with {entry.size_bytes}"
    return Finding(entry.name, "", problem, start=first, stop=last)


def _verify_header(manifest: Manifest, entry: FileEntry, data: bytes) -> list[Finding]:
    """Hold a tensor file's own header against the manifest."""
    placed = [
        (tensor.dtype, list(one.region.lengths), one.start, one.start + one.size_bytes)
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == entry.name
    ]
    if not entry.name.endswith(".safetensors"):
        return []
    try:
        header, base = read_header(data, entry.name)
        stated = [
            (one["dtype"], one["shape"], *(base + offset for offset in one["data_offsets"]))
            for name, one in header.items()
            if name != "__metadata__" and one["dtype"] in ITEM_BYTES
        ]
    except (IntegrityError, KeyError, TypeError) as error:
        return [Finding(entry.name, "", f"its header cannot be read ({error})")]
    if sorted(placed, key=repr) != sorted(stated, key=repr):
        return [Finding(entry.name, "", "its header and the manifest disagree")]
    return []
