"""Checkpoint to Findings: what is wrong with it, where, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    SignatureRefused,
)
from resilient.format.digest import damaged_ranges
from resilient.format.names import signature_name
from resilient.vault.catalog import read_manifest
from resilient.vault.deep import problems_of
from resilient.vault.read import UNSIGNED, join_names, tensors_hit
from resilient.vault.signing import check_contents, check_signature, signature_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.format.signature import Signing
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


def verify(
    store: Store, checkpoint: CheckpointId, level: Level = "full", signing: Signing = UNSIGNED
) -> list[Finding]:
    """Return everything wrong with a committed checkpoint; nothing means intact.

    Crash: reads only.

    Args:
        store: the repository.
        checkpoint: which one.
        level: ``quick`` reads the manifest and asks for presence and sizes; ``full`` reads every
            byte; ``deep`` also holds each region, each tensor file's own header and each document
            against the manifest, and what the documents name against what is there.
        signing: whether a signature is required, and by which key.

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
    looks_at_signature = signing.is_required or level != "quick"
    findings = _verify_signature(store, manifest, signing, level) if looks_at_signature else []
    for entry in manifest.files:
        findings += _verify_file(store, manifest, entry, level)
    return findings


def _verify_file(store: Store, manifest: Manifest, entry: FileEntry, level: Level) -> list[Finding]:
    key = manifest.checkpoint.key(entry.name)
    try:
        size_bytes = store.stat(key).size_bytes
        # What is longer than was committed is not read: nobody knows how long it is.
        if level == "quick" or size_bytes > entry.size_bytes:
            return [] if size_bytes == entry.size_bytes else [_resized(entry, size_bytes)]
        data = store.get(key)
        if damaged_ranges(data, entry.proof):
            # Once more, as in vault/fetch.py: it may have happened on the way.
            data = store.get(key)
    except KeyNotFound:
        hit = join_names(tensors_hit(manifest, entry.name, b""))
        return [Finding(entry.name, hit, "missing", stop=entry.size_bytes)]
    ranges = damaged_ranges(data, entry.proof)
    if not ranges:
        problems = problems_of(manifest, entry, data) if level == "deep" else []
        return [Finding(entry.name, tensor, problem) for tensor, problem in problems]
    if len(data) != entry.size_bytes:
        problem = f"{len(data)} bytes, committed with {entry.size_bytes}"
    else:
        problem = "content is not what was committed"
    hit = join_names(tensors_hit(manifest, entry.name, data))
    return [Finding(entry.name, hit, problem, start=ranges[0][0], stop=ranges[-1][1])]


def _verify_signature(
    store: Store, manifest: Manifest, signing: Signing, level: Level
) -> list[Finding]:
    """Hold the signature against the key if one is required, else only against its own seal."""
    file = signature_name(manifest.root)
    try:
        signed = check_signature(store, manifest, signing)
    except SignatureRefused as error:
        return [Finding(file, "", error.message)]
    if signed is not None:
        return [] if level == "quick" else _verify_signed(store, manifest, signed)
    problem = signature_problem(store, manifest)
    fix = f"if you trust the checkpoint: resilient ckpt sign {manifest.checkpoint} {store.url}"
    return [Finding(file, "", problem, "warning", fix=fix)] if problem else []


def _verify_signed(store: Store, manifest: Manifest, signed: Mapping[str, str]) -> list[Finding]:
    """Hold each file against what was signed of it; what is missing is found elsewhere."""
    findings = []
    for entry in manifest.files:
        key = manifest.checkpoint.key(entry.name)
        try:
            if store.stat(key).size_bytes == entry.size_bytes:
                check_contents(manifest.checkpoint, signed, {entry.name: store.get(key)})
        except KeyNotFound:
            continue
        except SignatureRefused as error:
            findings.append(Finding(entry.name, "", error.message))
    return findings


def _resized(entry: FileEntry, size_bytes: int) -> Finding:
    first, last = sorted((size_bytes, entry.size_bytes))
    problem = f"{size_bytes} bytes, committed with {entry.size_bytes}"
    return Finding(entry.name, "", problem, start=first, stop=last)
