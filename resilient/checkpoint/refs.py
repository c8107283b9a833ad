"""References to checkpoints (``latest~2``, ``step:120``, a tag, ``@{1}``, a time), and tags.

``@{1}`` names the checkpoint at which the second-newest attempt ended. A tag is a name that a
person gives to a checkpoint. Retention never deletes a tagged checkpoint. A tag is a small object
with its own digest. A tag is created only if no tag has this name. To move a tag, remove it and
create it again. If two users move a tag at the same time, one user gets an error.
"""

from __future__ import annotations

import re
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import (
    Lineage,
    committed,
    folders_of,
    lineage,
    read_in_trash,
    read_manifest,
    trash_of,
)
from resilient.checkpoint.generations import create_record
from resilient.checkpoint.reflog import Reflog
from resilient.checkpoint.retention import CheckpointSummary, RetentionInput, best_by, parse_best
from resilient.checkpoint.verified_read import fetch
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    KeyExists,
    KeyNotFound,
    NothingToResume,
    RepositoryNotFound,
    UsageError,
)
from resilient.format.document import RECORD_BYTES_MAX, seal, unseal
from resilient.format.keys import TAGS, CheckpointId, parse_checkpoint, parse_tag, tag_key
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.checkpoint.retention import BestOf
    from resilient.clock import Clock
    from resilient.format.keys import TrashedManifest
    from resilient.storage.store import Store

_FORMAT = "resilient-tag"
_VERSION = 1
_SUGGESTION_LENGTH_MAX = 40


@dataclass(frozen=True, slots=True)
class Tag:
    """Name of a checkpoint.

    Attributes:
        name: Name in the grammar of :mod:`resilient.format.keys`.
        checkpoint: Named checkpoint, which may be missing if a person deleted it by hand.
        created_at: UTC, ISO 8601.
        host: Name of the machine that created it.
        token: Unique to the creation. After a lost response, a read of the token shows whether the
            create succeeded.
    """

    name: str
    checkpoint: CheckpointId
    created_at: str
    host: str
    token: str

    def to_json(self) -> dict[str, Any]:
        """Return the object's fields."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "name": self.name,
            "checkpoint": self.checkpoint.folder,
            "created_at": self.created_at,
            "host": self.host,
            "token": self.token,
        }


def list_tags(store: Store) -> tuple[str, ...]:
    """Return the names of all tags, readable or not, in order; one request.

    Crash: reads only.
    """
    names = (parse_tag(entry.key) for entry in store.list(TAGS))
    return tuple(sorted(name for name in names if name))


def read_tag(store: Store, name: str) -> Tag:
    """Read and verify one tag.

    Crash: reads only.

    Raises:
        KeyNotFound: No tag has this name.
        IntegrityError: The tag is damaged, or of a version that this release does not read.
    """
    key = tag_key(name)
    fields = fetch(store, key, lambda data: unseal(data, key), RECORD_BYTES_MAX)
    checkpoint = parse_checkpoint(str(fields.get("checkpoint")))
    expected = {"format": _FORMAT, "version": _VERSION, "name": name}
    texts = [fields.get(field) for field in ("created_at", "host", "token")]
    if (
        checkpoint is None
        or not all(isinstance(text, str) for text in texts)
        or any(fields.get(field) != value for field, value in expected.items())
    ):
        raise IntegrityError(
            f"`{key}`: this release cannot read the tag",
            key=key,
            hint=f"resilient ckpt untag {name}",
        )
    return Tag(name, checkpoint, *map(str, texts))


def read_tags(store: Store) -> list[Tag]:
    """Return all tags in the order of names; a tag that vanishes meanwhile is left out.

    Crash: reads only.

    Raises:
        IntegrityError: A tag is damaged, so its protected checkpoint is unknown.
    """
    tags = []
    for name in list_tags(store):
        try:
            tags.append(read_tag(store, name))
        except KeyNotFound:
            continue
    return tags


def create_tag(store: Store, name: str, checkpoint: CheckpointId, clock: Clock) -> Tag:
    """Create a tag of a committed checkpoint; a second call with the same arguments has no effect.

    A garbage collection that was planned before the tag may still delete the checkpoint. The check
    of the manifest after the create detects that. The exception is a collection between its own
    last check and its delete (docs/guarantees.md).

    Crash: the tag exists whole, or does not exist.

    Args:
        store: Repository.
        name: Letters, digits, ``.``, ``_`` and ``-``; not a form that already refers to a
            checkpoint.
        checkpoint: Checkpoint to name.
        clock: Source of ``created_at``.

    Raises:
        UsageError: The name is not accepted or names another checkpoint, or the checkpoint is
            missing.
        StoreError: The store failed; the tag may be there, and if so it is whole.
    """
    if parse_tag(tag_key(name)) != name:
        raise UsageError(
            f"`{name}` cannot be a tag: use letters, digits, `.`, `_`, `-`, and no name with "
            "another meaning, such as `latest` or a number",
            hint=f"resilient ckpt tag {checkpoint} {shell_quote(_nearest_valid(name))} "
            f"{shell_quote(store.url)}",
        )
    _require_committed(store, checkpoint)
    tag = Tag(name, checkpoint, clock.now_iso(), socket.gethostname(), uuid.uuid4().hex)
    try:
        create_record(store, tag_key(name), seal(tag.to_json()))
    except KeyExists as error:
        existing_tag = read_tag(store, name)
        if existing_tag.checkpoint == checkpoint:
            return existing_tag
        raise UsageError(
            f"tag `{name}` already names {existing_tag.checkpoint}; nothing was changed",
            hint=f"resilient ckpt untag {name}, and then tag {checkpoint}",
        ) from error
    try:
        _require_committed(store, checkpoint)
    except UsageError:
        store.delete(tag_key(name))
        raise
    return tag


def remove_tag(store: Store, name: str) -> CheckpointId | None:
    """Remove a tag; its checkpoint stays until retention deletes it.

    Crash: the tag exists whole, or is deleted.

    Returns:
        The checkpoint that the tag named; None if the tag cannot be read.

    Raises:
        UsageError: No tag has this name.
        StoreError: The store failed; the tag exists or is deleted.
    """
    if name not in list_tags(store):
        raise UsageError(
            f"no tag `{name}` at {store.url}", hint=f"resilient ckpt ls {shell_quote(store.url)}"
        )
    try:
        checkpoint = read_tag(store, name).checkpoint
    except (IntegrityError, KeyNotFound):
        checkpoint = None
    store.delete(tag_key(name))
    return checkpoint


def _require_committed(store: Store, checkpoint: CheckpointId) -> None:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound as error:
        raise UsageError(
            f"cannot tag {checkpoint}: it is not committed at {store.url}, or was deleted",
            hint=f"resilient ckpt ls {shell_quote(store.url)}",
        ) from error


def _nearest_valid(name: str) -> str:
    """Return the valid tag name that is nearest to an invalid one."""
    valid_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_SUGGESTION_LENGTH_MAX]
    return (
        valid_name
        if parse_tag(tag_key(valid_name)) == valid_name
        else f"tag-{valid_name}".strip("-")
    )


_ROOT = re.compile(r"[0-9a-f]{4,64}")


def resolve(store: Store, ref: str) -> CheckpointId:
    """Return the checkpoint that ``ref`` names.

    Crash: reads only.

    Args:
        store: Repository.
        ref: Reference in one of these forms.
            ``latest`` is the first candidate of resume; ``latest~2``, ``step:120`` and ``120``
            are relative to it or name a step.
            A folder name without its generation (``checkpoint-120``) is the newest such checkpoint
            in the line of descent.
            A tag.
            ``best:loss`` is the checkpoint with the best metric, the line of descent first.
            ``@{1}`` is the end of the attempt before the newest, as ``ckpt reflog`` lists them.
            ``@2026-11-20T10:00`` is the newest checkpoint of the line saved by then (UTC without
            an offset).
            A unique prefix of a manifest's root.

    Raises:
        RepositoryNotFound: Nothing was ever committed here.
        NothingToResume: The reference names no checkpoint.
        UsageError: The reference names several checkpoints.
    """
    checkpoints = committed(store)
    if not checkpoints:
        raise RepositoryNotFound(
            f"no checkpoint at {store.url}: no run has saved there",
            url=store.url,
            hint=f"resilient doctor --repo {shell_quote(store.url)}",
        )
    descent = lineage(store)
    order = [
        *descent.candidates,
        *(checkpoint for checkpoint in checkpoints if checkpoint not in descent.candidates),
    ]
    matches = (
        _by_position(order, ref)
        or _by_name(order, ref)
        or _by_tag(store, order, ref)
        or _by_moment(store, descent, ref)
        or _by_attempt(store, ref)
        or _by_metric(store, descent, ref)
        or _by_root(store, order, ref)
    )
    if matches is None:
        raise absent(store, ref)
    return matches


def absent(store: Store, ref: str) -> NothingToResume:
    """Return the error for an unknown reference; for a pruned checkpoint, with its undo command.

    Crash: reads only.
    """
    trash = trash_of(folders_of(store))
    checkpoint = _by_name(sorted(trash, reverse=True), ref) or _in_trash_by_root(store, trash, ref)
    if checkpoint is None:
        return NothingToResume(
            f"no checkpoint `{ref}` at {store.url}",
            hint=f"resilient ckpt ls {shell_quote(store.url)}",
        )
    mark = trash[checkpoint]
    return NothingToResume(
        f"{checkpoint} was pruned, and is in the trash of {store.url} until {mark.until}",
        hint=f"resilient ckpt prune {shell_quote(store.url)} --undo {shell_quote(mark.prune)}",
    )


def _in_trash_by_root(
    store: Store, trash: Mapping[CheckpointId, TrashedManifest], ref: str
) -> CheckpointId | None:
    for checkpoint, mark in trash.items() if _ROOT.fullmatch(ref) else ():
        with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
            if read_in_trash(store, checkpoint, mark).root.startswith(ref):
                return checkpoint
    return None


def _by_position(order: list[CheckpointId], ref: str) -> CheckpointId | None:
    match = re.fullmatch(r"latest(?:~(\d+))?", ref)
    distance = int(match[1] or 0) if match else len(order)
    return order[distance] if distance < len(order) else None


def _by_name(order: list[CheckpointId], ref: str) -> CheckpointId | None:
    named_checkpoint = parse_checkpoint(ref)
    if named_checkpoint in order:
        return named_checkpoint
    match = re.fullmatch(r"(?:step:|checkpoint-)?(\d+)", ref)
    return next(
        (checkpoint for checkpoint in order if match and checkpoint.step == int(match[1])), None
    )


def _by_tag(store: Store, order: list[CheckpointId], ref: str) -> CheckpointId | None:
    if parse_tag(tag_key(ref)) != ref:
        return None
    try:
        checkpoint = read_tag(store, ref).checkpoint
    except KeyNotFound:
        return None
    if checkpoint not in order:
        if checkpoint in trash_of(folders_of(store)):
            raise absent(store, str(checkpoint))
        raise UsageError(
            f"tag `{ref}` names {checkpoint}, which no longer exists",
            hint=f"resilient ckpt untag {shell_quote(ref)}",
        )
    return checkpoint


def _by_metric(store: Store, descent: Lineage, ref: str) -> CheckpointId | None:
    kind, _, metric = ref.partition(":")
    if kind != "best":
        return None
    contents = {}
    off_line = (*descent.abandoned, *descent.separate)
    for candidate in (*descent.candidates, *off_line):
        with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
            manifest = read_manifest(store, candidate)
            contents[candidate] = CheckpointSummary(manifest.created_at, manifest.metrics)
    measured = RetentionInput(descent.candidates, off_line, contents=contents)
    return next(iter(best_by(_parse_metric(metric, store), measured)), None)


def _parse_metric(metric: str, store: Store) -> BestOf:
    try:
        return parse_best(metric)
    except ConfigError as error:
        raise UsageError(
            f"`best:{metric}`: {error.message}",
            hint=f"resilient ckpt inspect best:loss:min {shell_quote(store.url)}",
        ) from error


def _by_root(store: Store, order: list[CheckpointId], ref: str) -> CheckpointId | None:
    if not _ROOT.fullmatch(ref):
        return None
    matches = []
    for checkpoint in order:
        try:
            root = read_manifest(store, checkpoint).root
        except (IntegrityError, KeyNotFound):
            continue
        if root.startswith(ref):
            matches.append(checkpoint)
    if len(matches) > 1:
        raise UsageError(
            f"`{ref}` matches {len(matches)} checkpoints",
            hint=f"resilient ckpt ls {shell_quote(store.url)}",
        )
    return matches[0] if matches else None


def _by_attempt(store: Store, ref: str) -> CheckpointId | None:
    """Return the end of the attempt that is followed by the given number of attempts."""
    match = re.fullmatch(r"@\{(\d{1,9})\}", ref)
    reflog = Reflog(store) if match else None
    if match is None or reflog is None or int(match[1]) >= len(reflog.numbers):
        return None
    head = reflog.head_of(reflog.numbers[-1 - int(match[1])])
    if head.gone and head.checkpoint in trash_of(folders_of(store)):
        raise absent(store, str(head.checkpoint))
    if head.gone:
        raise NothingToResume(
            f"`{ref}` at {store.url}: {head.gone}",
            hint=f"resilient ckpt reflog {shell_quote(store.url)}",
        )
    return head.checkpoint


def _by_moment(store: Store, descent: Lineage, ref: str) -> CheckpointId | None:
    """Return the newest checkpoint of the line that existed at a moment."""
    if not ref.startswith("@") or ref.startswith("@{"):
        return None
    try:
        moment = _utc(ref[1:])
    except ValueError as error:
        raise UsageError(
            f"`{ref}` is not a time such as @2026-11-20, @2026-11-20T10:00 or ...+01:00",
            hint="resilient help refs",
        ) from error
    for candidate in descent.candidates:
        with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
            if _utc(read_manifest(store, candidate).created_at) <= moment:
                return candidate
    return None


def _utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
