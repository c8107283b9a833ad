"""Checkpoint to Findings: what is wrong with it, where, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    SignatureRefused,
)
from resilient.format.digest import CHUNK_BYTES, damaged_ranges
from resilient.format.names import MANIFEST, MANIFEST_COPY, signature_name
from resilient.format.signature import UNSIGNED
from resilient.showing import quoted
from resilient.vault.access.damage import join_names, tensors_hit
from resilient.vault.health.deep import problems_of
from resilient.vault.reading.bulk import prove_file
from resilient.vault.reading.mend import can_mend
from resilient.vault.registry.catalog import read_copy, read_manifest
from resilient.vault.registry.signing import check_contents, check_signature, signature_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.format.signature import Signing
    from resilient.storage.store import Store

Level = Literal["quick", "full", "deep"]

BY_ITSELF = "none is needed: resume takes the newest whole checkpoint by itself"
"""What mends damage while a whole checkpoint is there: nothing that anybody has to do."""

MISSING = "missing"
"""The problem of a file that is not there."""


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
    fix: str = BY_ITSELF


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
        lost = Finding(MANIFEST, "", error.message)
        if copy_problem(store, checkpoint, "full"):
            return [replace(lost, fix=f"{repair_command(store, checkpoint)} --from COPY")]
        return [replace(lost, fix=repair_command(store, checkpoint))]
    except IncompatibleCheckpoint as error:
        return [Finding(MANIFEST, "", error.message, "warning", fix=error.hint)]
    looks_at_signature = signing.is_required or level != "quick"
    findings = _verify_signature(store, manifest, signing, level) if looks_at_signature else []
    found = damages(store, manifest, level)
    chunks = {one.finding.file: one.chunks for one in found if one.chunks is not None}
    fix = repair_command(store, checkpoint)
    ways = {True: fix, False: f"{fix} --from COPY"}
    findings += [
        replace(one.finding, fix=ways[can_mend(manifest, one.finding.file, chunks)])
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
    needed = manifest.needed
    return [
        one if entry.name in needed else _lighter(one)
        for entry in manifest.files
        for one in _verify_file(store, manifest, entry, level)
    ]


def repair_command(store: Store, checkpoint: CheckpointId) -> str:
    """Return what to type to mend a checkpoint.

    Crash: reads nothing.
    """
    return f"resilient ckpt repair {checkpoint} {quoted(store.url)}"


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
        return MISSING
    except (IntegrityError, IncompatibleCheckpoint) as error:
        return error.message
    return ""


def _lighter(damage: Damage) -> Damage:
    """Return damage of what no restore reads: parity, or what only serves to repair others."""
    return replace(damage, finding=replace(damage.finding, severity="warning"))


def _verify_file(store: Store, manifest: Manifest, entry: FileEntry, level: Level) -> list[Damage]:
    key = manifest.key(entry.name)
    try:
        size_bytes = store.stat(key).size_bytes
        # What is longer than was committed is not read: nobody knows how long it is.
        if level == "quick" or size_bytes > entry.size_bytes:
            return [] if size_bytes == entry.size_bytes else [_resized(entry, size_bytes)]
        if level == "full" and _is_whole(store, manifest, entry):
            return []
        data = store.get(key)
        if damaged_ranges(data, entry.proof):
            # Once more, as in vault/access/fetch.py: it may have happened on the way.
            data = store.get(key)
    except KeyNotFound:
        hit = tuple(tensors_hit(manifest, entry.name, b""))
        finding = Finding(entry.name, join_names(hit), MISSING, stop=entry.size_bytes)
        return [Damage(finding, frozenset(range(len(entry.chunks))), hit)]
    ranges = damaged_ranges(data, entry.proof)
    if not ranges:
        problems = problems_of(manifest, entry, data) if level == "deep" else []
        return [Damage(Finding(entry.name, tensor, one), None) for tensor, one in problems]
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
    return [Damage(finding, chunks, hit)]


def _is_whole(store: Store, manifest: Manifest, entry: FileEntry) -> bool:
    """Say whether a file is as it was committed; what else it is, its whole content tells."""
    try:
        prove_file(store, manifest, entry)
    except (IntegrityError, KeyNotFound):
        return False
    return True


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
    fix = f"resilient ckpt sign {manifest.checkpoint} {quoted(store.url)}"
    return [Finding(file, "", problem, "warning", fix=fix)] if problem else []


def _verify_signed(store: Store, manifest: Manifest, signed: Mapping[str, str]) -> list[Finding]:
    """Hold each file against what was signed of it; what is missing is found elsewhere.

    Parity is not signed: what is computed back from it is held against what was signed of the file.
    """
    findings = []
    for entry in manifest.files:
        key = manifest.key(entry.name)
        if entry.name not in manifest.needed:
            continue
        try:
            if store.stat(key).size_bytes == entry.size_bytes:
                check_contents(manifest, signed, {entry.name: store.get(key)})
        except KeyNotFound:
            continue
        except SignatureRefused as error:
            findings.append(Finding(entry.name, "", error.message))
    return findings


def _resized(entry: FileEntry, size_bytes: int) -> Damage:
    first, last = sorted((size_bytes, entry.size_bytes))
    problem = f"{size_bytes} bytes, committed with {entry.size_bytes}"
    # Nobody has read it: what is still there counts as whole.
    cut = range(size_bytes // CHUNK_BYTES, len(entry.chunks)) if size_bytes == first else ()
    return Damage(Finding(entry.name, "", problem, start=first, stop=last), frozenset(cut))
