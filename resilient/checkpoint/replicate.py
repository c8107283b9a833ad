"""One checkpoint into another repository as it is: each byte proved on the way, the manifest last.

::

    files, what they refer to -> ledger -> signature -> fence -> manifest -> records of the lives

The copy has the same bytes under the same names, so its digests and its signature hold, and what
is copied later shares what is there already. A run that resumes there goes on from it; the two
repositories are two runs from then on.
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
    """What a copy takes.

    Attributes:
        manifest: of the checkpoint.
        data: the manifest's bytes.
        missing: files that the target does not have.
        is_there: whether the target has the manifest already.
        lives: records of the lives that led to it, newest first.
        others: records of the lives before it that led elsewhere, or saved nothing.
        segments: of the ledger up to it, newest first.
        ledger_problem: why its ledger is not copied whole, or nothing.
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
        """Bytes of the files that are to be put."""
        return sum(one.size_bytes for one in self.missing)

    @property
    def token(self) -> str:
        """Token of the claim that saved the checkpoint; empty if its record is gone."""
        number = self.manifest.checkpoint.generation
        return next((one.token for one in self.lives if one.number == number), "")


def plan_copy(source: Store, target: Store, checkpoint: CheckpointId) -> ReplicationPlan:
    """Return what it takes to have a checkpoint in another repository as well.

    Crash: reads only.

    Args:
        source: where it is committed.
        target: a repository of the same run, or an empty place.
        checkpoint: which.

    Raises:
        ConfigError: both are the same place, or the target holds another run.
        Fenced: a run has gone on in the target beyond this life.
        IntegrityError: the manifest is damaged.
        KeyNotFound: it is not committed.
        StoreError: a store failed.
    """
    if source.url.rstrip("/") == target.url.rstrip("/"):
        raise ConfigError(f"{checkpoint} is at {target.url} already")
    key = checkpoint.manifest_key
    manifest, data = fetch(source, key, lambda data: (decode(data, key), data), DOCUMENT_BYTES_MAX)
    lives = tuple(_lives(source, checkpoint.generation))
    others = tuple(_others(source, target, lives))
    _require_same_run(target, manifest, lives)
    is_there = _require_same_manifest(target, key, data)
    sizes = {one.name: _size_of(target, manifest.key(one.name)) for one in manifest.files}
    missing = tuple(one for one in manifest.files if sizes[one.name] != one.size_bytes)
    segments, problem = _ledger(source, manifest)
    return ReplicationPlan(manifest, data, missing, is_there, lives, others, segments, problem)


def replicate(
    source: Store,
    target: Store,
    shipment: ReplicationPlan,
    clock: Clock,
    told: Callable[[int, int], None],
    *,
    single_writer: bool = False,
) -> None:
    """Make the copy. One file at a time is in memory.

    Crash: the target has no checkpoint, or a whole one; files without a manifest are leftovers,
    which the same command takes up. The source is only read.

    Args:
        source: as in ``plan_copy``.
        target: as in ``plan_copy``.
        shipment: what was planned.
        clock: for the record of what the target can do.
        told: called with the bytes that are done and all there are.
        single_writer: the user promises that nobody else writes to the target.

    Raises:
        Fenced: a run began in the target meanwhile; no manifest was put.
        IntegrityError: the source is damaged, or somebody deletes in the target.
        NotExclusive: the target cannot fence and the user did not promise to be alone.
        StoreError: a store failed; the manifest may be there, and if so it is whole.
    """
    check_store_capabilities(target, clock, single_writer=single_writer)
    manifest, done = shipment.manifest, 0
    fence = partial(_check_target, target, shipment)
    for entry in shipment.missing:
        _carry(source, target, manifest, entry, fence)
        done += entry.size_bytes
        told(done, shipment.size_bytes)
    fence()
    for segment in shipment.segments:
        if _size_of(target, segment.key) < 0:
            target.put(segment.key, encode_segment(segment))
    signature = manifest.checkpoint.key(signature_name(manifest.root))
    if _size_of(source, signature) >= 0:
        target.put(signature, source.get(signature))
    fence()
    _require_files(target, manifest)
    if not shipment.is_there:
        put_manifest(target, manifest.checkpoint.manifest_key, shipment.data)
    for life in (*shipment.lives, *shipment.others):
        _record(target, life)
    mark_committed(target, manifest.checkpoint.generation)
    if manifest.parity:
        copy_manifest(target, manifest.checkpoint)


def _check_target(target: Store, shipment: ReplicationPlan) -> None:
    """Refuse a target where a run goes on, or that has another claim with this number."""
    number = shipment.manifest.checkpoint.generation
    # An empty target gets the record of the claim after the manifest.
    token = shipment.token if number in list_numbers(target) else ""
    check_fence(target, number, token)


def _lives(store: Store, number: int) -> Iterator[Generation]:
    """Yield the records from a life back to the first, as far as they can be read."""
    while number:
        try:
            record = read_generation(store, number)
        except (IntegrityError, KeyNotFound):
            return  # a resume does without
        yield record
        number = record.parent.generation if record.parent else 0


def _others(store: Store, target: Store, lives: tuple[Generation, ...]) -> Iterator[Generation]:
    """Yield the records that an audit of the copy would miss, as far as they can be read."""
    known = {one.number for one in lives} | set(list_numbers(target))
    newest = max((one.number for one in lives), default=0)
    for number in list_numbers(store):
        if number < newest and number not in known:
            with suppress(IntegrityError, KeyNotFound):
                yield read_generation(store, number)


def _require_same_run(target: Store, manifest: Manifest, lives: tuple[Generation, ...]) -> None:
    """Refuse a target where something else was trained, or where this run went on."""
    there, mine = committed(target), manifest.checkpoint.generation
    runs = {one.run_id for one in read_generations(target)} - {one.run_id for one in lives}
    if there:
        runs |= {read_manifest(target, there[0]).run_id} - {manifest.run_id}
    if runs:
        raise ConfigError(
            f"{target.url} holds another run ({min(runs)}); nothing was changed; a copy needs "
            "a place of its own",
            hint=f"resilient ckpt ls {shell_quote(target.url)}",
        )
    newest = max([*list_numbers(target), *(one.generation for one in there)], default=0)
    if newest > mine:
        raise Fenced(
            f"a run went on at {target.url}: life {newest} is there, and this is of life {mine}",
            hint=f"resilient ckpt reflog {shell_quote(target.url)}",
        )


def _require_same_manifest(target: Store, key: str, data: bytes) -> bool:
    """Say whether a manifest is there; refuse another one than this."""
    try:
        there = target.get(key)
    except KeyNotFound:
        return False
    if there != data:
        raise ConfigError(
            f"{target.url} has another `{key}`; nothing was changed; a copy needs "
            "a place of its own",
            hint=f"resilient ckpt ls {shell_quote(target.url)}",
        )
    return True


def _ledger(store: Store, manifest: Manifest) -> tuple[tuple[Segment, ...], str]:
    """Return the segments up to a checkpoint, newest first, and why there are no more."""
    found: dict[str, Segment] = {}
    try:
        anchor = LedgerHead.from_data(manifest.data)
        key = anchor.segment if anchor else ""
        while key and key not in found:
            found[key] = read_segment(store, key)
            key = found[key].previous
    except (IntegrityError, KeyNotFound) as error:
        return tuple(found.values()), error.message
    return tuple(found.values()), ""


def _carry(
    source: Store, target: Store, manifest: Manifest, entry: FileEntry, fence: Callable[[], None]
) -> None:
    key = manifest.key(entry.name)

    def proved(data: bytes) -> bytes:
        if digest_file(data) != entry.proof:
            raise IntegrityError(
                f"`{key}` at {source.url} is not what was saved; no copy was made",
                key=key,
                hint=f"resilient ckpt repair {manifest.checkpoint} {shell_quote(source.url)}",
            )
        return data

    data = fetch(source, key, proved, entry.size_bytes)
    fence()
    target.put(key, data)


def _require_files(target: Store, manifest: Manifest) -> None:
    """See that everything is there: a rotation may have taken files for leftovers."""
    for entry in manifest.files:
        key = manifest.key(entry.name)
        if _size_of(target, key) != entry.size_bytes:
            raise IntegrityError(
                f"`{key}` was put at {target.url} and is gone: somebody deletes there",
                key=key,
                hint=f"resilient ckpt ls {shell_quote(target.url)}",
            )


def _record(target: Store, life: Generation) -> None:
    data = seal(life.to_json())
    try:
        create_record(target, generation_key(life.number), data)
    except KeyExists:
        # The same, or a damaged one that `ckpt repair` tells of: of another run there is none.
        return


def _size_of(store: Store, key: str) -> int:
    """Return an object's bytes, -1 if there is none."""
    try:
        return store.stat(key).size_bytes
    except KeyNotFound:
        return -1
