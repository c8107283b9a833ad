"""Tags: names that a person gives to checkpoints; a tagged checkpoint is never rotated away.

A tag is one small sealed object, created exclusively. To move one is to remove it and to create
it anew, so that no two people move it at once without noticing.
"""

from __future__ import annotations

import re
import socket
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import IntegrityError, KeyExists, KeyNotFound, UsageError
from resilient.format.document import RECORD_BYTES_MAX, seal, unseal
from resilient.format.names import TAGS, CheckpointId, parse_checkpoint, parse_tag, tag_key
from resilient.showing import quoted
from resilient.vault.access.fetch import fetch
from resilient.vault.registry.generations import create_record

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.storage.store import Store

_FORMAT = "resilient-tag"
_VERSION = 1
_NEAR_MAX = 40


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for a checkpoint.

    Attributes:
        name: of the grammar of :mod:`resilient.format.names`.
        checkpoint: what it names; it may be gone if a person removed it by hand.
        created_at: UTC, ISO 8601.
        host: name of the machine that created it.
        token: unique to the creation, so that a lost answer can be settled by reading back.
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
    found = (parse_tag(entry.key) for entry in store.list(TAGS))
    return tuple(sorted(name for name in found if name))


def read_tag(store: Store, name: str) -> Tag:
    """Return one tag, proved.

    Crash: reads only.

    Raises:
        KeyNotFound: there is none of this name.
        IntegrityError: it is damaged, or of a version that this release does not read.
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
            f"`{key}`: not a tag that this release reads",
            key=key,
            hint=f"resilient ckpt untag {name}",
        )
    return Tag(name, checkpoint, *map(str, texts))


def read_tags(store: Store) -> list[Tag]:
    """Return all tags, in the order of names; one that vanishes meanwhile is left out.

    Crash: reads only.

    Raises:
        IntegrityError: one is damaged, so it is unknown what it protects.
    """
    found = []
    for name in list_tags(store):
        try:
            found.append(read_tag(store, name))
        except KeyNotFound:
            continue
    return found


def create_tag(store: Store, name: str, checkpoint: CheckpointId, clock: Clock) -> Tag:
    """Give a committed checkpoint a name; to give it the same name again changes nothing.

    A rotation that had decided before the tag came may delete the checkpoint all the same; the
    look at the manifest afterwards finds that, unless the rotation is between its own last look
    and its delete (docs/guarantees.md).

    Crash: the tag is there, whole, or not.

    Args:
        store: the repository.
        name: letters, digits, ``.``, ``_`` and ``-``; nothing that means a checkpoint already.
        checkpoint: what to name.
        clock: gives ``created_at``.

    Raises:
        UsageError: the name is not accepted or names another checkpoint, or the checkpoint is
            not there.
        StoreError: the store failed; the tag may be there, and if so it is whole.
    """
    if parse_tag(tag_key(name)) != name:
        raise UsageError(
            f"`{name}` cannot be a tag: use letters, digits, `.`, `_`, `-`, and nothing that "
            "means a checkpoint already, like `latest` or a number",
            hint=f"resilient ckpt tag {checkpoint} {quoted(_near(name))} {quoted(store.url)}",
        )
    _require_committed(store, checkpoint)
    tag = Tag(name, checkpoint, clock.now_iso(), socket.gethostname(), uuid.uuid4().hex)
    try:
        create_record(store, tag_key(name), seal(tag.to_json()))
    except KeyExists as error:
        there = read_tag(store, name)
        if there.checkpoint == checkpoint:
            return there
        raise UsageError(
            f"tag `{name}` names {there.checkpoint} already; nothing was changed",
            hint=f"resilient ckpt untag {name}, and then give it to {checkpoint}",
        ) from error
    try:
        _require_committed(store, checkpoint)
    except UsageError:
        store.delete(tag_key(name))
        raise
    return tag


def remove_tag(store: Store, name: str) -> CheckpointId | None:
    """Take a name away; its checkpoint stays until a rotation lets it go.

    Crash: the tag is there, whole, or gone.

    Returns:
        What it named; None if that cannot be read.

    Raises:
        UsageError: there is no such tag.
        StoreError: the store failed; the tag is there or gone.
    """
    if name not in list_tags(store):
        raise UsageError(
            f"no tag `{name}` at {store.url}", hint=f"resilient ckpt ls {quoted(store.url)}"
        )
    try:
        named = read_tag(store, name).checkpoint
    except (IntegrityError, KeyNotFound):
        named = None
    store.delete(tag_key(name))
    return named


def _require_committed(store: Store, checkpoint: CheckpointId) -> None:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound as error:
        raise UsageError(
            f"cannot tag {checkpoint}: it is not committed at {store.url}, or was rotated away",
            hint=f"resilient ckpt ls {quoted(store.url)}",
        ) from error


def _near(name: str) -> str:
    """Return a name that can be a tag, as near as there is to one that cannot."""
    near = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_NEAR_MAX]
    return near if parse_tag(tag_key(near)) == near else f"tag-{near}".strip("-")
