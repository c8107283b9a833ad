"""What a reference means: ``latest~2``, ``step:120``, a tag, ``@{1}``, a moment."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    NothingToResume,
    RepositoryNotFound,
    UsageError,
)
from resilient.format.names import parse_checkpoint, parse_tag, tag_key
from resilient.showing import quoted
from resilient.vault.registry.catalog import (
    Lineage,
    committed,
    folders_of,
    lineage,
    read_in_trash,
    read_manifest,
    trash_of,
)
from resilient.vault.registry.moves import Moves
from resilient.vault.registry.planning import Content, Known, best_by
from resilient.vault.registry.retention import parse_best
from resilient.vault.registry.tags import read_tag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.names import CheckpointId, Trashed
    from resilient.storage.store import Store
    from resilient.vault.registry.retention import BestOf

_ROOT = re.compile(r"[0-9a-f]{4,64}")


def resolve(store: Store, ref: str) -> CheckpointId:
    """Return the checkpoint that ``ref`` names.

    Crash: reads only.

    Args:
        store: the repository.
        ref: ``latest`` (what resume would try first), ``latest~2``, ``step:120``, ``120``, a
            folder name, one without its generation (``checkpoint-120``: the newest in the line
            of descent), a tag, ``best:loss`` (the best that was measured, in the line of descent
            first), ``@{1}`` (where the life before the newest ended, as ``ckpt reflog`` lists
            them), ``@2026-11-20T10:00`` (the newest of the line that was saved by then; UTC
            unless it says otherwise), or a unique prefix of a manifest's root.

    Raises:
        RepositoryNotFound: nothing was ever committed here.
        NothingToResume: the reference names no checkpoint.
        UsageError: it names several.
    """
    everything = committed(store)
    if not everything:
        raise RepositoryNotFound(
            f"no checkpoint at {store.url}: no run ever saved there",
            hint=f"resilient ckpt ls {quoted(store.url)}",
        )
    known = lineage(store)
    order = [*known.candidates, *(one for one in everything if one not in known.candidates)]
    found = (
        _by_position(order, ref)
        or _by_name(order, ref)
        or _by_tag(store, order, ref)
        or _by_moment(store, known, ref)
        or _by_life(store, ref)
        or _by_metric(store, known, ref)
        or _by_root(store, order, ref)
    )
    if found is None:
        raise absent(store, ref)
    return found


def absent(store: Store, ref: str) -> NothingToResume:
    """Return that a reference names no checkpoint, and how what a prune let go comes back.

    Crash: reads only.
    """
    trash = trash_of(folders_of(store))
    one = _by_name(sorted(trash, reverse=True), ref) or _in_trash_by_root(store, trash, ref)
    if one is None:
        return NothingToResume(
            f"no checkpoint `{ref}` at {store.url}",
            hint=f"resilient ckpt ls {quoted(store.url)}",
        )
    mark = trash[one]
    return NothingToResume(
        f"{one} was pruned, and is in the trash of {store.url} until {mark.until}",
        hint=f"resilient ckpt prune {quoted(store.url)} --undo {quoted(mark.prune)}",
    )


def _in_trash_by_root(
    store: Store, trash: Mapping[CheckpointId, Trashed], ref: str
) -> CheckpointId | None:
    for one, mark in trash.items() if _ROOT.fullmatch(ref) else ():
        with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
            if read_in_trash(store, one, mark).root.startswith(ref):
                return one
    return None


def _by_position(order: list[CheckpointId], ref: str) -> CheckpointId | None:
    match = re.fullmatch(r"latest(?:~(\d+))?", ref)
    back = int(match[1] or 0) if match else len(order)
    return order[back] if back < len(order) else None


def _by_name(order: list[CheckpointId], ref: str) -> CheckpointId | None:
    named = parse_checkpoint(ref)
    if named in order:
        return named
    match = re.fullmatch(r"(?:step:|checkpoint-)?(\d+)", ref)
    return next((one for one in order if match and one.step == int(match[1])), None)


def _by_tag(store: Store, order: list[CheckpointId], ref: str) -> CheckpointId | None:
    if parse_tag(tag_key(ref)) != ref:
        return None
    try:
        named = read_tag(store, ref).checkpoint
    except KeyNotFound:
        return None
    if named not in order:
        if named in trash_of(folders_of(store)):
            raise absent(store, str(named))
        raise UsageError(
            f"tag `{ref}` names {named}, which is gone",
            hint=f"resilient ckpt untag {quoted(ref)}",
        )
    return named


def _by_metric(store: Store, known: Lineage, ref: str) -> CheckpointId | None:
    kind, _, metric = ref.partition(":")
    if kind != "best":
        return None
    contents = {}
    others = (*known.abandoned, *known.separate)
    for one in (*known.candidates, *others):
        with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
            manifest = read_manifest(store, one)
            contents[one] = Content(manifest.created_at, manifest.metrics)
    measured = Known(known.candidates, others, contents=contents)
    return next(iter(best_by(_wish(metric, store), measured)), None)


def _wish(metric: str, store: Store) -> BestOf:
    try:
        return parse_best(metric)
    except ConfigError as error:
        raise UsageError(
            f"`best:{metric}`: {error.message}",
            hint=f"resilient ckpt inspect best:loss:min {quoted(store.url)}",
        ) from error


def _by_root(store: Store, order: list[CheckpointId], ref: str) -> CheckpointId | None:
    if not _ROOT.fullmatch(ref):
        return None
    found = []
    for one in order:
        try:
            root = read_manifest(store, one).root
        except (IntegrityError, KeyNotFound):
            continue
        if root.startswith(ref):
            found.append(one)
    if len(found) > 1:
        raise UsageError(
            f"`{ref}` names {len(found)} checkpoints", hint=f"resilient ckpt ls {quoted(store.url)}"
        )
    return found[0] if found else None


def _by_life(store: Store, ref: str) -> CheckpointId | None:
    """Return where the life ended that has so many after it."""
    match = re.fullmatch(r"@\{(\d{1,9})\}", ref)
    moves = Moves(store) if match else None
    if match is None or moves is None or int(match[1]) >= len(moves.numbers):
        return None
    head = moves.head_of(moves.numbers[-1 - int(match[1])])
    if head.gone and head.checkpoint in trash_of(folders_of(store)):
        raise absent(store, str(head.checkpoint))
    if head.gone:
        raise NothingToResume(
            f"`{ref}` at {store.url}: {head.gone}",
            hint=f"resilient ckpt reflog {quoted(store.url)}",
        )
    return head.checkpoint


def _by_moment(store: Store, known: Lineage, ref: str) -> CheckpointId | None:
    """Return the newest of the line that was there at a moment."""
    if not ref.startswith("@") or ref.startswith("@{"):
        return None
    try:
        moment = _utc(ref[1:])
    except ValueError as error:
        raise UsageError(
            f"`{ref}` is no moment, as @2026-11-20, @2026-11-20T10:00 and ...+01:00 are",
            hint="resilient help refs",
        ) from error
    for one in known.candidates:
        with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
            if _utc(read_manifest(store, one).created_at) <= moment:
                return one
    return None


def _utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
