"""Replication: verified and unchanged copy of one checkpoint in another repository.

Order of the steps::

    files with references -> ledger -> signature -> fence -> manifest -> generation records

References are files of older checkpoints that this checkpoint needs. The ledger records the trained
samples. The fence fails if a run has continued in the target meanwhile. The manifest is the table
of contents, and a checkpoint without a manifest does not exist. Each attempt of the run has a
generation record.

The copy has the same bytes under the same names, so its digests and its signature remain valid.
Later copies share the files that are already in the target. A run that resumes in the target
continues from the copy. From then on the two repositories belong to two separate runs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.commit import copy_manifest, put_manifest
from resilient.checkpoint.fencing import check_store_capabilities
from resilient.checkpoint.generations import (
    check_fence,
    create_record,
    list_numbers,
    mark_committed,
    read_generation,
    read_generations,
)
from resilient.checkpoint.ledger_segments import read_segment
from resilient.checkpoint.verified_read import fetch
from resilient.errors import ConfigError, Fenced, IntegrityError, KeyExists, KeyNotFound
from resilient.format.digest import digest_file
from resilient.format.document import DOCUMENT_BYTES_MAX, seal
from resilient.format.keys import generation_key, signature_name
from resilient.format.ledger import LedgerHead, encode_segment
from resilient.format.manifest import decode
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.checkpoint.generations import Generation
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.format.ledger import Segment
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """Plan of a replication.

    Attributes:
        manifest: Manifest of the checkpoint.
        data: Bytes of the manifest.
        missing: Files that the target does not have.
        is_there: Whether the target already has the manifest.
        lives: Generation records that led to the checkpoint, newest first.
        others: Earlier generation records that did not lead to the checkpoint, or saved nothing.
        segments: Ledger segments up to the checkpoint, newest first.
        ledger_problem: Reason why the ledger is not copied completely; empty if it is.
    """

    manifest: Manifest
    data: bytes
    missing: tuple[FileEntry, ...]
    is_there: bool
    lives: tuple[Generation, ...]
    others: tuple[Generation, ...]
    segments: tuple[Segment, ...]
    ledger_problem: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the files to copy."""
        return sum(file.size_bytes for file in self.missing)

    @property
    def token(self) -> str:
        """Token of the claim that saved the checkpoint; empty if its record is gone."""
        number = self.manifest.checkpoint.generation
        return next((record.token for record in self.lives if record.number == number), "")


def plan_copy(source: Store, target: Store, checkpoint: CheckpointId) -> ReplicationPlan:
    """Plan the replication of a checkpoint to another repository.

    Crash: reads only.

    Args:
        source: Repository in which the checkpoint is committed.
        target: Repository of the same run, or an empty place.
        checkpoint: Checkpoint to copy.

    Raises:
        ConfigError: Both are the same place, or the target has another run.
        Fenced: A run has continued in the target beyond this generation.
        IntegrityError: The manifest is damaged.
        KeyNotFound: The checkpoint is not committed.
        StoreError: A store failed.
    """
    if source.url.rstrip("/") == target.url.rstrip("/"):
        raise ConfigError(f"{checkpoint} is already at {target.url}")
    key = checkpoint.manifest_key
    manifest, data = fetch(source, key, lambda data: (decode(data, key), data), DOCUMENT_BYTES_MAX)
    generations = tuple(_line_records(source, checkpoint.generation))
    missing_records = tuple(_missing_records(source, target, generations))
    _require_same_run(target, manifest, generations)
    is_there = _require_same_manifest(target, key, data)
    sizes = {file.name: _size_of(target, manifest.key(file.name)) for file in manifest.files}
    missing_files = tuple(file for file in manifest.files if sizes[file.name] != file.size_bytes)
    segments, problem = _ledger(source, manifest)
    return ReplicationPlan(
        manifest, data, missing_files, is_there, generations, missing_records, segments, problem
    )


def replicate(
    source: Store,
    target: Store,
    plan: ReplicationPlan,
    clock: Clock,
    on_progress: Callable[[int, int], None],
    *,
    single_writer: bool = False,
) -> None:
    """Carry out the plan. One file at a time is in memory.

    Crash: the target has no checkpoint, or a complete one. If files without a manifest are left,
        the same command continues from them. The source is only read.

    Args:
        source: As in ``plan_copy``.
        target: As in ``plan_copy``.
        plan: Plan.
        clock: Time of the record of the target's capabilities.
        on_progress: Callback with the bytes done and all bytes.
        single_writer: Promise of the user that no other process writes to the target.

    Raises:
        Fenced: A run began in the target meanwhile; no manifest was put.
        IntegrityError: The source is damaged, or another process deletes in the target.
        NotExclusive: The target cannot fence and the user did not set ``single_writer``.
        StoreError: A store failed; the manifest may be there, and if so it is whole.
    """
    check_store_capabilities(target, clock, single_writer=single_writer)
    manifest, copied_bytes = plan.manifest, 0
    fence = partial(_check_target, target, plan)
    for entry in plan.missing:
        _copy_file(source, target, manifest, entry, fence)
        copied_bytes += entry.size_bytes
        on_progress(copied_bytes, plan.size_bytes)
    fence()
    for segment in plan.segments:
        if _size_of(target, segment.key) < 0:
            target.put(segment.key, encode_segment(segment))
    signature = manifest.checkpoint.key(signature_name(manifest.root))
    if _size_of(source, signature) >= 0:
        target.put(signature, source.get(signature))
    fence()
    _require_files(target, manifest)
    if not plan.is_there:
        put_manifest(target, manifest.checkpoint.manifest_key, plan.data)
    for generation in (*plan.lives, *plan.others):
        _record(target, generation)
    mark_committed(target, manifest.checkpoint.generation)
    if manifest.parity:
        copy_manifest(target, manifest.checkpoint)


def _check_target(target: Store, plan: ReplicationPlan) -> None:
    """Refuse a target in which a run continues, or that has another claim with this number."""
    number = plan.manifest.checkpoint.generation
    # An empty target receives the generation record after the manifest.
    token = plan.token if number in list_numbers(target) else ""
    check_fence(target, number, token)


def _line_records(store: Store, number: int) -> Iterator[Generation]:
    """Yield the readable records from a generation back to the first."""
    while number:
        try:
            record = read_generation(store, number)
        except (IntegrityError, KeyNotFound):
            return  # a resume works without the record
        yield record
        number = record.parent.generation if record.parent else 0


def _missing_records(
    store: Store, target: Store, generations: tuple[Generation, ...]
) -> Iterator[Generation]:
    """Yield the readable records that an audit of the copy would miss."""
    numbers = {record.number for record in generations} | set(list_numbers(target))
    newest = max((record.number for record in generations), default=0)
    for number in list_numbers(store):
        if number < newest and number not in numbers:
            with suppress(IntegrityError, KeyNotFound):
                yield read_generation(store, number)


def _require_same_run(
    target: Store, manifest: Manifest, generations: tuple[Generation, ...]
) -> None:
    """Refuse a target that holds another run, or in which this run continued."""
    target_checkpoints, own_generation = committed(target), manifest.checkpoint.generation
    runs = {generation.run_id for generation in read_generations(target)} - {
        record.run_id for record in generations
    }
    if target_checkpoints:
        runs |= {read_manifest(target, target_checkpoints[0]).run_id} - {manifest.run_id}
    if runs:
        raise ConfigError(
            f"{target.url} holds another run ({min(runs)}); nothing was changed; copy to another "
            "repository",
            hint=f"resilient ckpt ls {shell_quote(target.url)}",
        )
    newest = max(
        [*list_numbers(target), *(checkpoint.generation for checkpoint in target_checkpoints)],
        default=0,
    )
    if newest > own_generation:
        raise Fenced(
            f"a run continued at {target.url}: generation {newest} exists there, and the copy is "
            f"of generation {own_generation}",
            hint=f"resilient ckpt reflog {shell_quote(target.url)}",
        )


def _require_same_manifest(target: Store, key: str, data: bytes) -> bool:
    """Return whether the manifest exists; refuse a different manifest."""
    try:
        target_data = target.get(key)
    except KeyNotFound:
        return False
    if target_data != data:
        raise ConfigError(
            f"{target.url} has another `{key}`; nothing was changed; copy to another repository",
            hint=f"resilient ckpt ls {shell_quote(target.url)}",
        )
    return True


def _ledger(store: Store, manifest: Manifest) -> tuple[tuple[Segment, ...], str]:
    """Return the segments up to a checkpoint, newest first, and why there are no more."""
    segments: dict[str, Segment] = {}
    try:
        anchor = LedgerHead.from_data(manifest.data)
        key = anchor.segment if anchor else ""
        while key and key not in segments:
            segments[key] = read_segment(store, key)
            key = segments[key].previous
    except (IntegrityError, KeyNotFound) as error:
        return tuple(segments.values()), error.message
    return tuple(segments.values()), ""


def _copy_file(
    source: Store, target: Store, manifest: Manifest, entry: FileEntry, fence: Callable[[], None]
) -> None:
    key = manifest.key(entry.name)

    def verified(data: bytes) -> bytes:
        if digest_file(data) != entry.proof:
            raise IntegrityError(
                f"`{key}` at {source.url} differs from what was saved; no copy was made",
                key=key,
                hint=f"resilient ckpt repair {manifest.checkpoint} {shell_quote(source.url)}",
            )
        return data

    data = fetch(source, key, verified, entry.size_bytes)
    fence()
    target.put(key, data)


def _require_files(target: Store, manifest: Manifest) -> None:
    """Check that all files exist: garbage collection may have deleted them as leftovers."""
    for entry in manifest.files:
        key = manifest.key(entry.name)
        if _size_of(target, key) != entry.size_bytes:
            raise IntegrityError(
                f"`{key}` was written to {target.url} and no longer exists: another process "
                "deletes there",
                key=key,
                hint=f"resilient ckpt ls {shell_quote(target.url)}",
            )


def _record(target: Store, generation: Generation) -> None:
    data = seal(generation.to_json())
    try:
        create_record(target, generation_key(generation.number), data)
    except KeyExists:
        # The same record, or a damaged one that `ckpt repair` reports; never that of another run.
        return


def _size_of(store: Store, key: str) -> int:
    """Return an object's bytes, -1 if there is none."""
    try:
        return store.stat(key).size_bytes
    except KeyNotFound:
        return -1
