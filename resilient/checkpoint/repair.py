"""Repair of damaged checkpoints: the plan (reads only) and its execution.

Every replacement is verified against the manifest (table of contents). One atomic put replaces each
file under its key. The manifest is replaced last. The damaged file is first copied under another
name in the same folder, because only a person can decide that the file is worthless. Readers ignore
the copy, and retention deletes the copy with its checkpoint. A repair therefore never increases the
damage. A repair may be interrupted at any point and run again.

Intact bytes come from parity (redundant data in the checkpoint), other repositories, and other
checkpoints of the run. A chunk is a block of a file with its own digest. An equal digest in another
step means the same bytes, for example of frozen weights.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed, folders_of, read_manifest, trash_of
from resilient.checkpoint.generations import create_record, read_generation
from resilient.checkpoint.refs import absent
from resilient.checkpoint.restore.reconstruct import can_reconstruct, find_chunk, reconstruct_file
from resilient.checkpoint.verified_read import fetch, tensors_hit
from resilient.checkpoint.verify import copy_problem, damages
from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound, NothingToResume
from resilient.format.digest import CHUNK_BYTES, damaged_ranges, digest_bytes
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.keys import MANIFEST, MANIFEST_COPY, aside_name
from resilient.format.manifest import decode
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.checkpoint.verify import Damage
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store


def replace_damaged_file(store: Store, checkpoint: CheckpointId, key: str, data: bytes) -> str:
    """Replace a damaged file by an intact one and keep a copy of the damaged file in the folder.

    Crash: the folder has the damaged file, perhaps with a copy, or the intact file with the copy.
        The copy is named by its content, so a second run makes no second copy.

    Args:
        store: Repository.
        checkpoint: Checkpoint whose folder keeps the copy.
        key: Key of the file; it may be in the folder of an older checkpoint.
        data: Verified content.

    Returns:
        Key of the copy; empty if there was nothing to keep.

    Raises:
        StoreError: The store failed; the damaged file is unchanged, or the whole file exists.
    """
    try:
        damaged_data = store.get(key)
    except KeyNotFound:
        damaged_data = data
    kept_key = ""
    if damaged_data != data:
        kept_key = checkpoint.key(aside_name(key.rpartition("/")[2], digest_bytes(damaged_data)))
        store.put(kept_key, damaged_data)
    store.put(key, data)
    return kept_key


class SiblingSource:
    """Another checkpoint as a source of chunks, read by the keys of the damaged checkpoint.

    Attributes:
        url: Name for people.
    """

    def __init__(self, store: Store, damaged: Manifest, other: Manifest) -> None:
        self.url = str(other.checkpoint)
        self._store, self._sibling = store, other
        self._names = {damaged.key(file.name): file.name for file in damaged.files}
        self._entries = {file.name: file for file in other.files}

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return bytes of the file of the same name in the other checkpoint.

        Raises:
            KeyNotFound: The other checkpoint has no such file.
            StoreError: The file could not be read.
        """
        entry = self._entries.get(self._names.get(key, ""))
        if entry is None:
            raise KeyNotFound(f"no `{key}` in {self.url}", key=key)
        return self._store.get_range(self._sibling.key(entry.name), start, length)

    def may_have(self, entry: FileEntry, number: int) -> bool:
        """Return whether the manifest of the other checkpoint lists the same chunk."""
        sibling_entry = self._entries.get(entry.name)
        return sibling_entry is not None and entry.chunks[number] == _chunk(sibling_entry, number)


def siblings_of(store: Store, manifest: Manifest) -> list[SiblingSource]:
    """Return the other checkpoints of a repository that share a chunk with this one.

    Crash: reads only.
    """
    siblings = []
    for checkpoint in committed(store):
        if checkpoint == manifest.checkpoint:
            continue
        with suppress(IntegrityError, KeyNotFound, IncompatibleCheckpoint):
            sibling = SiblingSource(store, manifest, read_manifest(store, checkpoint))
            if any(_shares(sibling, file) for file in manifest.files):
                siblings.append(sibling)
    return siblings


def _shares(other: SiblingSource, entry: FileEntry) -> bool:
    return any(other.may_have(entry, number) for number in range(len(entry.chunks)))


def _chunk(entry: FileEntry, number: int) -> str | None:
    return entry.chunks[number] if number < len(entry.chunks) else None


COPY = "its second copy"
PARITY = "parity"
OWN_BYTES = "its own first bytes"


@dataclass(frozen=True, slots=True)
class RepairStep:
    """File that can be repaired.

    Attributes:
        file: Name.
        problem: Current damage.
        source: Source of its bytes.
    """

    file: str
    problem: str
    source: str


@dataclass(frozen=True, slots=True)
class UnrepairableFile:
    """File that cannot be repaired.

    Attributes:
        file: Name.
        problem: Damage.
        start: First byte of the damage.
        stop: Byte after the last damaged one.
        tensors: Names of all tensors with bytes there.
    """

    file: str
    problem: str
    start: int = 0
    stop: int = 0
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Plan of a repair, with the repairable and the unrepairable files.

    Attributes:
        checkpoint: Checkpoint to repair.
        manifest: Its manifest from any source; None if it is lost.
        manifest_bytes: Manifest as stored, to be put; None if the manifest is whole.
        fixes: Files that can be repaired, in the order of writing.
        losses: Files that cannot be repaired.
        is_gone: Whether the checkpoint lost its manifest, which the repair restores.
    """

    checkpoint: CheckpointId
    manifest: Manifest | None
    manifest_bytes: bytes | None
    fixes: tuple[RepairStep, ...]
    losses: tuple[UnrepairableFile, ...]
    is_gone: bool = False

    @property
    def is_whole(self) -> bool:
        """True if resume can use the checkpoint after the repair."""
        needed_files = self.manifest.needed if self.manifest else frozenset({MANIFEST})
        return not any(loss.file in needed_files for loss in self.losses)

    @property
    def lost_tensors(self) -> tuple[str, ...]:
        """Names of tensors with lost bytes."""
        return tuple(sorted({name for loss in self.losses for name in loss.tensors}))

    @property
    def whole_tensors(self) -> tuple[str, ...]:
        """Names of tensors that are whole, or will be after the repair."""
        tensors = self.manifest.tensors if self.manifest else ()
        lost_names = set(self.lost_tensors)
        return tuple(tensor.name for tensor in tensors if tensor.name not in lost_names)

    @property
    def parts(self) -> dict[str, bool]:
        """True by name of a part if its tensors and plain values are whole, or will be."""
        manifest = self.manifest
        if manifest is None:
            return {}
        damaged_parts = {
            tensor.part for tensor in manifest.tensors if tensor.name in set(self.lost_tensors)
        }
        documents = {loss.file for loss in self.losses}
        return {
            part.name: part.name not in damaged_parts and part.document not in documents
            for part in manifest.parts
        }


def plan_repair(
    store: Store,
    checkpoint: CheckpointId,
    stores: Sequence[Store] = (),
    *,
    undelete: bool = False,
) -> RepairPlan:
    """Plan the repair of a checkpoint; reads every byte of it.

    Crash: reads only.

    Args:
        store: Repository.
        checkpoint: Checkpoint to repair.
        stores: Repositories that may have the same checkpoint.
        undelete: Also repair a checkpoint without a manifest, which a person or retention has
            usually deleted.

    Raises:
        NothingToResume: The checkpoint has no manifest, and ``undelete`` was not given or found no
            copy.
        IncompatibleCheckpoint: The format is newer.
        StoreError: A store failed, so the state of the checkpoint is unknown.
    """
    manifest, data, fixes = _manifest(store, checkpoint, stores, undelete=undelete)
    if manifest is None:
        return RepairPlan(
            checkpoint, None, None, (), (UnrepairableFile(MANIFEST, "damaged, and no copy"),)
        )
    damaged_files = [
        _with_first_bytes(store, manifest, damage) for damage in damages(store, manifest, "full")
    ]
    sources: list[Store | SiblingSource] = [*stores]
    sources += siblings_of(store, manifest) if damaged_files else []
    missing_chunks = {
        damage.finding.file: _missing_in_sources(damage, manifest, sources)
        for damage in damaged_files
    }
    losses = []
    for damage in damaged_files:
        name, problem = damage.finding.file, damage.finding.problem
        if can_reconstruct(manifest, name, missing_chunks):
            fixes = [
                *fixes,
                RepairStep(
                    name,
                    problem,
                    _source(
                        damage,
                        missing_chunks[name],
                        _sources_with_chunks(damage, manifest, sources),
                    ),
                ),
            ]
        else:
            span = damage.finding
            losses.append(UnrepairableFile(name, problem, span.start, span.stop, damage.tensors))
    problem = copy_problem(store, checkpoint, "full") if manifest.parity else ""
    if problem:
        fixes = [*fixes, RepairStep(MANIFEST_COPY, problem, "the manifest")]
    # Write the manifest last, as in a save, because all files that it names must be stored before.
    fixes = sorted(fixes, key=lambda repair: repair.file == MANIFEST)
    is_missing = data is not None and not _is_committed(store, checkpoint)
    return RepairPlan(checkpoint, manifest, data, tuple(fixes), tuple(losses), is_missing)


def apply_repair(store: Store, plan: RepairPlan, stores: Sequence[Store] = ()) -> dict[str, str]:
    """Put every repairable file, verified; restore a deleted checkpoint only as a whole.

    Crash: each file is unchanged, or intact with a copy of the damaged version; run the repair
        again to continue.

    Args:
        store: Repository.
        plan: Result of :func:`plan_repair` for this repository.
        stores: As for the plan.

    Returns:
        Key of the copy of the damaged version by file name, without the files that were missing.

    Raises:
        NothingToResume: The checkpoint was deleted meanwhile; no file was put since.
        IntegrityError: The damage has grown since the plan was made.
        StoreError: A store failed.
    """
    manifest, checkpoint = plan.manifest, plan.checkpoint
    kept_keys: dict[str, str] = {}
    if manifest is None or (plan.is_gone and not plan.is_whole):
        return kept_keys
    sources: list[Store | SiblingSource] = [store, *stores, *siblings_of(store, manifest)]
    for fix in plan.fixes:
        if not plan.is_gone and not _is_committed(store, checkpoint):
            raise NothingToResume(
                f"{checkpoint} was deleted while it was repaired",
                hint=f"resilient ckpt ls {shell_quote(store.url)}",
            )
        key, data = _repaired_content(store, sources, plan, fix.file)
        if plan.is_gone and fix.file == MANIFEST:
            create_record(store, key, data)
            continue
        kept_key = replace_damaged_file(store, checkpoint, key, data)
        if kept_key:
            kept_keys[fix.file] = kept_key
    return kept_keys


def _repaired_content(
    store: Store, sources: Sequence[Store | SiblingSource], plan: RepairPlan, file: str
) -> tuple[str, bytes]:
    """Return the key of a file that a plan repairs, and its verified content."""
    manifest = plan.manifest
    if manifest is not None and file not in (MANIFEST, MANIFEST_COPY):
        return manifest.key(file), reconstruct_file(sources, manifest, manifest.file(file))
    return plan.checkpoint.key(file), plan.manifest_bytes or _bytes_of(store, plan.checkpoint)


def _is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def _manifest(
    store: Store, checkpoint: CheckpointId, stores: Sequence[Store], *, undelete: bool
) -> tuple[Manifest | None, bytes | None, list[RepairStep]]:
    """Return the manifest; if it has to be replaced, also its bytes and the repair step."""
    try:
        return read_manifest(store, checkpoint), None, []
    except IntegrityError as error:
        problem = error.message
    except KeyNotFound as error:
        problem = "gone"
        if not undelete:
            raise _no_manifest_error(store, checkpoint) from error
    for data, source in _copies(store, checkpoint, stores):
        manifest = decode(data, checkpoint.manifest_key)
        return manifest, data, [RepairStep(MANIFEST, problem, source)]
    if problem == "gone":
        raise _no_manifest_error(store, checkpoint)
    return None, None, []


def _no_manifest_error(store: Store, checkpoint: CheckpointId) -> NothingToResume:
    if checkpoint in trash_of(folders_of(store)):
        return absent(store, str(checkpoint))
    has_copy = not copy_problem(store, checkpoint, "full")
    command = f"resilient ckpt repair {checkpoint} {shell_quote(store.url)} --undelete"
    return NothingToResume(
        f"{checkpoint} has no manifest at {store.url}: it was never committed, or was deleted by "
        "garbage collection or by hand; repair does not restore deleted checkpoints without "
        "--undelete",
        hint=command if has_copy else f"resilient ckpt ls {shell_quote(store.url)}",
    )


def _copies(
    store: Store, checkpoint: CheckpointId, stores: Sequence[Store]
) -> list[tuple[bytes, str]]:
    """Return whole copies of a manifest with their sources, the nearest first."""
    copies = []
    with suppress(KeyNotFound, IntegrityError):
        copies.append((_fetch_verified(store, checkpoint, checkpoint.copy_key), COPY))
    for other_store in stores:
        with suppress(KeyNotFound, IntegrityError):
            if _is_same_generation(store, other_store, checkpoint.generation):
                copies.append((_bytes_of(other_store, checkpoint), other_store.url))
    return copies


def _bytes_of(store: Store, checkpoint: CheckpointId) -> bytes:
    return _fetch_verified(store, checkpoint, checkpoint.manifest_key)


def _fetch_verified(store: Store, checkpoint: CheckpointId, key: str) -> bytes:
    def require_valid(data: bytes) -> bytes:
        decode(data, checkpoint.manifest_key)
        return data

    return fetch(store, key, require_valid, DOCUMENT_BYTES_MAX)


def _is_same_generation(store: Store, other: Store, number: int) -> bool:
    """Return whether a generation's record is the same in both repositories.

    Names alone prove nothing: another run, or a fork of this run, has folders of the same names.
    """
    return read_generation(store, number) == read_generation(other, number)


def _with_first_bytes(store: Store, manifest: Manifest, damage: Damage) -> Damage:
    """Check the first bytes of a file that is longer than committed."""
    if damage.chunks is None or damage.chunks:
        return damage
    entry = manifest.file(damage.finding.file)
    try:
        data = store.get_range(manifest.key(entry.name), 0, entry.size_bytes)
    except KeyNotFound:
        return damage
    chunks = frozenset(start // CHUNK_BYTES for start, _ in damaged_ranges(data, entry.proof))
    tensors = tuple(tensors_hit(manifest, entry.name, data)) if chunks else ()
    return replace(damage, chunks=chunks, tensors=tensors)


def _sources_with_chunks(
    damage: Damage, manifest: Manifest, sources: Sequence[Store | SiblingSource]
) -> list[Store | SiblingSource]:
    """Return the places that have a damaged chunk."""
    entry = manifest.file(damage.finding.file)
    return [
        source
        for source in sources
        if any(find_chunk([source], manifest, entry, chunk) for chunk in damage.chunks or ())
    ]


def _missing_in_sources(
    damage: Damage, manifest: Manifest, stores: Sequence[Store | SiblingSource]
) -> frozenset[int]:
    """Return the damaged chunks that no other place has."""
    chunks = damage.chunks or frozenset()
    if not stores:
        return chunks
    entry = manifest.file(damage.finding.file)
    return frozenset(
        chunk for chunk in chunks if find_chunk(stores, manifest, entry, chunk) is None
    )


def _source(
    damage: Damage, missing_chunks: frozenset[int], stores: Sequence[Store | SiblingSource]
) -> str:
    """Describe the source of a file's missing bytes."""
    other_urls = " or ".join(other_store.url for other_store in stores)
    if not damage.chunks:
        return OWN_BYTES
    if not missing_chunks:
        return other_urls
    return PARITY if missing_chunks == damage.chunks else f"{PARITY} and {other_urls}"
