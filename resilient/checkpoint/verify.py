"""Verification of checkpoints, of random samples of stored bytes, and of records beside them.

Bytes that match their digests can still be inconsistent, because of a defect in the writer. The
``deep`` level therefore compares regions of tensors, headers of files, and documents with the
manifest (table of contents).

A sample consists of random chunks (blocks of a file with their own digest), not of files. The
sampled share of the bytes is therefore exact even if a terabyte is in few files. A chunk that
several checkpoints need is read once. A small sample each night covers nearly all chunks within a
year, at a fraction of the cost of full verifications.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from resilient.checkpoint.catalog import (
    committed,
    folders_of,
    lineage,
    read_copy,
    read_manifest,
    trash_of,
)
from resilient.checkpoint.generations import check_mark, list_marks, list_numbers, read_generation
from resilient.checkpoint.refs import list_tags, read_tag
from resilient.checkpoint.restore.read import verify_file
from resilient.checkpoint.restore.reconstruct import can_reconstruct
from resilient.checkpoint.signing import check_contents, check_signature, signature_problem
from resilient.checkpoint.verified_read import fetch, join_names, tensors_hit
from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound, SignatureRefused
from resilient.format.digest import CHUNK_BYTES, damaged_ranges, digest_bytes
from resilient.format.document import RECORD_BYTES_MAX, unseal
from resilient.format.keys import (
    ABILITIES,
    MANIFEST,
    MANIFEST_COPY,
    committed_key,
    generation_key,
    signature_name,
    tag_key,
)
from resilient.format.regions import ITEM_BYTES
from resilient.format.safetensors_file import read_header
from resilient.format.signature import UNSIGNED
from resilient.format.state_json import tensors_of, tree_of
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from random import Random

    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Store

Problem = tuple[str, str]
"""Names of the affected tensors, empty if unknown, and a description of the problem."""


def problems_of(manifest: Manifest, entry: FileEntry, data: bytes) -> list[Problem]:
    """Return all inconsistencies of a file whose bytes match its digests.

    Args:
        manifest: Manifest of the checkpoint.
        entry: Entry of the file.
        data: Content of the file.
    """
    return [
        *_regions(manifest, entry, data),
        *_header(manifest, entry, data),
        *_documents(manifest, entry, data),
    ]


def _regions(manifest: Manifest, entry: FileEntry, data: bytes) -> Iterator[Problem]:
    view = memoryview(data)
    for tensor in manifest.tensors:
        for region in tensor.regions:
            region_bytes = view[region.start : region.start + region.size_bytes]
            if region.file == entry.name and digest_bytes(region_bytes) != region.digest:
                yield tensor.name, f"its region {region.region} differs from what was staged"


def _header(manifest: Manifest, entry: FileEntry, data: bytes) -> Iterator[Problem]:
    """Compare a tensor file's own header with the manifest."""
    if not entry.name.endswith(".safetensors"):
        return
    manifest_entries = [
        (tensor.dtype, list(region.region.lengths), region.start, region.start + region.size_bytes)
        for tensor in manifest.tensors
        for region in tensor.regions
        if region.file == entry.name
    ]
    try:
        header, base = read_header(data, entry.name)
        stated = [
            (value["dtype"], value["shape"], *(base + offset for offset in value["data_offsets"]))
            for name, value in header.items()
            if name != "__metadata__" and value["dtype"] in ITEM_BYTES
        ]
    except (IntegrityError, KeyError, TypeError) as error:
        yield "", f"its header cannot be read ({error})"
        return
    expected_entries, header_entries = (
        sorted(map(repr, manifest_entries)),
        sorted(map(repr, stated)),
    )
    # A checkpoint may need only a part of an older checkpoint's file.
    if (
        not set(expected_entries) <= set(header_entries)
        if entry.origin
        else expected_entries != header_entries
    ):
        yield "", "its header and the manifest disagree"


def _documents(manifest: Manifest, entry: FileEntry, data: bytes) -> Iterator[Problem]:
    """Check the documents in this file against the grammar and the stored tensors."""
    tensor_names = {tensor.name for tensor in manifest.tensors}
    for part in manifest.parts:
        if part.document != entry.name:
            continue
        try:
            unknown_tensors = [
                name for name in tensors_of(tree_of(part, data)) if name not in tensor_names
            ]
        except IntegrityError as error:
            yield "", error.message
            continue
        if unknown_tensors:
            yield unknown_tensors[0], f"part `{part.name}` names a tensor that does not exist"


Level = Literal["quick", "full", "deep"]

BY_ITSELF = "none is needed: resume takes the newest intact checkpoint by itself"
"""Fix of damage while a whole checkpoint exists: no action is needed."""

MISSING = "missing"
"""Problem of a missing file."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem that a verification found.

    Attributes:
        file: File name inside the checkpoint's folder; ``folder/name`` for a file in the folder of
            an older checkpoint that this checkpoint needs.
        tensor: Names of the affected tensors, comma separated; empty if unknown.
        problem: Description of the problem.
        severity: ``damaged`` (resume refuses it) or ``warning`` (resume does not need it).
        start: First byte of the damage in the file.
        stop: Byte after the last damaged one.
        fix: Command or remark that fixes it.
    """

    file: str
    tensor: str
    problem: str
    severity: Literal["damaged", "warning"] = "damaged"
    start: int = 0
    stop: int = 0
    fix: str = BY_ITSELF


def verify(
    store: Store, checkpoint: CheckpointId, level: Level = "full", signing: SigningPolicy = UNSIGNED
) -> list[Finding]:
    """Verify a committed checkpoint and return all problems; an empty list means intact.

    Crash: reads only.

    Args:
        store: Repository.
        checkpoint: Checkpoint to verify.
        level: ``quick`` reads the manifest and checks presence and sizes. ``full`` reads every
            byte. ``deep`` also compares each region, each header of a tensor file and each document
            with the manifest. It also compares the names in documents with the stored tensors.
        signing: Whether a signature is required, and its key.

    Raises:
        KeyNotFound: The checkpoint was never committed.
        IncompatibleCheckpoint: The format is newer.
        StoreError: The store failed, so the state of the checkpoint is unknown.
    """
    try:
        manifest = read_manifest(store, checkpoint)
    except IntegrityError as error:
        manifest_finding = Finding(MANIFEST, "", error.message)
        if copy_problem(store, checkpoint, "full"):
            return [
                replace(manifest_finding, fix=f"{repair_command(store, checkpoint)} --from COPY")
            ]
        return [replace(manifest_finding, fix=repair_command(store, checkpoint))]
    except IncompatibleCheckpoint as error:
        return [Finding(MANIFEST, "", error.message, "warning", fix=error.hint)]
    looks_at_signature = signing.is_required or level != "quick"
    findings = _verify_signature(store, manifest, signing, level) if looks_at_signature else []
    all_findings = damages(store, manifest, level)
    chunks = {
        damage.finding.file: damage.chunks for damage in all_findings if damage.chunks is not None
    }
    fix = repair_command(store, checkpoint)
    repairs = {True: fix, False: f"{fix} --from COPY"}
    findings += [
        replace(damage.finding, fix=repairs[can_reconstruct(manifest, damage.finding.file, chunks)])
        for damage in all_findings
    ]
    problem = copy_problem(store, checkpoint, level) if manifest.parity else ""
    if problem:
        findings.append(Finding(MANIFEST_COPY, "", problem, "warning", fix=fix))
    return findings


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of one file: the chunks and tensors that differ, if known.

    Attributes:
        finding: The damage for people.
        chunks: Numbers of the chunks that differ from the committed chunks. None if all bytes are
            as committed, so that the content was already wrong at the commit.
        tensors: Names of all affected tensors.
    """

    finding: Finding
    chunks: frozenset[int] | None
    tensors: tuple[str, ...] = ()


def damages(store: Store, manifest: Manifest, level: Level) -> list[Damage]:
    """Return the damage of all files of a manifest, parity included.

    Crash: reads only.

    Args:
        store: Repository.
        manifest: Manifest of a checkpoint that is, or was, committed there.
        level: As for :func:`verify`.

    Raises:
        StoreError: The store failed, so the state of the checkpoint is unknown.
    """
    needed_names = manifest.needed
    return [
        damage if entry.name in needed_names else _as_warning(damage)
        for entry in manifest.files
        for damage in _verify_file(store, manifest, entry, level)
    ]


def repair_command(store: Store, checkpoint: CheckpointId) -> str:
    """Return the command that repairs a checkpoint.

    Crash: reads nothing.
    """
    return f"resilient ckpt repair {checkpoint} {shell_quote(store.url)}"


def copy_problem(store: Store, checkpoint: CheckpointId, level: Level) -> str:
    """Return the problem of the second copy of a manifest; empty for none.

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


def _as_warning(damage: Damage) -> Damage:
    """Return damage of a file that no restore reads (parity, or repair data) as a warning."""
    return replace(damage, finding=replace(damage.finding, severity="warning"))


def _verify_file(store: Store, manifest: Manifest, entry: FileEntry, level: Level) -> list[Damage]:
    key = manifest.key(entry.name)
    try:
        size_bytes = store.stat(key).size_bytes
        # A file that is too long is not read, because its real length is unknown.
        if level == "quick" or size_bytes > entry.size_bytes:
            return [] if size_bytes == entry.size_bytes else [_wrong_size(entry, size_bytes)]
        if level == "full" and _is_whole(store, manifest, entry):
            return []
        data = store.get(key)
        if damaged_ranges(data, entry.proof):
            # Read again, as in `checkpoint/verified_read.py`: a bit may have flipped on the way.
            data = store.get(key)
    except KeyNotFound:
        tensors = tuple(tensors_hit(manifest, entry.name, b""))
        finding = Finding(entry.name, join_names(tensors), MISSING, stop=entry.size_bytes)
        return [Damage(finding, frozenset(range(len(entry.chunks))), tensors)]
    ranges = damaged_ranges(data, entry.proof)
    if not ranges:
        problems = problems_of(manifest, entry, data) if level == "deep" else []
        return [
            Damage(Finding(entry.name, tensor, checkpoint), None) for tensor, checkpoint in problems
        ]
    if len(data) != entry.size_bytes:
        problem = f"{len(data)} bytes, committed with {entry.size_bytes}"
    else:
        problem = "content is not what was committed"
    tensors = tuple(tensors_hit(manifest, entry.name, data))
    start, stop = ranges[0][0], ranges[-1][1]
    finding = Finding(entry.name, join_names(tensors), problem, start=start, stop=stop)
    # Appended bytes damage nothing, although they change the end of the last chunk.
    within = damaged_ranges(memoryview(data)[: entry.size_bytes], entry.proof)
    chunks = frozenset(start // CHUNK_BYTES for start, _ in within)
    return [Damage(finding, chunks, tensors)]


def _is_whole(store: Store, manifest: Manifest, entry: FileEntry) -> bool:
    """Return whether a file is as it was committed; if not, the caller reads it to learn more."""
    try:
        verify_file(store, manifest, entry)
    except (IntegrityError, KeyNotFound):
        return False
    return True


def _verify_signature(
    store: Store, manifest: Manifest, signing: SigningPolicy, level: Level
) -> list[Finding]:
    """Check the signature with the key if one is required, else only its own seal."""
    file = signature_name(manifest.root)
    fix = f"resilient ckpt sign {manifest.checkpoint} {shell_quote(store.url)}"
    try:
        signed = check_signature(store, manifest, signing)
    except SignatureRefused as error:
        return [Finding(file, "", error.message, fix=fix)]
    if signed is not None:
        return [] if level == "quick" else _verify_signed(store, manifest, signed)
    problem = signature_problem(store, manifest)
    return [Finding(file, "", problem, "warning", fix=fix)] if problem else []


def _verify_signed(store: Store, manifest: Manifest, signed: Mapping[str, str]) -> list[Finding]:
    """Compare each file with its signed digest; missing files are reported by another check.

    Parity is not signed, because a reconstructed file is compared with its own signed digest.
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


def _wrong_size(entry: FileEntry, size_bytes: int) -> Damage:
    first, last = sorted((size_bytes, entry.size_bytes))
    problem = f"{size_bytes} bytes, committed with {entry.size_bytes}"
    # The file was not read, so its remaining bytes count as intact.
    cut = range(size_bytes // CHUNK_BYTES, len(entry.chunks)) if size_bytes == first else ()
    return Damage(Finding(entry.name, "", problem, start=first, stop=last), frozenset(cut))


_RECORD_FIX = (
    "none here: resume continues from the next older checkpoint; a copy may have the record"
)
_MARK_FIX = "none is needed while a checkpoint exists; the next generation writes its own mark"


def verify_records(store: Store, level: Level = "full") -> list[Finding]:
    """Verify the records beside the checkpoints and return all problems; empty means intact.

    Crash: reads only.

    Args:
        store: Repository.
        level: ``quick`` looks for folders without a manifest that are newer than the newest
            checkpoint. ``full`` also reads every record, mark and tag. ``deep`` also compares them
            with the checkpoints and with each other.

    Raises:
        StoreError: The store failed.
    """
    findings = [*_without_manifest(store)]
    if level == "quick":
        return findings
    findings += _unreadable(store)
    return [*findings, *_contradictions(store)] if level == "deep" else findings


def _without_manifest(store: Store) -> Iterator[Finding]:
    """Find folders that resume skips: newer than all candidates, and not committed.

    A save that was killed or is in progress leaves such a folder. But if it has every file that
    the newest checkpoint wrote, it was most likely committed, and its manifest was deleted.
    """
    folders = folders_of(store)
    newest = max(
        (checkpoint for checkpoint, names in folders.items() if MANIFEST in names), default=None
    )
    if newest is None:
        return
    try:
        manifest = read_manifest(store, newest)
    except (IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        manifest = None
    trash = trash_of(folders)
    for folder in sorted(folder for folder in folders if folder > newest and folder not in trash):
        key, command = (
            folder.manifest_key,
            f"resilient ckpt repair {shell_quote(folder)} {shell_quote(store.url)} --undelete",
        )
        own_files = [entry.name for entry in manifest.files if not entry.origin] if manifest else []
        if manifest is not None and set(own_files) <= set(folders[folder]):
            tensors = join_names([tensor.name for tensor in manifest.tensors])
            problem = "missing, but all files exist: it was deleted or never written"
            yield Finding(key, tensors, problem, fix=command)
        else:
            problem = "missing, and files are missing too: a save is in progress, or was killed"
            yield Finding(
                key, "", problem, "warning", fix="none is needed: the next save cleans up"
            )


def _unreadable(store: Store) -> Iterator[Finding]:
    for number in list_numbers(store):
        key = generation_key(number)
        yield from _read(key, _RECORD_FIX, lambda number=number: read_generation(store, number))  # type: ignore[misc]
    for number in list_marks(store):
        key = committed_key(number)
        yield from _read(key, _MARK_FIX, lambda number=number: check_mark(store, number))  # type: ignore[misc]
    for name in list_tags(store):
        fix = f"resilient ckpt untag {name} {shell_quote(store.url)}"
        yield from _read(tag_key(name), fix, lambda name=name: read_tag(store, name))  # type: ignore[misc]
    fix = f"delete `{ABILITIES}`: the next generation tests the store again"
    yield from _read(ABILITIES, fix, lambda: _read_abilities(store))


def _read_abilities(store: Store) -> object:
    return fetch(store, ABILITIES, lambda data: unseal(data, ABILITIES), RECORD_BYTES_MAX)


def _read(key: str, fix: str, read: Callable[[], object]) -> Iterator[Finding]:
    try:
        read()
    except IntegrityError as error:
        yield Finding(key, "", error.message, fix=fix)
    except KeyNotFound:
        # Deleted meanwhile, or never stored.
        return


def _contradictions(store: Store) -> Iterator[Finding]:
    committed_checkpoints, numbers, marks = committed(store), list_numbers(store), list_marks(store)
    loss_text = lineage(store).lost
    if loss_text:
        yield Finding(
            "generations/",
            "",
            loss_text,
            fix="none here: a copy of the repository may have the checkpoint",
        )
    for number in sorted({checkpoint.generation for checkpoint in committed_checkpoints}):
        if number not in numbers:
            key = generation_key(number)
            yield Finding(key, "", "missing, but its checkpoints exist", fix=_RECORD_FIX)
        if number not in marks:
            problem = "missing, as after a crash between a first commit and its mark"
            yield Finding(committed_key(number), "", problem, "warning", fix=_MARK_FIX)
    for checkpoint in committed_checkpoints:
        yield from _parents(store, checkpoint)
    yield from _dangling_tags(store, committed_checkpoints)


def _parents(store: Store, checkpoint: CheckpointId) -> Iterator[Finding]:
    """Compare the parent that a checkpoint states with the parent in its generation's record."""
    try:
        stated = read_manifest(store, checkpoint).parent
        recorded = read_generation(store, checkpoint.generation).parent
    except (IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        return
    if stated != recorded:
        problem = (
            f"started from {recorded or 'scratch'}, but {checkpoint} states {stated or 'scratch'}"
        )
        yield Finding(generation_key(checkpoint.generation), "", problem, fix=_RECORD_FIX)


def _dangling_tags(store: Store, committed_checkpoints: list[CheckpointId]) -> Iterator[Finding]:
    for name in list_tags(store):
        try:
            checkpoint = read_tag(store, name).checkpoint
        except (IntegrityError, KeyNotFound):
            continue
        if checkpoint not in committed_checkpoints:
            fix = f"resilient ckpt untag {name} {shell_quote(store.url)}"
            yield Finding(
                tag_key(name), "", f"names {checkpoint}, which no longer exists", "warning", fix=fix
            )


@dataclass(slots=True)
class VerifySample:
    """Result of reading a sample.

    Attributes:
        chunks: Number of chunks read.
        of: Number of all chunks.
        size_bytes: Bytes read.
        findings: Problems of each sampled checkpoint.
    """

    chunks: int = 0
    of: int = 0
    size_bytes: int = 0
    findings: dict[CheckpointId, list[Finding]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a stored file, and the checkpoints that need it."""

    entry: FileEntry
    number: int
    manifests: list[Manifest]

    @property
    def start(self) -> int:
        return self.number * CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        return min(CHUNK_BYTES, self.entry.size_bytes - self.start)


def read_sample(
    store: Store,
    manifests: Sequence[Manifest],
    share: float,
    random: Random,
    should_continue: Callable[[int, int], bool],
) -> VerifySample:
    """Read a share of all chunks in random order, until ``should_continue`` returns False.

    Crash: reads only.

    Args:
        store: Repository.
        manifests: Manifests of the checkpoints to sample.
        share: Share of the chunks, rounded up: at least one chunk is read if there is any.
        random: Source of the choice.
        should_continue: Callback with the bytes done and the bytes chosen. The callback returns
            whether to continue.

    Raises:
        StoreError: The store failed, so the state of the checkpoints is unknown.
    """
    chunks = _chunks(manifests)
    chunk_count = -(-len(chunks) * share // 1)
    sampled_chunks = random.sample(chunks, min(len(chunks), int(chunk_count)))
    of_bytes = sum(checkpoint.size_bytes for checkpoint in sampled_chunks)
    sample = VerifySample(
        of=len(chunks), findings={checkpoint.checkpoint: [] for checkpoint in manifests}
    )
    for chunk in sampled_chunks:
        if not should_continue(sample.size_bytes, of_bytes):
            break
        problem = _problem(store, chunk)
        sample.chunks += 1
        sample.size_bytes += chunk.size_bytes
        for manifest in chunk.manifests if problem else ():
            sample.findings[manifest.checkpoint].append(_finding(store, manifest, chunk, problem))
    return sample


def _chunks(manifests: Sequence[Manifest]) -> list[_Chunk]:
    chunks: dict[tuple[str, int], _Chunk] = {}
    for manifest in manifests:
        for entry in manifest.files:
            for number in range(len(entry.chunks)):
                key = manifest.key(entry.name), number
                chunks.setdefault(key, _Chunk(entry, number, [])).manifests.append(manifest)
    return list(chunks.values())


def _problem(store: Store, chunk: _Chunk) -> str:
    key = chunk.manifests[0].key(chunk.entry.name)
    # Read twice, as in `checkpoint/verified_read.py`: a bit may have flipped on the way.
    for _ in range(2):
        try:
            data = store.get_range(key, chunk.start, chunk.size_bytes)
        except KeyNotFound:
            return MISSING
        if digest_bytes(data) == chunk.entry.chunks[chunk.number]:
            return ""
    return "content is not what was committed"


def _finding(store: Store, manifest: Manifest, chunk: _Chunk, problem: str) -> Finding:
    start, stop = chunk.start, chunk.start + chunk.size_bytes
    # Other chunks may be damaged too and were not read, so the full repair is unknown here.
    name = next(
        file.name
        for file in manifest.files
        if manifest.key(file.name) == chunk.manifests[0].key(chunk.entry.name)
    )
    tensor_names = dict.fromkeys(
        tensor.name
        for tensor in manifest.tensors
        for region in tensor.regions
        if region.file == name and region.start < stop and start < region.start + region.size_bytes
    )
    return Finding(
        name,
        join_names(list(tensor_names)),
        problem,
        "damaged" if name in manifest.needed else "warning",
        start,
        stop,
        f"resilient ckpt verify {manifest.checkpoint} {shell_quote(store.url)}",
    )
