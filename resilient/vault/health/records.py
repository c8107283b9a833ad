"""What lies beside the checkpoints: the records of lives, marks, tags, and what lost its manifest.

Is it whole, does it fit?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.document import RECORD_BYTES_MAX, unseal
from resilient.format.names import ABILITIES, MANIFEST, committed_key, generation_key, tag_key
from resilient.showing import quoted
from resilient.vault.access.damage import join_names
from resilient.vault.access.fetch import fetch
from resilient.vault.health.verify import Finding
from resilient.vault.registry.catalog import (
    committed,
    folders_of,
    lineage,
    read_manifest,
    trash_of,
)
from resilient.vault.registry.generations import (
    check_mark,
    list_marks,
    list_numbers,
    read_generation,
)
from resilient.vault.registry.tags import list_tags, read_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.health.verify import Level

_RECORD_FIX = "none here: resume goes on from the next older checkpoint; a copy may have the record"
_MARK_FIX = "none is needed while a checkpoint is there; the next life marks its own"


def verify_records(store: Store, level: Level = "full") -> list[Finding]:
    """Return everything wrong with what lies beside the checkpoints; nothing means intact.

    Crash: reads only.

    Args:
        store: the repository.
        level: ``quick`` asks for folders newer than the newest checkpoint that have no manifest;
            ``full`` also reads every record, mark and tag; ``deep`` also holds them against the
            checkpoints and against each other.

    Raises:
        StoreError: the store failed.
    """
    found = [*_without_manifest(store)]
    if level == "quick":
        return found
    found += _unreadable(store)
    return [*found, *_contradictions(store)] if level == "deep" else found


def _without_manifest(store: Store) -> Iterator[Finding]:
    """Find what resume passes over: newer than all that it could take, and not committed.

    Such a folder is what a save leaves that was killed, or is under way. But with every file that
    the newest checkpoint wrote it has most likely been committed, and its manifest was deleted.
    """
    folders = folders_of(store)
    newest = max((one for one, names in folders.items() if MANIFEST in names), default=None)
    if newest is None:
        return
    try:
        manifest = read_manifest(store, newest)
    except (IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        manifest = None
    trash = trash_of(folders)
    for one in sorted(one for one in folders if one > newest and one not in trash):
        key, way = (
            one.manifest_key,
            f"resilient ckpt repair {quoted(one)} {quoted(store.url)} --undelete",
        )
        own = [entry.name for entry in manifest.files if not entry.origin] if manifest else []
        if manifest is not None and set(own) <= set(folders[one]):
            tensors = join_names([tensor.name for tensor in manifest.tensors])
            problem = "missing, and the files are all there: it was deleted, or never put"
            yield Finding(key, tensors, problem, fix=way)
        else:
            problem = "missing, and so are files: a save is under way, or was killed"
            yield Finding(key, "", problem, "warning", fix="none is needed: the next save tidies")


def _unreadable(store: Store) -> Iterator[Finding]:
    for number in list_numbers(store):
        key = generation_key(number)
        yield from _read(key, _RECORD_FIX, lambda number=number: read_generation(store, number))  # type: ignore[misc]
    for number in list_marks(store):
        key = committed_key(number)
        yield from _read(key, _MARK_FIX, lambda number=number: check_mark(store, number))  # type: ignore[misc]
    for name in list_tags(store):
        fix = f"resilient ckpt untag {name} {quoted(store.url)}"
        yield from _read(tag_key(name), fix, lambda name=name: read_tag(store, name))  # type: ignore[misc]
    fix = f"none but to delete `{ABILITIES}`: the next life asks the store again"
    yield from _read(ABILITIES, fix, lambda: _read_abilities(store))


def _read_abilities(store: Store) -> object:
    return fetch(store, ABILITIES, lambda data: unseal(data, ABILITIES), RECORD_BYTES_MAX)


def _read(key: str, fix: str, read: Callable[[], object]) -> Iterator[Finding]:
    try:
        read()
    except IntegrityError as error:
        yield Finding(key, "", error.message, fix=fix)
    except KeyNotFound:
        # Gone meanwhile, or never there.
        return


def _contradictions(store: Store) -> Iterator[Finding]:
    whole, numbers, marks = committed(store), list_numbers(store), list_marks(store)
    lost = lineage(store).lost
    if lost:
        yield Finding(
            "generations/",
            "",
            lost,
            fix="none here: a copy of the repository may have the checkpoint",
        )
    for number in sorted({one.generation for one in whole}):
        if number not in numbers:
            key = generation_key(number)
            yield Finding(key, "", "missing, and its checkpoints are there", fix=_RECORD_FIX)
        if number not in marks:
            problem = "missing, as after a crash between a first commit and its mark"
            yield Finding(committed_key(number), "", problem, "warning", fix=_MARK_FIX)
    for one in whole:
        yield from _parents(store, one)
    yield from _idle_tags(store, whole)


def _parents(store: Store, checkpoint: CheckpointId) -> Iterator[Finding]:
    """Hold what a checkpoint says of its life against what the life's record says."""
    try:
        stated = read_manifest(store, checkpoint).parent
        recorded = read_generation(store, checkpoint.generation).parent
    except (IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        return
    if stated != recorded:
        problem = f"began from {recorded or 'scratch'}, and {checkpoint} says {stated or 'scratch'}"
        yield Finding(generation_key(checkpoint.generation), "", problem, fix=_RECORD_FIX)


def _idle_tags(store: Store, whole: list[CheckpointId]) -> Iterator[Finding]:
    for name in list_tags(store):
        try:
            named = read_tag(store, name).checkpoint
        except (IntegrityError, KeyNotFound):
            continue
        if named not in whole:
            fix = f"resilient ckpt untag {name} {quoted(store.url)}"
            yield Finding(tag_key(name), "", f"names {named}, which is gone", "warning", fix=fix)
